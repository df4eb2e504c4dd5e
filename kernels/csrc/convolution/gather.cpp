#include "convolution/gather.h"

#include <algorithm>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

// One row of one segment under one tap: elements [low, high) of it are `source + distance * i`, the others zero.
struct Run {
  int64_t source, low, high, length, place;
};

// Elements [low, high) of `to` from consecutive ones of `from`, zeros before and behind. Whole vectors are written:
// what follows is written later.
inline void copy(const float* from, int64_t low, int64_t high, int64_t length, float* to) {
  constexpr int64_t n = lanes;
  for (int64_t i = 0; i < length; i += n) {
    if (i >= low && i + n <= high) {
      store(to + i, load(from + i));
      continue;
    }
#if defined(__AVX512F__)
    const int64_t a = std::clamp<int64_t>(low - i, 0, n), b = std::clamp<int64_t>(high - i, 0, n);
    const auto mask = static_cast<__mmask16>(((1u << b) - 1) & ~((1u << a) - 1));
    _mm512_storeu_ps(to + i, _mm512_maskz_loadu_ps(mask, from + i));
#else
    for (int64_t j = i; j < std::min(i + n, length); ++j) to[j] = j >= low && j < high ? from[j] : 0.f;
#endif
  }
}

inline void copy_strided(
    const float* from, int64_t distance, int64_t low, int64_t high, int64_t length, float* to) {
  for (int64_t i = 0; i < low; ++i) to[i] = 0.f;
  int64_t i = low;
#if defined(__AVX512F__)
  if (distance == 2) {  // every other element of two vectors, the second of which ends with the last one wanted
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    for (; i < high; i += 16) {
      const int64_t count = 2 * std::min<int64_t>(high - i, 16) - 1;  // 1 to 31 floats
      const auto a = static_cast<__mmask16>(count >= 16 ? 0xffffu : (1u << count) - 1);
      const auto b = static_cast<__mmask16>(count > 16 ? (1u << (count - 16)) - 1 : 0u);
      const __m512 first = _mm512_maskz_loadu_ps(a, from + 2 * i), second = _mm512_maskz_loadu_ps(b, from + 2 * i + 16);
      _mm512_storeu_ps(to + i, _mm512_permutex2var_ps(first, even, second));
    }
    i = high;
  }
#endif
  for (; i < high; ++i) to[i] = from[i * distance];
  for (i = std::max(low, high); i < length; ++i) to[i] = 0.f;
}

// Which of `length` positions from `start` on, `step` apart, lie in [0, size).
inline void inside(int64_t start, int64_t step, int64_t size, int64_t length, int64_t& low, int64_t& high) {
  low = start >= 0 ? 0 : std::min(length, (-start + step - 1) / step);
  high = start >= size ? 0 : std::min(length, (size - start + step - 1) / step);
  if (high < low) low = high = 0;
}

}  // namespace

void cut(const Axes& grid, int64_t batch, int64_t begin, int64_t width, std::vector<Segment>& segments) {
  segments.clear();
  const int64_t total = batch * volume(grid), end = std::min(total, begin + width);
  if (begin >= end) return;
  int64_t column = begin % grid[2], rest = begin / grid[2];
  int64_t row1 = rest % grid[1];
  rest /= grid[1];
  int64_t row0 = rest % grid[0], sample = rest / grid[0];
  for (int64_t at = begin; at < end;) {
    const int64_t length = std::min(grid[2] - column, end - at);
    segments.push_back({sample, row0, row1, column, length, at - begin});
    at += length;
    column = 0;
    if (++row1 == grid[1]) row1 = 0, ++row0;
    if (row0 == grid[0]) row0 = 0, ++sample;
  }
}

void pack(const Gather& from, const float* x, int64_t first, int64_t last, int64_t begin, int64_t width, float* panel) {
  thread_local std::vector<Segment> segments;
  thread_local std::vector<Run> runs;
  cut(from.grid, from.batch, begin, width, segments);
  runs.clear();
  for (const Axes& tap : from.taps) {
    int64_t filled = 0;
    for (const Segment& s : segments) {
      const int64_t a = s.row0 * from.step[0] + tap[0], b = s.row1 * from.step[1] + tap[1];
      const int64_t column = s.column * from.step[2] + tap[2];
      Run run{0, 0, 0, s.length, s.place};
      if (a >= 0 && a < from.in[0] && b >= 0 && b < from.in[1])
        inside(column, from.step[2], from.in[2], s.length, run.low, run.high);
      run.source = s.sample * from.per_sample + (a * from.in[1] + b) * from.in[2] + column;
      runs.push_back(run);
      filled = s.place + s.length;
    }
    if (filled < width) runs.push_back({0, 0, 0, width - filled, filled});
  }
  const std::size_t per_tap = runs.size() / from.taps.size();
  for (int64_t c = first; c < last; ++c) {
    const float* source = x + c * from.per_channel;
    const Run* run = runs.data();
    for (std::size_t tap = 0; tap < from.taps.size(); ++tap, panel += width)
      for (std::size_t i = 0; i < per_tap; ++i, ++run) {
        // No pointer outside of x: an empty run has none.
        const float* at = run->high > run->low ? source + run->source : x;
        if (from.step[2] == 1 || run->high <= run->low)
          copy(at, run->low, run->high, run->length, panel + run->place);
        else
          copy_strided(at, from.step[2], run->low, run->high, run->length, panel + run->place);
      }
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
