// What the normalisations share.
#pragma once

#include <algorithm>

#include "core/op.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

constexpr std::size_t worthwhile = 8192;  // elements for a thread of its own

// Into how many parts rows of n elements are cut.
inline std::size_t row_parts(std::size_t rows, std::size_t n) {
  return std::clamp<std::size_t>(rows * n / worthwhile, 1, std::clamp<std::size_t>(rows, 1, most_parts));
}

// The same where each part has a sum per column: to add these up costs as much as some rows do. Parts are whole `units`.
inline std::size_t sum_parts(std::size_t rows, std::size_t n, std::size_t units) {
  const std::size_t most = std::min(std::clamp<std::size_t>(rows / 64, 2, 16), std::max<std::size_t>(units, 1));
  return std::clamp<std::size_t>(rows * n / worthwhile, 1, most);
}

void add_batch_norm(Domain& domain);
void add_batch_norm_pool(Domain& domain);
void add_layer_norm(Domain& domain);
void add_rms_norm(Domain& domain);
void add_group_norm(Domain& domain);
void add_instance_norm(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
