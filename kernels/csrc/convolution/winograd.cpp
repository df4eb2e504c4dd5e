#include "convolution/winograd.h"

#include <algorithm>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "core/scratch.h"
#include "convolution/tile.h"
#include "convolution/winograd_tiles.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t n = lanes;
constexpr int64_t chunk_channels = 160;        // a panel of 48 tiles and so many channels is 30 KB
constexpr int64_t block_floats = 256 * 1024;   // of transformed inputs, for the second-level cache
constexpr int64_t most_vectors = 9;            // of tiles in a block
constexpr int64_t fewest_tasks = 8;            // where there are as many tiles and rows
constexpr int64_t group_rows = 4 * tile_rows;  // of results that are summed before they are written

// Kernels as factors: element (m, k) of group g is at g * per_group + m * per_row + k / depth * per_channel + k % depth * 9,
// with its nine taps. `depth` is the number of taps of the first axis.
struct Kernels {
  int64_t groups, rows, channels, depth, per_group, per_row, per_channel;
  bool turned;  // by half a turn, as an input gradient reads them

  int64_t place(int64_t channel) const { return channel / depth * per_channel + channel % depth * 9; }
  bool apart_alike() const { return depth == 1 || per_channel == depth * 9; }
};

// Floats of a term of all kernels of a group.
int64_t kernel_plane(int64_t rows, int64_t channels) { return pitch_of(divided_up(rows * channels, n)); }

inline vfloat gathered(const float* from, vint offsets) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, (__m512i)offsets, from, 4);  // all of them
#else
  vfloat v;
  for (int64_t i = 0; i < n; ++i) v[i] = from[offsets[i]];
  return v;
#endif
}

// Writes them transformed: [group][term][tile of rows][channel][row of the tile].
void transform_kernels(const Threads& threads, const Kernels& k, const float* w, float* to) {
  const int64_t tiles = divided_up(k.rows, tile_rows), plane = kernel_plane(k.rows, k.channels);
  threads.ranges(static_cast<std::size_t>(k.groups * tiles), 1 + 2048 / (1 + k.channels * tile_rows), [&](std::size_t begin, std::size_t end) {
    float taps[9 * lanes], tail[winograd_terms * lanes];
    for (auto index = static_cast<int64_t>(begin); index < static_cast<int64_t>(end); ++index) {
      const int64_t group = index / tiles, first = index % tiles * tile_rows;
      const int64_t height = std::min<int64_t>(tile_rows, k.rows - first), size = height * k.channels;
      const float* const rows = w + group * k.per_group + first * k.per_row;
      float* const own = to + group * winograd_terms * plane + first * k.channels;
      vint offsets{};
      for (int64_t i = 0; i < size; i += n) {
        const int64_t channel = i / height;
        // Element i + j is of channel (i + j) / height and row (i + j) % height: the same distances in each vector, mostly.
        if (i == 0 || n % height != 0 || i + n > size || !k.apart_alike())
          for (int64_t j = 0; j < n; ++j) {
            const int64_t place = std::min(i + j, size - 1);  // nothing behind the last one is read
            offsets[j] = static_cast<int32_t>(k.place(place / height) - k.place(channel) + place % height * k.per_row);
          }
        for (int64_t tap = 0; tap < 9; ++tap)
          store(taps + (k.turned ? 8 - tap : tap) * n, gathered(rows + k.place(channel) + tap, offsets));
        const auto from = [&](int a, int b) { return taps + (a * 3 + b) * n; };
        if (i + n <= size) {
          winograd_transform<detail::KernelMatrix>(from, [=](int a, int b) { return own + (a * 4 + b) * plane + i; });
        } else {
          winograd_transform<detail::KernelMatrix>(from, [&](int a, int b) { return tail + (a * 4 + b) * n; });
          for (int64_t term = 0; term < winograd_terms; ++term)
            std::copy_n(tail + term * n, size - i, own + term * plane + i);
        }
      }
    }
  });
}

// a[0] b[0] a[1] b[1] ...: the first `count` of them.
inline void store_alternating(vfloat a, vfloat b, int64_t count, float* to) {
#if defined(__AVX512F__)
  const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i high = _mm512_set_epi32(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8);
  const uint32_t wanted = count >= 32 ? ~0u : (1u << count) - 1;
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>(wanted), _mm512_permutex2var_ps((__m512)a, low, (__m512)b));
  if (count > 16)
    _mm512_mask_storeu_ps(to + 16, static_cast<__mmask16>(wanted >> 16), _mm512_permutex2var_ps((__m512)a, high, (__m512)b));
