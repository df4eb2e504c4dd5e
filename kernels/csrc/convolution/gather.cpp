#include "convolution/gather.h"

#include <algorithm>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

using Run = Plan::Run;

#if defined(__AVX512F__)

inline void copy(const float* from, const Run& run, float* to) {
  _mm512_storeu_ps(to, _mm512_maskz_loadu_ps(static_cast<__mmask16>(run.bits), from));
}

// Every other element of two vectors, of which nothing is read but what is wanted.
inline void copy_halved(const float* from, const Run& run, float* to) {
  const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(run.bits), from);
  const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(run.bits >> 16), from + 16);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  _mm512_storeu_ps(to, _mm512_permutex2var_ps(a, even, b));
}

// Both halves of them: those of a tap, whose row ends before the other's begins, and of the tap beside it.
inline void copy_halves(const float* from, const Run& run, float* first, float* second) {
  const __m512 a = _mm512_maskz_loadu_ps(static_cast<__mmask16>(run.bits), from);
  const __m512 b = _mm512_maskz_loadu_ps(static_cast<__mmask16>(run.bits >> 16), from + 16);
  const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
  const __m512i odd = _mm512_set_epi32(31, 29, 27, 25, 23, 21, 19, 17, 15, 13, 11, 9, 7, 5, 3, 1);
  _mm512_mask_storeu_ps(first, static_cast<__mmask16>((1u << run.high) - 1), _mm512_permutex2var_ps(a, even, b));
  _mm512_storeu_ps(second, _mm512_permutex2var_ps(a, odd, b));
}

inline void copy_picks(const float* from, const Plan::Picks& picks, float* to) {
  const __m512i places = _mm512_loadu_si512(picks.sources);
  _mm512_storeu_ps(to, _mm512_mask_i32gather_ps(_mm512_setzero_ps(), static_cast<__mmask16>(picks.bits), places, from, 4));
}

#else

#if defined(__AVX2__)

inline void copy(const float* from, const Run& run, float* to) {
  const __m256i places = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
  const __m256i below = _mm256_cmpgt_epi32(_mm256_set1_epi32(run.high), places);
  const __m256i above = _mm256_cmpgt_epi32(places, _mm256_set1_epi32(run.low - 1));
  _mm256_storeu_ps(to, _mm256_maskload_ps(from, _mm256_and_si256(below, above)));
}

#else

inline void copy(const float* from, const Run& run, float* to) {
  if (run.low == 0 && run.high == static_cast<int>(lanes)) return store(to, load(from));
  float values[lanes] = {};
  for (int i = run.low; i < run.high; ++i) values[i] = from[i];
  store(to, load(values));
}

#endif

// Every other element of two vectors, of which nothing is read but what is wanted: the second one ends with that.
inline void copy_halved(const float* from, const Run& run, float* to) {
  constexpr int n = lanes;
  if (run.low == 0 && run.high == n)
    return store(to, shuffle(load(from), load(from + n - 1), indices([](int i) { return 2 * i < n ? 2 * i : 2 * i + 1; })));
  float values[lanes] = {};
  for (int i = run.low; i < run.high; ++i) values[i] = from[2 * i];
  store(to, load(values));
}

// Both halves of them: those of a tap, whose row ends before the other's begins, and of the tap beside it.
inline void copy_halves(const float* from, const Run& run, float* first, float* second) {
  constexpr uint32_t all = (uint64_t{1} << 2 * lanes) - 1;
  vfloat a, b;
  if (run.bits == all) {
    a = load(from), b = load(from + lanes);
  } else {
    float values[2 * lanes] = {};
    if (run.bits != 0)
      for (int i = __builtin_ctz(run.bits); i < 32 - __builtin_clz(run.bits); ++i) values[i] = from[i];
    a = load(values), b = load(values + lanes);
  }
  store_some(first, even(a, b), static_cast<std::size_t>(run.high));
  store(second, odd(a, b));
}

