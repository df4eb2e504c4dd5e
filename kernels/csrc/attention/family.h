// Attention, rotary position embeddings, and their gradients.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_attention(Domain& domain);
void add_attention_gradient(Domain& domain);
void add_rotary(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
