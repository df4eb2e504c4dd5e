// What each family adds to a session's domain; one set of these per level.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_activations(Domain& domain);
void add_recurrent(Domain& domain);

inline void add_all(Domain& domain) {
  add_activations(domain);
  add_recurrent(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