inline void copy_picks(const float* from, const Plan::Picks& picks, float* to) {
  for (std::size_t i = 0; i < lanes; ++i) to[i] = picks.bits >> i & 1 ? from[picks.sources[i]] : 0.f;
}

#endif

inline void copy_apart(const float* from, int64_t distance, const Run& run, float* to) {
  float values[lanes] = {};
  for (int i = run.low; i < run.high; ++i) values[i] = from[i * distance];
  store(to, load(values));
}

// Which of `length` positions from `start` on, `step` apart, lie in [0, size).
inline void inside(int64_t start, int64_t step, int64_t size, int64_t length, int64_t& low, int64_t& high) {
  if (step == 1) {  // without divisions, which take most of the time of a plan
    low = std::clamp<int64_t>(-start, 0, length);
    high = std::clamp<int64_t>(size - start, low, length);
    return;
  }
  const auto steps = [=](int64_t distance) { return step == 2 ? (distance + 1) / 2 : (distance + step - 1) / step; };
  low = start >= 0 ? 0 : std::min(length, steps(-start));
  high = start >= size ? 0 : std::min(length, steps(size - start));
  if (high < low) low = high = 0;
}

// The bits from `low` on below `high`.
uint32_t bits_of(int64_t low, int64_t high) {
  const auto below = [](int64_t count) { return count >= 32 ? ~0u : (1u << count) - 1; };
  return high > low ? below(high) & ~below(low) : 0;
}

// Whether taps come in pairs that together are all inputs of a row.
bool in_pairs(const Gather& from) {
  if (from.step[2] != 2 || from.taps.size() % 2 != 0) return false;
  for (std::size_t i = 0; i < from.taps.size(); i += 2) {
    const Axes &a = from.taps[i], &b = from.taps[i + 1];
    if (a[0] != b[0] || a[1] != b[1] || a[2] + 1 != b[2]) return false;
  }
  return true;
}

