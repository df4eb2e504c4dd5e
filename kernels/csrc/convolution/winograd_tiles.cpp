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

// Transforms the inputs of a channel from where they are. The runs of a plan are those of eight pairs of elements for each
// tap of the first axis.
void transform_directly(const Plan& what, const float* x, int64_t depth, int64_t pitch, int64_t plane, float* to) {
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  const std::size_t each = what.runs.size() / 8 / static_cast<std::size_t>(depth);
  for (std::size_t index = 0; index < static_cast<std::size_t>(depth) * each; ++index) {
    const std::size_t tap = index / each, k = index % each;
    float* const rows = to + static_cast<int64_t>(tap) * pitch;
    vfloat elements[4][4], terms[4][4];
    const Plan::Run* run = what.runs.data() + tap * 8 * each + k;
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
      _mm512_mask_storeu_ps(rows + term * plane + run->place, there, (__m512)terms[term / 4][term % 4]);
  }
}

#endif

Axes tiles_of(const Axes& out) { return {out[0], divided_up(out[1], 2), divided_up(out[2], 2)}; }

}  // namespace

Gather winograd_inputs(const Convolution& c, bool turned) {
  const int64_t size = volume(c.in);
  Gather from{c.batch, c.channels, c.groups * c.channels * size, size, c.in, tiles_of(c.out), {1, 2, 2}, {}};
  for (int64_t tap = 0; tap < c.kernel[0]; ++tap) {
    const int64_t depth = (turned ? c.kernel[0] - 1 - tap : tap) * c.dilation[0] - c.pad[0];
    for (int64_t i = 0; i < 4; ++i)
      for (int64_t j = 0; j < 4; ++j) from.taps.push_back({depth, i - c.pad[1], j - c.pad[2]});
  }
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
  const int64_t depth = static_cast<int64_t>(from.taps.size()) / winograd_terms, plane = (last - first) * depth * pitch;
  float* const copied = memory.floats(packed_channels * depth * winograd_terms * pitch);
#if defined(__AVX512F__)
  if (what.paired && what.picks.empty() && from.grid[2] >= long_row) {
    for (int64_t c = first; c < last; ++c)
      transform_directly(what, x + c * from.per_channel, depth, pitch, plane, to + (c - first) * depth * pitch);
    return;
  }
#endif
  for (int64_t channel = first; channel < last; channel += packed_channels) {
    const int64_t end = std::min(last, channel + packed_channels);
    pack(from, what, x, channel, end, pitch, copied);
    for (int64_t row = 0; row < (end - channel) * depth; ++row)
      for (int64_t t = 0; t < width; t += lanes) {
        const float* const tile = copied + row * winograd_terms * pitch + t;
        float* const at = to + ((channel - first) * depth + row) * pitch + t;
        winograd_transform<detail::InputMatrix>([=](int i, int j) { return tile + (i * 4 + j) * pitch; },
                                                [=](int i, int j) { return at + (i * 4 + j) * plane; });
      }
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
