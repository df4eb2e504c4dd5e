// The ops of activations and normalised exponentials.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_pointwise(Domain& domain);
void add_softmax(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