// Whether rows of the grid are so short that elements are better picked one by one, in vectors much longer than rows.
bool picks_pay(const Gather& from) {
  return lanes > 8 && from.grid[2] <= 4 && from.taps.size() > 1 && from.batch * from.per_sample < int64_t{1} << 31;
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

namespace {

// Where the inputs of a segment lie that a tap reads: the place of the first of a row of x, which may not be there.
struct Row {
  bool there;
  int64_t start;
};

Row row_of(const Gather& from, const Axes& tap, const Segment& s) {
  const int64_t a = s.row0 * from.step[0] + tap[0], b = s.row1 * from.step[1] + tap[1];
  return {a >= 0 && a < from.in[0] && b >= 0 && b < from.in[1],
          s.sample * from.per_sample + (a * from.in[1] + b) * from.in[2]};
}

void plan_picks(const Gather& from, const std::vector<Segment>& segments, int64_t width, Plan& what) {
  constexpr int64_t n = lanes;
  const int64_t vectors = (width + n - 1) / n;
  what.picks.assign(from.taps.size() * static_cast<std::size_t>(vectors), Plan::Picks{});
  Plan::Picks* picks = what.picks.data();
  for (const Axes& tap : from.taps) {
    for (const Segment& s : segments) {
      const Row row = row_of(from, tap, s);
      const int64_t column = s.column * from.step[2] + tap[2];
      int64_t low = 0, high = 0;
      if (row.there) inside(column, from.step[2], from.in[2], s.length, low, high);
      for (int64_t k = low; k < high; ++k) {
        const int64_t place = s.place + k;
        picks[place / n].sources[place % n] = static_cast<int32_t>(row.start + column + k * from.step[2]);
        picks[place / n].bits |= 1u << place % n;
      }
    }
    picks += vectors;
  }
}

// Of each tap, or pair of taps, as many runs: those of the segments, and zeros behind the last one.
void plan_runs(const Gather& from, const std::vector<Segment>& segments, int64_t width, Plan& what) {
  constexpr int64_t n = lanes;
  const std::size_t each = what.paired ? 2 : 1;
  const int64_t filled = segments.empty() ? 0 : segments.back().place + segments.back().length, step = from.step[2];
  int64_t count = (width - filled + n - 1) / n;
  for (const Segment& s : segments) count += (s.length + n - 1) / n;
  what.runs.resize(from.taps.size() / each * static_cast<std::size_t>(count));
  Run* run = what.runs.data();
  for (std::size_t index = 0; index < from.taps.size(); index += each) {
    const Axes& tap = from.taps[index];
    for (const Segment& s : segments) {
      const Row row = row_of(from, tap, s);
      for (int64_t i = 0; i < s.length; i += n) {
        const int64_t column = (s.column + i) * step + tap[2], length = std::min(n, s.length - i);
        int64_t low = 0, high = 0;
        // Nothing outside of x is pointed at where nothing is read.
        uint32_t bits;
        int64_t source;
        if (what.paired) {
          if (row.there) inside(column, 1, from.in[2], 2 * length, low, high);
          bits = bits_of(low, high);
          source = high > low ? row.start + column : 0;
          low = 0, high = length;
        } else {
          if (row.there) inside(column, step, from.in[2], length, low, high);
          bits = step <= 2 ? bits_of(step * low, step * (high - 1) + 1) : bits_of(low, high);
          source = high > low ? row.start + column : 0;
        }
        *run++ = {source, static_cast<int32_t>(s.place + i), bits, static_cast<int32_t>(low), static_cast<int32_t>(high)};
      }
    }
    for (int64_t place = filled; place < width; place += n) {
      const int64_t length = what.paired ? std::min(n, width - place) : 0;
      *run++ = {0, static_cast<int32_t>(place), 0, 0, static_cast<int32_t>(length)};
    }
  }
}

}  // namespace

void plan(const Gather& from, int64_t begin, int64_t width, Plan& what) {
  thread_local std::vector<Segment> segments;
  cut(from.grid, from.batch, begin, width, segments);
  what.runs.clear();
  what.picks.clear();
  what.paired = in_pairs(from);
  if (picks_pay(from))
    plan_picks(from, segments, width, what);
  else
    plan_runs(from, segments, width, what);
}

void pack(const Gather& from, const Plan& what, const float* x, int64_t first, int64_t last, int64_t pitch, float* panel) {
  const std::size_t taps = from.taps.size();
  if (!what.picks.empty()) {
    const std::size_t vectors = what.picks.size() / taps;
    for (int64_t c = first; c < last; ++c) {
      const Plan::Picks* picks = what.picks.data();
      for (std::size_t tap = 0; tap < taps; ++tap, panel += pitch)
        for (std::size_t v = 0; v < vectors; ++v) copy_picks(x + c * from.per_channel, *picks++, panel + v * lanes);
    }
    return;
  }
  const std::size_t each = what.paired ? 2 : 1, per_tap = what.runs.size() * each / taps;
  for (int64_t c = first; c < last; ++c) {
    const float* const source = x + c * from.per_channel;
    const Run* run = what.runs.data();
    for (std::size_t tap = 0; tap < taps; tap += each, panel += static_cast<int64_t>(each) * pitch) {
      const Run* const end = run + per_tap;
      if (what.paired) {
        for (; run < end; ++run) copy_halves(source + run->source, *run, panel + run->place, panel + pitch + run->place);
        continue;
      }
      if (from.step[2] == 2) {
        for (; run < end; ++run) copy_halved(source + run->source, *run, panel + run->place);
        continue;
      }
      if (from.step[2] == 1)
        for (; run < end; ++run) copy(source + run->source, *run, panel + run->place);
      else
        for (; run < end; ++run) copy_apart(source + run->source, from.step[2], *run, panel + run->place);
    }
  }
}

void pack(const Gather& from, const float* x, int64_t first, int64_t last, int64_t begin, int64_t width, int64_t pitch,
          float* panel) {
  thread_local Plan what;
  plan(from, begin, width, what);
  pack(from, what, x, first, last, pitch, panel);
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
