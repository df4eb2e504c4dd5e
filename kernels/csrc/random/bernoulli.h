// Bernoulli draws of PyTorch's CPU generator.
#pragma once

#include <cstddef>
#include <cstdint>

namespace onnxtrain::ONNXTRAIN_LEVEL {

void draw_bernoulli(unsigned char* generator, double p, uint8_t* to, size_t n);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
