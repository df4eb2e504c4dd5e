#include "convolution/channels_last.h"

#include <algorithm>

#include "core/transpose.h"
#include "core/scratch.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t n = lanes;
// 24 sums, two vectors of weights and a repeated number are in 32 registers; 12 in 16.
constexpr int64_t pixels = registers == 32 ? 12 : 6, vectors = 2, width = vectors * n;
constexpr int64_t most_tiles = 8;  // of one part, which share a panel of weights in the second-level cache
// Of these sums are made first, and then of those, so that errors grow with the number of sums and not with that of terms.
constexpr int64_t most_summed = 256;

int64_t panels_of(int64_t rows) { return (rows + width - 1) / width; }

// sums [pixels][width] (+)= the sum over taps and channels [first, end) of x[place(tap, pixel) + channel] *
// weights[tap][channel].
//
// A function of its own, so that nothing else takes its registers.
__attribute__((noinline)) void multiply(int64_t taps, int64_t first, int64_t end, const float* const* places,
                                        const float* const* weights, float* sums, bool add) {
  vfloat sum[pixels][vectors] = {};
  for (int64_t t = 0; t < taps; ++t, places += pixels) {
    const float* from[pixels];
#pragma GCC unroll 16
    for (int64_t p = 0; p < pixels; ++p) from[p] = places[p] + first;
    const float* w = weights[t] + first * width;
    for (int64_t c = 0; c < end - first; ++c, w += width) {
      vfloat column[vectors];
#pragma GCC unroll 4
      for (int64_t v = 0; v < vectors; ++v) column[v] = load(w + v * n);
#pragma GCC unroll 16
      for (int64_t p = 0; p < pixels; ++p) {
        const vfloat factor = splat(from[p][c]);
#pragma GCC unroll 4
        for (int64_t v = 0; v < vectors; ++v) sum[p][v] += factor * column[v];
      }
    }
  }
#pragma GCC unroll 16
  for (int64_t p = 0; p < pixels; ++p)
#pragma GCC unroll 4
    for (int64_t v = 0; v < vectors; ++v) {
      float* const at = sums + p * width + v * n;
      store(at, add ? load(at) + sum[p][v] : sum[p][v]);
    }
}

// Where the channels begin that each tap reads, for the positions of so many tiles from `begin` on: [tile][tap][pixel].
// Positions beyond the last one read zeros.
void find_places(const Gather& from, const float* x, const float* zeros, int64_t begin, int64_t tiles,
                 std::vector<const float*>& places) {
  thread_local std::vector<Segment> segments;
  const int64_t taps = static_cast<int64_t>(from.taps.size());
  places.assign(static_cast<std::size_t>(tiles * taps * pixels), zeros);
  cut(from.grid, from.batch, begin, tiles * pixels, segments);
  for (const Segment& s : segments)
    for (int64_t t = 0; t < taps; ++t) {
      const Axes& tap = from.taps[static_cast<std::size_t>(t)];
      const int64_t a = s.row0 * from.step[0] + tap[0], b = s.row1 * from.step[1] + tap[1];
      if (a < 0 || a >= from.in[0] || b < 0 || b >= from.in[1]) continue;
      const int64_t row = ((s.sample * from.in[0] + a) * from.in[1] + b) * from.in[2];
      for (int64_t i = 0; i < s.length; ++i) {
        const int64_t column = (s.column + i) * from.step[2] + tap[2], place = s.place + i;
        if (column < 0 || column >= from.in[2]) continue;
        places[static_cast<std::size_t>((place / pixels * taps + t) * pixels + place % pixels)] = x + (row + column) * from.channels;
      }
    }
}

// to: [batch, size, channels]
void turn(const Threads& threads, int64_t batch, int64_t channels, int64_t size, const float* x, float* to) {
  const int64_t groups = (channels + n - 1) / n;
  threads.ranges(static_cast<std::size_t>(batch * groups), static_cast<std::size_t>(1 + 8192 / (1 + size * n)),
                 [&](std::size_t begin, std::size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t sample = i / groups, first = i % groups * n;
      float* const own = to + sample * size * channels + first;
      transpose_to<false>(x + (sample * channels + first) * size, size, std::min(n, channels - first), size,
                          [=](int64_t place) { return own + place * channels; });
    }
  });
}

