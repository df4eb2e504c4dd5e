#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_products(Domain& domain);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
