// dw[o, (c, tap)] = sum over positions of dy[o, position] * x[c, position * stride + tap * dilation - pad].
//
// The sums run over positions, so dy is turned over: [position][o]. A tile has some rows (c, tap) and some vectors of o
// and goes over a block of positions; what it gives is kept as [(c, tap)][o] until the end. Threads share rows where
// there are many weights, and positions, each with sums of its own, where there are few.
#include <algorithm>

#include "convolution/dense.h"
#include "convolution/gather.h"
#include "convolution/narrow.h"
#include "core/scratch.h"
#include "core/transpose.h"
#include "convolution/winograd.h"
#include "product/rounding.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t block_floats = 64 * 1024;   // of packed inputs, for the second-level cache
constexpr int64_t shortest_block = 128, longest_block = 256;  // positions; long rows where few are read side by side
constexpr int64_t most_sums = 128 * 1024;     // of one thread, where threads share positions
constexpr int64_t fewest_positions = 2048;    // for a thread

struct Job {
  const Convolution& c;
  Gather from;
  int64_t depth, columns;         // rows (c, tap) of a group; outputs of it, in whole vectors
  int64_t parts, splits, block;   // ranges of channels, of positions, and positions that are packed at once
  const float *dy, *x;
  float *sums, *bias_sums;        // [splits][groups][depth][columns] unless there is one split, [splits][groups][columns]
};

// Turns dy over for positions from `begin` on: [panel of columns][position][columns of the panel].
struct Panels {
  int64_t vectors, count;  // of all columns
  int64_t begin(int64_t panel) const { return vectors * panel / count; }
};

Panels panels_of(int64_t columns) {
  const int64_t vectors = columns / static_cast<int64_t>(lanes);
  return {vectors, (vectors + tile_vectors - 1) / tile_vectors};
}

void turn_over(const Job& job, const float* dy, int64_t begin, int64_t length, float* to) {
  thread_local std::vector<Segment> segments;
  const Convolution& c = job.c;
  const int64_t positions = volume(c.out);
  cut({1, 1, positions}, c.batch, begin, length, segments);
  const Panels panels = panels_of(job.columns);
  for (int64_t p = 0; p < panels.count; ++p) {
    const int64_t first = panels.begin(p), wide = (panels.begin(p + 1) - first) * static_cast<int64_t>(lanes);
    for (int64_t v = first; v < panels.begin(p + 1); ++v) {
      const int64_t o = v * static_cast<int64_t>(lanes), rows = std::min<int64_t>(lanes, c.rows - o);
      for (const Segment& s : segments) {
        const float* source = dy + s.sample * c.groups * c.rows * positions + o * positions + s.column;
        float* target = to + first * static_cast<int64_t>(lanes) * length + s.place * wide + (v - first) * static_cast<int64_t>(lanes);
        transpose(source, positions, rows, s.length, target, wide);
      }
    }
  }
}

// Adds rows of numbers, or of pairs of them, to `to`.
void add_columns(const float* rows, int64_t count, int64_t width, bool pairs, float* to) {
  for (int64_t v = 0; v < width; v += lanes) {
    vfloat sum{};
    for (int64_t i = 0; i < count; ++i) {
      const vfloat value = load(rows + i * width + v);
      sum += pairs ? sum_of_pairs(value) : value;
    }
    store(to + v, load(to + v) + sum);
  }
}

