#include "convolution/gather.h"

#include <algorithm>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

// Up to a vector of one row of a panel: elements [low, high) are x[source + distance * i], the others zero. Whole vectors
// are written: what follows is written later.
struct Run {
  int64_t source;
  int32_t place, low, high;
};

#if defined(__AVX512F__)

inline uint32_t first_bits(int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; }

inline void copy(const float* from, const Run& run, float* to) {
  const auto mask = static_cast<__mmask16>(first_bits(run.high) & ~first_bits(run.low));
  _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(mask, from));
}

// Every other element of two vectors, of which nothing is read but what is wanted.
inline void copy_halved(const float* from, const Run& run, float* to) {
  const uint32_t wanted = (run.high > run.low ? first_bits(2 * run.high - 1) : 0) & ~first_bits(2 * run.low);
  const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(wanted), from);
  const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(wanted >> 16), from + 16);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, even, b));
}

#elif defined(__AVX2__)

inline void copy(const float* from, const Run& run, float* to) {
  const __m256i places = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(run.high), places);
  const __m256i above = _mm256_cmpgt_epi32(places, _mm256_set1_epi32(run.low - 1));
  _mm256_storeu_ps(to, _mm256_maskload_ps(from, _mm256_and_si256(below, above)));
}

#else

inline void copy(const float* from, const Run& run, float* to) {
  vfloat v{};
  for (int i = run.low; i < run.high; ++i) v[i] = from[i];
  store(to, v);
}

#endif

inline void copy_apart(const float* from, int64_t distance, const Run& run, float* to) {
  float values[lanes] = {};
  for (int i = run.low; i < run.high; ++i) values[i] = from[i * distance];
  store(to, load(values));
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

void pack(const Gather& from, const float* x, int64_t first, int64_t last, int64_t begin, int64_t width, int64_t pitch,
          float* panel) {
  thread_local std::vector<Segment> segments;
  thread_local std::vector<Run> runs;
  constexpr int64_t n = lanes;
  cut(from.grid, from.batch, begin, width, segments);
  runs.clear();
  for (const Axes& tap : from.taps) {
    int64_t filled = 0;
    for (const Segment& s : segments) {
      const int64_t a = s.row0 * from.step[0] + tap[0], b = s.row1 * from.step[1] + tap[1];
      const bool there = a >= 0 && a < from.in[0] && b >= 0 && b < from.in[1];
      const int64_t row = s.sample * from.per_sample + (a * from.in[1] + b) * from.in[2];
      for (int64_t i = 0; i < s.length; i += n) {
        const int64_t column = (s.column + i) * from.step[2] + tap[2], length = std::min(n, s.length - i);
        int64_t low = 0, high = 0;
        if (there) inside(column, from.step[2], from.in[2], length, low, high);
        // Nothing outside of x is pointed at where nothing is read.
        const int64_t source = high > low ? row + column : 0;
        runs.push_back({source, static_cast<int32_t>(s.place + i), static_cast<int32_t>(low), static_cast<int32_t>(high)});
      }
      filled = s.place + s.length;
    }
    for (; filled < width; filled += n) runs.push_back({0, static_cast<int32_t>(filled), 0, 0});
  }
  const std::size_t per_tap = runs.size() / from.taps.size();
  for (int64_t c = first; c < last; ++c) {
    const float* const source = x + c * from.per_channel;
    const Run* run = runs.data();
    for (std::size_t tap = 0; tap < from.taps.size(); ++tap, panel += pitch) {
      const Run* const end = run + per_tap;
      if (from.step[2] == 1)
        for (; run < end; ++run) copy(source + run->source, *run, panel + run->place);
#if defined(__AVX512F__)
      else if (from.step[2] == 2)
        for (; run < end; ++run) copy_halved(source + run->source, *run, panel + run->place);
#endif
      else
        for (; run < end; ++run) copy_apart(source + run->source, from.step[2], *run, panel + run->place);
    }
  }
}

void prefetch(const Gather& from, const float* x, int64_t first, int64_t last, int64_t begin, int64_t width) {
  constexpr int64_t line = 64 / sizeof(float);
  const int64_t plane = volume(from.grid), sample = begin / plane, row = begin % plane / from.grid[2];
  const int64_t in_row = row % from.grid[1] * from.step[1], in_slice = row / from.grid[1] * from.step[0];
  const int64_t start = (in_slice * from.in[1] + in_row) * from.in[2] + begin % from.grid[2] * from.step[2];
  const int64_t end = std::min(volume(from.in), start + width * from.step[1] * from.step[2]);
  for (int64_t c = first; c < last; ++c)
    for (int64_t i = start; i < end; i += line)
      __builtin_prefetch(x + sample * from.per_sample + c * from.per_channel + i);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
