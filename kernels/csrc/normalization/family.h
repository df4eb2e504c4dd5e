// What the normalisations share.
#pragma once

#include <algorithm>

#include "core/op.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Into how many parts rows are cut: what is not worth a thread stays whole.
inline std::size_t row_parts(const Threads& threads, std::size_t rows, std::size_t n) {
  constexpr std::size_t worthwhile = 8192;  // elements
  return std::clamp<std::size_t>(rows * n / worthwhile, 1, std::min(threads.width(), std::max<std::size_t>(rows, 1)));
}

void add_batch_norm(Domain& domain);
void add_batch_norm_pool(Domain& domain);
void add_layer_norm(Domain& domain);
void add_rms_norm(Domain& domain);
void add_group_norm(Domain& domain);
void add_instance_norm(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
