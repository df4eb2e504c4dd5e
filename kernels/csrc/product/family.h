#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_matrix_products(Domain& domain);
void add_bfloat16_products(Domain& domain);
void add_quantized_products(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
