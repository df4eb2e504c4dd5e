#include "convolution/product.h"

#include <algorithm>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/scratch.h"
#include "convolution/narrow.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

// Rows of a panel that are packed at once: with tile_width columns they stay in the first-level cache (30 KB of AVX-512's
// 48) while all rows of weights, which need a sixth of the bandwidth, come from the second.
constexpr int64_t panel_rows = 160;
constexpr int64_t ahead = 12;  // channels of weights that are asked for before they are packed
constexpr int64_t sum_floats = 48 * 1024;  // of the results of several panels

#if defined(__AVX512F__)

// Writes up to a vector to every other place.
inline void store_apart(vfloat value, int64_t count, float* to) {
  const __m512i low = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  const __m512i high = _mm512_set_epi32(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8);
  const uint32_t wanted = 0x55555555u & (count >= 16 ? ~0u : (1u << 2 * count) - 1);
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(wanted), _mm512_permutex2var_ps((__m512)value, low, (__m512)value));
  if (count > 8) _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(wanted >> 16), _mm512_permutex2var_ps((__m512)value, high, (__m512)value));
}

#endif

struct Job {
  const Gather& from;
  const Scatter& to;
  const float *x, *a, *bias;
  float* y;
  bool packed, bfloat16;
};

// The results of some rows at `panels` panels of positions. They are packed and written as one: rows of x and y are often
// a page apart, and the processor foresees what is read of few pages only.
void compute(const Job& job, int64_t group, int64_t begin, int64_t panels, int64_t first_tile, int64_t last_tile) {
  thread_local Scratch panel_memory, sum_memory;
  thread_local std::vector<Segment> segments;
  thread_local Plan what;
  const Gather& from = job.from;
  const int64_t rows = job.to.rows, depth = from.depth(), taps = static_cast<int64_t>(from.taps.size());
  const PackedRows packed = tiles_of(rows);
  const int64_t first_row = packed.begin(first_tile, rows), last_row = packed.begin(last_tile, rows);
  const int64_t most = std::max<int64_t>(panel_rows / taps, 1), chunks = (from.channels + most - 1) / most;
  const int64_t width = panels * tile_width;
  const int64_t pitch = width + (panels % 2 ? 0 : lanes);  // an odd number of lines apart, all sets of the cache are used
  float* const panel = panel_memory.floats(most * taps * pitch);
  float* const sums = sum_memory.floats((last_row - first_row) * width);
  plan(from, begin, width, what);  // once for all chunks: with short rows it takes as long as a chunk's product
  if (chunks == 0) std::fill_n(sums, (last_row - first_row) * width, 0.f);
  for (int64_t chunk = 0; chunk < chunks; ++chunk) {
    const int64_t first = from.channels * chunk / chunks, last = from.channels * (chunk + 1) / chunks;
    pack(from, what, job.x + group * from.channels * from.per_channel, first, last, pitch, panel);
    for (int64_t p = 0; p < panels; ++p) {
      const int64_t left = from.positions() - begin - p * tile_width;
      const int64_t vectors = std::min<int64_t>(tile_vectors, (left + lanes - 1) / lanes);
      for (int64_t t = first_tile; t < last_tile; ++t) {
        const int64_t top = packed.begin(t, rows), height = packed.begin(t + 1, rows) - top;
        const int64_t step = job.packed ? height : 1, row = job.packed ? 1 : depth;
        const float* const a = job.a + (group * rows + top) * depth + first * taps * step;
        const Tile tile = job.bfloat16 ? pair_tile_of(height, vectors) : tile_of(height, vectors);
        tile((last - first) * taps, a, step, row, panel + p * tile_width, pitch,
                                 sums + (top - first_row) * width + p * tile_width, width, chunk > 0);
      }
    }
  }
  cut(from.grid, from.batch, begin, width, segments);
  for (int64_t m = first_row; m < last_row; ++m) {
    const int64_t channel = group * rows + m;
    write_row(segments, job.to, sums + (m - first_row) * width, job.bias ? job.bias[channel] : 0.f,
          job.y + channel * job.to.per_channel);
  }
}

}  // namespace

void write_row(const std::vector<Segment>& segments, const Scatter& to, const float* row, float bias, float* y) {
  for (const Segment& s : segments) {
    const int64_t place = s.sample * to.per_sample +
                          ((to.start[0] + s.row0 * to.step[0]) * to.out[1] + to.start[1] + s.row1 * to.step[1]) * to.out[2] +
                          to.start[2] + s.column * to.step[2];
    const float* from = row + s.place;
    float* at = y + place;
    if (to.step[2] == 1) {
      int64_t i = 0;
      for (; i + static_cast<int64_t>(lanes) <= s.length; i += lanes) store(at + i, load(from + i) + bias);
      for (; i < s.length; ++i) at[i] = from[i] + bias;
#if defined(__AVX512F__)
    } else if (to.step[2] == 2) {
      for (int64_t i = 0; i < s.length; i += lanes)
        store_apart(load(from + i) + bias, std::min<int64_t>(lanes, s.length - i), at + 2 * i);
#endif
    } else {
      for (int64_t i = 0; i < s.length; ++i) at[i * to.step[2]] = from[i] + bias;
    }
  }
}

