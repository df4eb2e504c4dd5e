#include "convolution/winograd_tiles.h"

#include <algorithm>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/scratch.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t packed_channels = 4;  // whose inputs are copied side by side before they are transformed

#if defined(__AVX512F__)

constexpr int64_t long_row = 12;  // tiles of a row that are worth transforming as one vector

// Transforms the inputs of a channel from where they are. The runs of a plan are those of eight pairs of elements.
void transform_directly(const Plan& what, const float* x, int64_t plane, float* to) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const std::size_t each = what.runs.size() / 8;
  for (std::size_t k = 0; k < each; ++k) {
    vfloat elements[4][4], terms[4][4];
    const Plan::Run* run = what.runs.data() + k;
#pragma GCC unroll 8
    for (int pair = 0; pair < 8; ++pair) {
      const Plan::Run& own = run[static_cast<std::size_t>(pair) * each];
      const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(own.bits), x + own.source);
      const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(own.bits >> 16), x + own.source + 16);
      elements[pair / 2][pair % 2 * 2] = (vfloat)_mm512_permutex2var_ps(a, even, b);
      elements[pair / 2][pair % 2 * 2 + 1] = (vfloat)_mm512_permutex2var_ps(a, odd, b);
    }
    winograd_product<detail::InputMatrix>(elements, terms);
    const auto there = static_cast<__mmask16>((1u << run->high) - 1);
#pragma GCC unroll 16
    for (int term = 0; term < winograd_terms; ++term)
      _mm512_mask_storeu_ps(to + term * plane + run->place, there, (__m512)terms[term / 4][term % 4]);
  }
}

#endif

Axes tiles_of(const Axes& out) { return {out[0], divided_up(out[1], 2), divided_up(out[2], 2)}; }

}  // namespace

Gather winograd_inputs(const Convolution& c) {
  const int64_t size = volume(c.in);
  Gather from{c.batch, c.channels, c.groups * c.channels * size, size, c.in, tiles_of(c.out), {1, 2, 2}, {}};
  for (int64_t i = 0; i < 4; ++i)
    for (int64_t j = 0; j < 4; ++j) from.taps.push_back({0, i - c.pad[1], j - c.pad[2]});
  return from;
}

Gather winograd_results(const Convolution& c) {
  const int64_t size = volume(c.out);
  return {c.batch, c.rows, c.groups * c.rows * size, size, c.out, tiles_of(c.out), {1, 2, 2},
          {{0, 0, 0}, {0, 0, 1}, {0, 1, 0}, {0, 1, 1}}};
}

void transform_inputs(const Gather& from, const Plan& what, const float* x, int64_t first, int64_t last,
                      int64_t width, int64_t pitch, float* to) {
  thread_local Scratch memory;
  float* const copied = memory.floats(packed_channels * winograd_terms * pitch);
  const int64_t plane = (last - first) * pitch;
#if defined(__AVX512F__)
  if (what.paired && what.picks.empty() && from.grid[2] >= long_row) {
    for (int64_t c = first; c < last; ++c) transform_directly(what, x + c * from.per_channel, plane, to + (c - first) * pitch);
    return;
  }
#endif
  for (int64_t channel = first; channel < last; channel += packed_channels) {
    const int64_t end = std::min(last, channel + packed_channels);
    pack(from, what, x, channel, end, pitch, copied);
    for (int64_t c = channel; c < end; ++c)
      for (int64_t t = 0; t < width; t += lanes) {
        const float* const tile = copied + (c - channel) * winograd_terms * pitch + t;
        float* const at = to + (c - first) * pitch + t;
        winograd_transform<detail::InputMatrix>([=](int i, int j) { return tile + (i * 4 + j) * pitch; },
                                                [=](int i, int j) { return at + (i * 4 + j) * plane; });
      }
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
