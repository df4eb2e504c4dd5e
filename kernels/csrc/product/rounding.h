// Numbers of bfloat16 as floats: those whose lower half is zero.
#pragma once

#include "core/rows.h"
#include "core/threads.h"

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

// Of vectors of pairs of such numbers, the first of each in the low half: what each pair adds up to.
inline vfloat sum_of_pairs(vfloat pairs) {
  typedef uint32_t vbits __attribute__((vector_size(lanes * sizeof(uint32_t))));
  vbits bits;
  std::memcpy(&bits, &pairs, sizeof bits);
  const vbits low = bits << 16, high = bits & 0xffff0000u;
  vfloat first, second;
  std::memcpy(&first, &low, sizeof low);
  std::memcpy(&second, &high, sizeof high);
  return first + second;
}

inline void round_to_bfloat16(const Threads& threads, const float* from, size_t count, float* to) {
  threads.ranges(count, 32768, [&](size_t begin, size_t end) {
    vectors(end - begin, [&](size_t i, auto extent) {
      store(to + begin + i, rounded_to_bfloat16(load(from + begin + i, extent)), extent);
    });
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
