// The ops of one level, under a name that the library can choose by.
#include "families.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace onnxtrain {

void JOIN(add_, ONNXTRAIN_LEVEL)(Domain& domain) { ONNXTRAIN_LEVEL::add_all(domain); }

}  // namespace onnxtrain
