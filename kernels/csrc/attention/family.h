// Attention and its gradient.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_attention(Domain& domain);
void add_attention_gradient(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
