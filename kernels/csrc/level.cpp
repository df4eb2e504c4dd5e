// The ops of one level, and its other functions, under names that the library can choose by.
#include "families.h"
#include "random/bernoulli.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

namespace onnxtrain {

void JOIN(add_, ONNXTRAIN_LEVEL)(Domain& domain) { ONNXTRAIN_LEVEL::add_all(domain); }

void JOIN(draw_bernoulli_, ONNXTRAIN_LEVEL)(unsigned char* generator, double p, uint8_t* to, size_t n) {
  ONNXTRAIN_LEVEL::draw_bernoulli(generator, p, to, n);
}

}  // namespace onnxtrain