// Sums the gradients of some channels' weights over some positions: sums[(c, tap)][o].
void accumulate(const Job& job, int64_t group, int64_t part, int64_t split, float* sums) {
  thread_local Scratch input_memory, output_memory;
  const Convolution& c = job.c;
  const int64_t taps = static_cast<int64_t>(job.from.taps.size()), positions = job.from.positions();
  const int64_t first = c.channels * part / job.parts, last = c.channels * (part + 1) / job.parts;
  const int64_t begin = positions * split / job.splits, end = positions * (split + 1) / job.splits;
  const int64_t rows = (last - first) * taps, tiles = (rows + tile_rows - 1) / tile_rows;
  float* const inputs = input_memory.floats(rows * job.block);
  float* const outputs = output_memory.floats(job.columns * job.block);
  float* const bias = job.bias_sums + (split * c.groups + group) * job.columns;
  const bool own_bias = part == 0;
  if (begin == end) std::fill_n(sums, rows * job.columns, 0.f);
  if (own_bias) std::fill_n(bias, job.columns, 0.f);
  const Panels panels = panels_of(job.columns);
  const float* const own_x = job.x + group * c.channels * job.from.per_channel;
  const float* const own_dy = job.dy + group * c.rows * volume(c.out);
  const Axes row{1, 1, volume(c.out)};
  const Gather results{c.batch, c.rows, c.groups * c.rows * row[2], row[2], row, row, {1, 1, 1}, {{0, 0, 0}}};
  for (int64_t at = begin; at < end; at += job.block) {
    const int64_t length = std::min(job.block, end - at);
    turn_over(job, own_dy, at, length, outputs);
    pack(job.from, own_x, first, last, at, length, length, inputs);
    if (const int64_t next = at + length, left = std::min(job.block, end - next); left > 0) {
      prefetch(job.from, own_x, first, last, next, left);
      prefetch(results, own_dy, 0, c.rows, next, left);
    }
    for (int64_t p = 0; p < panels.count; ++p) {
      const int64_t vectors = panels.begin(p + 1) - panels.begin(p), column = panels.begin(p) * static_cast<int64_t>(lanes);
      const int64_t wide = vectors * static_cast<int64_t>(lanes);
      float* const b = outputs + column * length;
      if (own_bias) add_columns(b, length, wide, c.bfloat16, bias + column);
      for (int64_t t = 0; t < tiles; ++t) {
        const int64_t top = rows * t / tiles, height = rows * (t + 1) / tiles - top;
        const Tile tile = c.bfloat16 ? pair_tile_of(height, vectors) : tile_of(height, vectors);
        tile(length, inputs + top * length, 1, length, b, wide,
             sums + top * job.columns + column, job.columns, at > begin);
      }
    }
  }
}

// Turns sums of `rows` gradients back over, from row `first` of the weights on.
void write(const Job& job, int64_t group, int64_t first, int64_t rows, const float* sums, float* dw) {
  constexpr int64_t n = lanes;
  float* const own = dw + group * job.c.rows * job.depth + first;
  // A vector of outputs at a time: the weights of each are a page or more apart.
  for (int64_t o = 0; o < job.c.rows; o += n)
    for (int64_t k = 0; k < rows; k += n)
      transpose_to<false>(sums + k * job.columns + o, job.columns, std::min(n, rows - k), std::min(n, job.c.rows - o),
                          [=](int64_t i) { return own + k + (o + i) * job.depth; });
}

// Adds up what the splits have, and writes it.
void finish(const Job& job, int64_t group, int64_t first, int64_t last, float* dw) {
  const Convolution& c = job.c;
  const int64_t size = c.groups * job.depth * job.columns;
  for (int64_t k = first; k < last; ++k) {
    float* const row = job.sums + (group * job.depth + k) * job.columns;
    for (int64_t split = 1; split < job.splits; ++split)
      for (int64_t o = 0; o < job.columns; o += lanes) store(row + o, load(row + o) + load(row + split * size + o));
  }
  write(job, group, first, last - first, job.sums + (group * job.depth + first) * job.columns, dw);
}

