// What each family adds to a session's domain; one set of these per level.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_activations(Domain& domain);

inline void add_all(Domain& domain) {
  add_activations(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