#else
  const vfloat low = first_alternating(a, b), high = second_alternating(a, b);
  store_some(to, low, std::min(count, n));
  if (count > n) store_some(to + n, high, count - n);
#endif
}

struct Job {
  const Convolution& c;
  Gather from;
  int64_t channels;  // that are summed over
  const float *x, *kernels, *bias;
  float* y;
};

// Writes the results of a channel from its sums, [term][tile] with `plane` floats between two terms. Where rows of tiles
// are short, tiles of several are transformed together, into `results`.
void write_results(const Convolution& c, const std::vector<Segment>& segments, const float* sums, int64_t plane,
                   int64_t width, float bias, float* results, float* y) {
  const int64_t size = volume(c.out), rows = c.groups * c.rows;
  const bool together = 2 * c.out[2] < 3 * n;
  if (together)
    for (int64_t t = 0; t < width; t += n)
      winograd_transform<detail::ResultMatrix>([=](int i, int j) { return sums + (i * 4 + j) * plane + t; },
                                               [=](int i, int j) { return results + (i * 2 + j) * width + t; });
  for (const Segment& s : segments) {
    float* const row = y + s.sample * rows * size + (s.row0 * c.out[1] + 2 * s.row1) * c.out[2];
    for (int64_t done = 0; done < s.length; done += n) {
      const int64_t column = 2 * (s.column + done), count = std::min(2 * std::min(n, s.length - done), c.out[2] - column);
      vfloat tile[2][2];
      if (together) {
        for (int k = 0; k < 4; ++k) tile[k / 2][k % 2] = load(results + k * width + s.place + done);
      } else {
        vfloat terms[4][4];
#pragma GCC unroll 16
        for (int k = 0; k < winograd_terms; ++k) terms[k / 4][k % 4] = load(sums + k * plane + s.place + done);
        winograd_product<detail::ResultMatrix>(terms, tile);
      }
      store_alternating(tile[0][0] + bias, tile[0][1] + bias, count, row + column);
      if (2 * s.row1 + 1 < c.out[1]) store_alternating(tile[1][0] + bias, tile[1][1] + bias, count, row + c.out[2] + column);
    }
  }
}

// The results of rows [first_row, last_row) of a group for `width` tiles from `begin` on.
//
// Inputs lie transformed in the second-level cache. They pass some rows of kernels at a time, whose sums are written from
// the cache, too.
void compute(const Job& job, int64_t group, int64_t begin, int64_t width, int64_t first_row, int64_t last_row) {
  thread_local Scratch input_memory, sum_memory;
  thread_local Plan what;
  thread_local std::vector<Segment> segments;
  const Convolution& c = job.c;
  const int64_t vectors = width / n, pitch = pitch_of(vectors), plane = kernel_plane(c.rows, job.channels);
  const int64_t chunks = divided_up(job.channels, chunk_channels), panels = divided_up(vectors, tile_vectors);
  float* const inputs = input_memory.floats(winograd_terms * job.channels * pitch);
  float* const sums = sum_memory.floats(winograd_terms * group_rows * pitch + 4 * width);
  const float* const own_kernels = job.kernels + group * winograd_terms * plane;
  plan(job.from, begin, width, what);
  cut(job.from.grid, c.batch, begin, width, segments);
  transform_inputs(job.from, what, job.x + group * c.channels * job.from.per_channel, 0, c.channels, width, pitch, inputs);
  for (int64_t top = first_row; top < last_row; top += group_rows) {
    const int64_t height = std::min(group_rows, last_row - top);
    for (int64_t term = 0; term < winograd_terms; ++term)
      for (int64_t p = 0; p < panels; ++p) {
        const int64_t place = vectors * p / panels, wide = vectors * (p + 1) / panels - place;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
          const int64_t first = job.channels * chunk / chunks, depth = job.channels * (chunk + 1) / chunks - first;
          const float* const panel = inputs + (term * job.channels + first) * pitch + place * n;
          for (int64_t row = top; row < top + height; row += tile_rows) {
            const int64_t high = std::min<int64_t>(tile_rows, c.rows - row);
            tile_of(high, wide)(depth, own_kernels + term * plane + row * job.channels + first * high, high, 1, panel, pitch,
                                sums + (term * height + row - top) * pitch + place * n, pitch, chunk > 0);
          }
        }
      }
    for (int64_t row = top; row < top + height; ++row) {
      const int64_t channel = group * c.rows + row;
      write_results(c, segments, sums + (row - top) * pitch, height * pitch, width, job.bias ? job.bias[channel] : 0.f,
                    sums + winograd_terms * group_rows * pitch, job.y + channel * volume(c.out));
    }
  }
}

