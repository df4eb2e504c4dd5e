// What each file of the family adds.
#pragma once

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

void add_embedding(Domain& domain);
void add_extrema(Domain& domain);
void add_rows(Domain& domain);
void add_transpose(Domain& domain);

inline void add_indexing(Domain& domain) {
  add_embedding(domain);
  add_extrema(domain);
  add_rows(domain);
  add_transpose(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
