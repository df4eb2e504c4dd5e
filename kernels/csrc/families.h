// What each family adds to a session's domain; one set of these per level.
#pragma once

#include "activation/family.h"
#include "attention/family.h"
#include "convolution/family.h"
#include "core/op.h"
#include "indexing/family.h"
#include "normalization/family.h"
#include "product/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_elementwise(Domain& domain);
void add_gradient_norms(Domain& domain);
void add_losses(Domain& domain);
void add_max_pool(Domain& domain);
void add_window_spread(Domain& domain);
void add_optimizers(Domain& domain);
void add_recurrent(Domain& domain);
void add_column_sums(Domain& domain);
void add_running_sums(Domain& domain);

inline void add_all(Domain& domain) {
  add_pointwise(domain);
  add_softmax(domain);
  add_elementwise(domain);
  add_attention(domain);
  add_attention_gradient(domain);
  add_rotary(domain);
  add_convolutions(domain);
  add_max_pool(domain);
  add_window_spread(domain);
  add_batch_norm(domain);
  add_layer_norm(domain);
  add_rms_norm(domain);
  add_group_norm(domain);
  add_instance_norm(domain);
  add_indexing(domain);
  add_losses(domain);
  add_optimizers(domain);
  add_gradient_norms(domain);
  add_recurrent(domain);
  add_column_sums(domain);
  add_running_sums(domain);
  add_matrix_products(domain);
  add_bfloat16_products(domain);
  add_quantized_products(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
