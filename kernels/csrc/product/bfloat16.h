// C = alpha A B + summand, with A and B rounded to bfloat16 (to nearest, ties to even) and all else in float32.
#pragma once

#include "core/gemm.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// What is added to C, times `factor`: element (i, j) is data[i * row + j * column]; nothing where data is null.
struct Summand {
  const float* data = nullptr;
  ptrdiff_t row = 0, column = 0;
  float factor = 1;
};

// C [rows, columns], whose rows lie side by side; A is [rows, depth], B is [depth, columns].
void product_in_bfloat16(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c,
                         float alpha = 1, const Summand& summand = {});

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
