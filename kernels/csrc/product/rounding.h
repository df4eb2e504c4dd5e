// Numbers of bfloat16 as floats: those whose lower half is zero.
#pragma once

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// The nearest number of bfloat16, of two that are as near the even one; what is not a number stays so.
inline vfloat rounded_to_bfloat16(vfloat x) {
  typedef uint32_t vbits __attribute__((vector_size(lanes * sizeof(uint32_t))));
  vbits bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits = (bits + 0x7fffu + (bits >> 16 & 1u)) & 0xffff0000u;
  vfloat y;
  std::memcpy(&y, &bits, sizeof y);
  return select(x == x, y, x);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
