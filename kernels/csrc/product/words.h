// AVX512_BF16: instructions that round pairs of numbers to bfloat16 and multiply these. HAS_PAIRS says whether this level
// has them.
#pragma once

#include <cstddef>

#if defined(ONNXTRAIN_BFLOAT16) && defined(__AVX512BW__)
#define HAS_PAIRS 1
#define WITH_PAIRS __attribute__((target("avx512bf16")))
#include <immintrin.h>
#endif

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Whether this level and this processor have the instructions.
bool pairs_supported();

#if defined(HAS_PAIRS)

// A mask of the first of 16 lanes.
inline __mmask16 first_lanes(size_t count) { return static_cast<__mmask16>(count >= 16 ? 0xffff : (1u << count) - 1); }

// 32 neighbours, of which `count` are there, as 16 words.
WITH_PAIRS inline __m512i along(const float* from, size_t count) {
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(count), from);
  const __m512 high = count > 16 ? _mm512_maskz_loadu_ps(first_lanes(count - 16), from + 16) : _mm512_setzero_ps();
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

// 16 columns of two rows, the second of which may be missing, as 16 words.
WITH_PAIRS inline __m512i across(const float* even, const float* odd, size_t count) {
  const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512 low = _mm512_maskz_loadu_ps(first_lanes(count), even);
  const __m512 high = odd ? _mm512_maskz_loadu_ps(first_lanes(count), odd) : _mm512_setzero_ps();
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
}

#endif

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
