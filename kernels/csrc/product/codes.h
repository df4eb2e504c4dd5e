// Integers of 4 or 8 bits as vectors, from bytes that hold them one after the other, the lowest bits first.
#pragma once

#include <cstdint>

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// `lanes` codes of 8 bits.
inline vint codes_of_8_bits(const uint8_t* from) {
  typedef uint8_t vbytes __attribute__((vector_size(lanes)));
  vbytes bytes;
  std::memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(bytes, vint);
}

// `lanes` codes of 4 bits.
inline vint codes_of_4_bits(const uint8_t* from) {
#if defined(__AVX2__)
  // Eight lanes take their bits from one word by shifts; of two words the first is for the first eight lanes.
  uint32_t words[lanes / 8];
  std::memcpy(words, from, sizeof words);
  vint all = vint{} + static_cast<int32_t>(words[0]);
  if constexpr (lanes > 8) all = indices([](int i) { return i; }) < 8 ? all : vint{} + static_cast<int32_t>(words[lanes / 8 - 1]);
  return (all >> indices([](int i) { return i % 8 * 4; })) & 15;
#else
  // SSE has no shift by another distance for each lane: a product brings the bits of all lanes to one place.
  static_assert(lanes == 4, "a vector of codes is two bytes");
  uint16_t word;
  std::memcpy(&word, from, sizeof word);
  const vint all = vint{} + static_cast<int32_t>(word);
  return ((all * indices([](int i) { return 1 << (12 - 4 * i); })) >> 12) & 15;
#endif
}

template <int bits>
inline vint codes_at(const uint8_t* from) {
  static_assert(bits == 4 || bits == 8, "codes of other sizes are read otherwise");
  if constexpr (bits == 8)
    return codes_of_8_bits(from);
  else
    return codes_of_4_bits(from);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