// to: [panel][tap][channel][row of the panel]
void pack(const Threads& threads, const Rows& rows, const float* w, float* to) {
  const int64_t groups = panels_of(rows.count) * vectors, taps = static_cast<int64_t>(rows.taps.size());
  threads.ranges(static_cast<std::size_t>(groups), static_cast<std::size_t>(1 + 8192 / (1 + rows.channels * taps * n)),
                 [&](std::size_t begin, std::size_t end) {
    for (auto i = static_cast<int64_t>(begin); i < static_cast<int64_t>(end); ++i) {
      const int64_t first = i * n, count = std::clamp<int64_t>(rows.count - first, 0, n);
      float* const own = to + i / vectors * taps * rows.channels * width + i % vectors * n;
      for (int64_t c = 0; c < rows.channels; ++c)
        transpose_to<true>(w + (count ? first * rows.per_row : 0) + c * rows.per_channel, rows.per_row, count, taps,
                           [=, &rows](int64_t tap) { return own + (tap * rows.channels + c) * width; });
    }
  });
}

}  // namespace

bool channels_last_pays(int64_t batch, int64_t channels, int64_t rows, int64_t taps, const Axes& grid) {
  // Where rows are longer, panels are copied in pieces that are as long, in less time than channels are turned.
  const bool has_short_rows = grid[2] <= 8, fills_panels = 4 * rows >= 3 * panels_of(rows) * width;
  return has_short_rows && fills_panels && taps > 1 && channels >= 16 && batch * volume(grid) >= 32;
}

ChannelsLast turn_channels(const Threads& threads, int64_t batch, int64_t size, const float* x, const Rows& rows, const float* w) {
  thread_local Scratch turned_memory, weight_memory;
  const int64_t taps = static_cast<int64_t>(rows.taps.size());
  float* const turned = turned_memory.floats(batch * rows.channels * size);
  float* const weights = weight_memory.floats(panels_of(rows.count) * width * rows.channels * taps);
  turn(threads, batch, rows.channels, size, x, turned);
  pack(threads, rows, w, weights);
  return {turned, weights, taps};
}

void channels_last_product(const Threads& threads, const Gather& from, const ChannelsLast& turned,
                           const std::vector<int64_t>& taps, const float* bias, const Scatter& to, float* y) {
  const int64_t positions = from.positions(), rows = to.rows, panels = panels_of(rows), channels = from.channels;
  if (positions == 0 || rows == 0) return;
  const int64_t count = static_cast<int64_t>(taps.size());
  const std::vector<float> zeros(static_cast<std::size_t>(channels));
  // Results that lie as the positions do are written in longer pieces.
  const Axes none{0, 0, 0}, unit{1, 1, 1};
  const bool dense = to.start == none && to.step == unit && to.out == from.grid;
  const Axes grid = dense ? Axes{1, 1, volume(from.grid)} : from.grid;
  Scatter target = to;
  if (dense) target.out = grid;

  const int64_t tiles = (positions + pixels - 1) / pixels;
  const int64_t blocks = std::clamp<int64_t>((tiles + most_tiles - 1) / most_tiles, std::min<int64_t>(tiles, 8), tiles);
  const int64_t parts = std::min(panels, (16 + blocks - 1) / blocks);
  const int64_t taps_at_once = std::max<int64_t>(most_summed / channels, 1), at_once = std::min(channels, most_summed);
  threads.run(static_cast<std::size_t>(blocks * parts), [&](std::size_t task) {
    thread_local std::vector<const float*> places, own_weights;
    thread_local std::vector<Segment> segments;
    thread_local Scratch sum_memory, result_memory;
    const int64_t block = static_cast<int64_t>(task) / parts, part = static_cast<int64_t>(task) % parts;
    const int64_t first = tiles * block / blocks, own = tiles * (block + 1) / blocks - first, wide = own * pixels;
    find_places(from, turned.x, zeros.data(), first * pixels, own, places);
    cut(grid, from.batch, first * pixels, wide, segments);
    const int64_t pitch = (wide + n - 1) / n * n + n;
    float* const sums = sum_memory.floats(wide * width);
    float* const results = result_memory.floats(width * pitch);
    for (int64_t panel = panels * part / parts; panel < panels * (part + 1) / parts; ++panel) {
      own_weights.clear();
      for (const int64_t tap : taps) own_weights.push_back(turned.weights + (panel * turned.taps + tap) * channels * width);
      if (count == 0) std::fill_n(sums, wide * width, 0.f);
      for (int64_t t = 0; t < count; t += taps_at_once)
        for (int64_t c = 0; c < channels; c += at_once)
          for (int64_t tile = 0; tile < own; ++tile)
            multiply(std::min(taps_at_once, count - t), c, std::min(channels, c + at_once),
                     places.data() + (tile * count + t) * pixels, own_weights.data() + t, sums + tile * pixels * width,
                     t + c > 0);
      for (int64_t p = 0; p < wide; p += n)
        transpose_to<true>(sums + p * width, width, std::min(n, wide - p), width,
                           [=](int64_t m) { return results + m * pitch + p; });
      for (int64_t m = panel * width; m < std::min(rows, (panel + 1) * width); ++m)
        write_row(segments, target, results + (m - panel * width) * pitch, bias ? bias[m] : 0.f, y + m * to.per_channel);
    }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
