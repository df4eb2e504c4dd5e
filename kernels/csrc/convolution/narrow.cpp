#include "convolution/narrow.h"

#include <algorithm>
#include <stdexcept>

namespace onnxtrain::ONNXTRAIN_LEVEL {

#if defined(HAS_PAIRS)

namespace {

struct PairTile {
  template <int Rows, int Vectors>
  WITH_PAIRS static void run(int64_t depth, const float* a, int64_t a_step, int64_t a_row, const float* b, int64_t b_step,
                             float* to, int64_t to_row, bool add) {
    __m512 sums[Rows][Vectors];
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] = _mm512_setzero_ps();
    for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
      __m512bh column[Vectors];
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) column[v] = (__m512bh)_mm512_loadu_ps(b + v * 16);
#pragma GCC unroll 16
      for (int r = 0; r < Rows; ++r) {
        const __m512bh factor = (__m512bh)_mm512_set1_ps(a[r * a_row]);
#pragma GCC unroll 4
        for (int v = 0; v < Vectors; ++v) sums[r][v] = _mm512_dpbf16_ps(sums[r][v], factor, column[v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) {
        float* const at = to + r * to_row + v * 16;
        _mm512_storeu_ps(at, add ? _mm512_loadu_ps(at) + sums[r][v] : sums[r][v]);
      }
  }
};

constexpr auto tiles = all_tiles<PairTile>();

constexpr int64_t block = 4096;  // positions of a row that are worth a thread's while, with some more of them

// Positions [begin, end) of two rows, the second of which may be missing.
WITH_PAIRS void pair_row(const float* even, const float* odd, int64_t begin, int64_t end, float* to) {
  for (int64_t i = begin; i < end; i += 16) {
    const size_t count = static_cast<size_t>(end - i);
    _mm512_mask_storeu_epi32(to + i, first_lanes(count), across(even + i, odd ? odd + i : nullptr, count));
  }
}

}  // namespace

void pair(const float* from, int64_t count, int64_t inner, float* to) {
  for (int64_t n = 0; n < count; n += 2) {
    const float* const even = from + n * inner;
    pair_row(even, n + 1 < count ? even + inner : nullptr, 0, inner, to + n / 2 * inner);
  }
}

void pair(const Threads& threads, const float* from, int64_t outer, int64_t count, int64_t inner, float* to) {
  const int64_t pairs = pairs_of(count), blocks = (inner + block - 1) / block;
  threads.ranges(static_cast<size_t>(outer * pairs * blocks), 4, [&](size_t begin, size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t row = i / blocks, n = row % pairs * 2, first = i % blocks * block;
      const float* const even = from + (row / pairs * count + n) * inner;
      pair_row(even, n + 1 < count ? even + inner : nullptr, first, std::min(inner, first + block), to + row * inner);
    }
  });
}

Tile pair_tile_of(int64_t rows, int64_t vectors) { return tiles[rows - 1][vectors - 1]; }

#else

namespace {
[[noreturn]] void refuse() { throw std::logic_error("this processor has no products of bfloat16"); }
}  // namespace

void pair(const Threads&, const float*, int64_t, int64_t, int64_t, float*) { refuse(); }
void pair(const float*, int64_t, int64_t, float*) { refuse(); }
Tile pair_tile_of(int64_t, int64_t) { refuse(); }

#endif

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