void convolve(const Threads& threads, const Convolution& c, const Kernels& kernels, const float* x, const float* w,
              const float* bias, float* y) {
  thread_local Scratch memory;
  const int64_t plane = kernel_plane(kernels.rows, kernels.channels);
  float* const transformed = memory.floats(c.groups * winograd_terms * plane);
  const Job job{c, winograd_inputs(c, kernels.turned), kernels.channels, x, transformed, bias, y};
  const int64_t tiles = job.from.positions();
  if (tiles == 0) return;
  transform_kernels(threads, kernels, w, transformed);
  const int64_t all = divided_up(tiles, n);
  const int64_t per_vector = winograd_terms * n * job.channels;
  const int64_t most = std::clamp<int64_t>(block_floats / per_vector / tile_vectors * tile_vectors, tile_vectors, most_vectors);
  // Where that is too few blocks for some threads there are smaller ones, an even number; and where there are few of them
  // yet, parts of the rows, for each of which the inputs are transformed again.
  const int64_t shared = c.groups == 1 ? 2 : 1;
  const int64_t even = divided_up(divided_up(all, most), shared) * shared;
  const int64_t smaller = std::min(divided_up(all, tile_vectors), divided_up(fewest_tasks, c.groups));
  const int64_t blocks = std::min(all, std::max(even, smaller));
  const int64_t row_tiles = divided_up(c.rows, tile_rows);
  const int64_t most_row_parts = std::max(row_tiles / (blocks * c.groups == 1 ? 4 : 16), int64_t{1});
  const int64_t parts = std::min(most_row_parts, divided_up(fewest_tasks, blocks * c.groups));
  threads.run(static_cast<std::size_t>(c.groups * blocks * parts), [&](std::size_t task) {
    const auto index = static_cast<int64_t>(task);
    const int64_t part = index % parts, block = index / parts % blocks, group = index / parts / blocks;
    const int64_t begin = all * block / blocks * n, end = all * (block + 1) / blocks * n;
    const int64_t first = row_tiles * part / parts * tile_rows, last = row_tiles * (part + 1) / parts * tile_rows;
    compute(job, group, begin, end - begin, first, std::min(last, c.rows));
  });
}

}  // namespace

bool winograd_pays(const Convolution& c) {
  if (c.bfloat16) return false;  // sums of what has been rounded would have to be rounded again
  if (c.kernel[1] != 3 || c.kernel[2] != 3 || c.dilation[1] != 1 || c.dilation[2] != 1) return false;
  if (c.stride != Axes{1, 1, 1}) return false;
  const int64_t depth = c.kernel[0];
  if (9 * depth * c.channels * c.rows >= int64_t{1} << 31) return false;  // offsets of 32 bits
  // The transforms cost as much as a product with some sixteen channels would, and tiles reach over an odd edge.
  // Inputs are transformed for each tap of the first axis, results once.
  if (depth * c.channels * c.rows <= 12 * (depth * c.channels + c.rows)) return false;
  return 4 * ((c.out[1] + 1) / 2) * ((c.out[2] + 1) / 2) * 4 <= 5 * c.out[1] * c.out[2];
}

void winograd_forward(
    const Threads& threads, const Convolution& c, const float* x, const float* w, const float* bias, float* y) {
  const int64_t taps = c.kernel[0] * 9, row = c.channels * taps;
  const Kernels kernels{c.groups, c.rows, winograd_channels(c), c.kernel[0], c.rows * row, row, taps, false};
  convolve(threads, c, kernels, x, w, bias, y);
}

void winograd_input_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* w, const float* bias, float* dx) {
  const int64_t taps = c.kernel[0] * 9, row = c.channels * taps;
  const int64_t reach = (c.kernel[0] - 1) * c.dilation[0];
  const Convolution back{c.batch, c.groups, c.rows, c.channels, c.out, c.in, c.kernel, c.stride, c.dilation,
                         {reach - c.pad[0], 2 - c.pad[1], 2 - c.pad[2]}};
  const Kernels kernels{c.groups, c.channels, winograd_channels(back), c.kernel[0], c.rows * row, taps, row, true};
  convolve(threads, back, kernels, dy, w, bias, dx);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