PackedRows tiles_of(int64_t rows) { return {(rows + tile_rows - 1) / tile_rows}; }

void pack_rows(const Threads& threads, int64_t groups, const Rows& rows, const float* from, float* to) {
  const PackedRows packed = tiles_of(rows.count);
  const int64_t taps = static_cast<int64_t>(rows.taps.size()), tiles = groups * packed.tiles;
  const int64_t depth = rows.channels * taps, kept = rows.bfloat16 ? pairs_of(rows.channels) * taps : depth;
  const int64_t least = 1 + std::max(16 * 1024 / (1 + depth * tile_rows), tiles / 16);
  // Some channels of all tiles, then the next ones: those of an input gradient are a page or more apart. Pairs are made of all.
  const int64_t at_once = rows.bfloat16 ? std::max<int64_t>(rows.channels, 1) : 2 * static_cast<int64_t>(lanes);
  threads.ranges(static_cast<std::size_t>(tiles), static_cast<std::size_t>(least), [&](std::size_t begin, std::size_t end) {
    thread_local Scratch memory;
    const auto count = static_cast<int64_t>(end - begin);
    for (int64_t step = 0; step < (rows.channels + at_once - 1) / at_once * count; ++step) {
      const int64_t start = step / count * at_once, i = static_cast<int64_t>(begin) + step % count;
      const int64_t group = i / packed.tiles, t = i % packed.tiles;
      const int64_t first = packed.begin(t, rows.count), height = packed.begin(t + 1, rows.count) - first;
      const float* const own = from + group * rows.per_group + first * rows.per_row;
      float* const target = to + (group * rows.count + first) * kept;
      float* const tile = rows.bfloat16 ? memory.floats(depth * height) : target;
      float* at = tile + start * taps * height;
      for (int64_t c = start; c < std::min(rows.channels, start + at_once); ++c) {
        // Too few rows lie side by side for the processor to foresee the next channel's.
        if (rows.per_row < rows.per_channel)
          for (int64_t j = 0; j < height * rows.per_row; j += 16)
            __builtin_prefetch(own + std::min(c + ahead, rows.channels - 1) * rows.per_channel + j);
        for (const int64_t tap : rows.taps) {
          const float* const column = own + c * rows.per_channel + tap;
          if (height == tile_rows) {
#pragma GCC unroll 8
            for (int64_t m = 0; m < tile_rows; ++m) at[m] = column[m * rows.per_row];
          } else {
            for (int64_t m = 0; m < height; ++m) at[m] = column[m * rows.per_row];
          }
          at += height;
        }
      }
      if (rows.bfloat16) pair(tile, rows.channels, taps * height, target);
    }
  });
}

void product(const Threads& threads, int64_t groups, const Gather& from, const float* x, const float* a, bool packed,
             const float* bias, const Scatter& to, float* y, bool bfloat16) {
  const int64_t positions = from.positions();
  if (positions == 0 || to.rows == 0 || groups == 0) return;
  const int64_t panels = (positions + tile_width - 1) / tile_width, tiles = tiles_of(to.rows).tiles;
  const int64_t at_once = std::clamp<int64_t>(sum_floats / (to.rows * tile_width), 1, 8);
  const int64_t blocks = std::clamp<int64_t>(std::clamp<int64_t>(panels / at_once, 16, most_parts) / groups, 1, panels);
  // Rows are shared, too, where there are few blocks: the inputs of a block are packed once for each part of the rows.
  const int64_t wanted = (16 + blocks * groups - 1) / (blocks * groups);
  const int64_t parts = std::min(wanted, std::max(tiles / 8, blocks * groups == 1 ? std::min<int64_t>(tiles, 2) : 1));
  const Job job{from, to, x, a, bias, y, packed, bfloat16};
  threads.run(static_cast<std::size_t>(groups * blocks * parts), [&](std::size_t task) {
    const auto index = static_cast<int64_t>(task);
    const int64_t part = index % parts, block = index / parts % blocks, group = index / parts / blocks;
    const int64_t last = panels * (block + 1) / blocks;
    const float* const own = x + group * from.channels * from.per_channel;
    for (int64_t first = panels * block / blocks; first < last; first += at_once) {
      const int64_t count = std::min(at_once, last - first);
      if (first + count < last) prefetch(from, own, 0, from.channels, (first + count) * tile_width, count * tile_width);
      compute(job, group, first * tile_width, count, tiles * part / parts, tiles * (part + 1) / parts);
    }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