// In bfloat16 a sample is a pair of them.
void direct(const Threads& threads, const Convolution& c, const float* dy, const float* x, float* dw, float* db) {
  thread_local Scratch memory;
  constexpr int64_t n = lanes;
  const int64_t size = volume(c.in), taps = volume(c.kernel);
  Job job{c, {c.batch, c.channels, c.groups * c.channels * size, size, c.in, c.out, c.stride, {}},
          c.channels * taps, (c.rows + n - 1) / n * n, 1, 1, 1, dy, x, nullptr, nullptr};
  for (int64_t i = 0; i < c.kernel[0]; ++i)
    for (int64_t j = 0; j < c.kernel[1]; ++j)
      for (int64_t k = 0; k < c.kernel[2]; ++k)
        job.from.taps.push_back({i * c.dilation[0] - c.pad[0], j * c.dilation[1] - c.pad[1], k * c.dilation[2] - c.pad[2]});
  if (taps == 1 && job.from.taps[0] == Axes{0, 0, 0} && c.stride == Axes{1, 1, 1} && c.in == c.out)
    job.from.in = job.from.grid = {1, 1, size};
  if (c.rows == 0) return;
  const int64_t weights = c.groups * job.depth * job.columns, positions = job.from.positions();
  // Tasks per group: four for all groups, and more where each still has some millions of products of numbers to add up.
  const int64_t work = weights / n * positions / (256 * 1024), least = (4 + c.groups - 1) / c.groups;
  const int64_t wanted = (std::clamp<int64_t>(work, 4, 16) + c.groups - 1) / c.groups;
  // dy is turned over once for each part of the channels.
  const int64_t most = std::min(wanted, std::max<int64_t>(job.depth / 128, 4));
  if (weights > most_sums || positions < least * fewest_positions) job.parts = std::clamp<int64_t>(c.channels, 1, most);
  job.splits = std::clamp<int64_t>(positions / fewest_positions, 1, (wanted + job.parts - 1) / job.parts);
  if (job.splits == 1) {
    const int64_t pieces = std::min<int64_t>(weights / c.groups / most_sums, most_parts / c.groups);
    job.parts = std::max(job.parts, std::min(pieces, c.channels));
  }
  const int64_t rows = (job.depth + job.parts - 1) / job.parts;
  job.block = std::clamp<int64_t>(block_floats / std::max(rows, job.columns) / n * n, 2 * n, rows < shortest_block ? longest_block : shortest_block);
  // Without splits, sums are written as weights while they are in the second-level cache.
  const int64_t kept = job.splits > 1 ? weights : 0;
  job.bias_sums = memory.floats(job.splits * (kept + c.groups * job.columns));
  job.sums = job.bias_sums + job.splits * c.groups * job.columns;
  threads.run(static_cast<std::size_t>(c.groups * job.parts * job.splits), [&](std::size_t task) {
    thread_local Scratch own_memory;
    const auto index = static_cast<int64_t>(task);
    const int64_t split = index % job.splits, part = index / job.splits % job.parts, group = index / job.splits / job.parts;
    const int64_t first = c.channels * part / job.parts * taps, end = c.channels * (part + 1) / job.parts * taps;
    float* const sums = kept ? job.sums + ((split * c.groups + group) * job.depth + first) * job.columns
                             : own_memory.floats((end - first) * job.columns);
    accumulate(job, group, part, split, sums);
    if (!kept) write(job, group, first, end - first, sums, dw);
  });
  const int64_t pieces = std::clamp<int64_t>(weights / (16 * 1024) / c.groups, 1, most_parts);
  if (kept)
    threads.run(static_cast<std::size_t>(c.groups * pieces), [&](std::size_t task) {
      const int64_t group = static_cast<int64_t>(task) / pieces, piece = static_cast<int64_t>(task) % pieces;
      finish(job, group, job.depth * piece / pieces, job.depth * (piece + 1) / pieces, dw);
    });
  if (db == nullptr) return;
  for (int64_t group = 0; group < c.groups; ++group)
    for (int64_t o = 0; o < c.rows; ++o) {
      float sum = 0;
      for (int64_t split = 0; split < job.splits; ++split)
        sum += job.bias_sums[(split * c.groups + group) * job.columns + o];
      db[group * c.rows + o] = sum;
    }
}

}  // namespace

void weight_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* x, float* dw, float* db) {
  if (winograd_pays(c)) return winograd_weight_gradient(threads, c, dy, x, dw, db);
  if (!c.bfloat16) return direct(threads, c, dy, x, dw, db);
  thread_local Scratch memory;
  Convolution halved = c;
  halved.batch = pairs_of(c.batch);
  const int64_t inputs = c.groups * c.channels * volume(c.in), outputs = c.groups * c.rows * volume(c.out);
  float* const x_pairs = memory.floats(halved.batch * (inputs + outputs));
  float* const dy_pairs = x_pairs + halved.batch * inputs;
  pair(threads, x, 1, c.batch, inputs, x_pairs);
  pair(threads, dy, 1, c.batch, outputs, dy_pairs);
  direct(threads, halved, dy_pairs, x_pairs, dw, db);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
