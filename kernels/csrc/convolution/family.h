// What convolutional nets need, per level.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_convolutions(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
