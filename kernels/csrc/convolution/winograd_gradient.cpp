// The weight gradient: dw = Gᵀ [sum over tiles of (A dy Aᵀ) ⊙ (Bᵀ x B)] G.
//
// Each of the 16 terms is a product over tiles, [channel][tile] with [tile][output]. Its sums, more than there are
// weights, stay where they are added to until the end; a task has a part of the channels and of the outputs, small enough
// for the second-level cache, and where that gives the threads too little to do, a part of the tiles.
#include <algorithm>

#include "core/scratch.h"
#include "convolution/tile.h"
#include "core/transpose.h"
#include "convolution/winograd.h"
#include "convolution/winograd_tiles.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t n = lanes;
constexpr int64_t most_channels = 128;        // of a task: inputs, and outputs
constexpr int64_t block_floats = 256 * 1024;  // of what is transformed at once
constexpr int64_t fewest_tiles = 512;         // for a task

struct Job {
  const Convolution& c;
  Gather inputs, results;
  int64_t depth;                                  // taps of the first axis: rows of sums for each channel
  int64_t columns;                                // outputs of a group, in whole vectors
  int64_t channel_parts, column_parts, splits;    // a task has one of each
  int64_t block;                                  // vectors of tiles that are transformed at once
  const float *x, *dy;
  // [splits][groups][terms][channels][columns], which is there with several splits only; [splits][groups][columns]
  float *sums, *bias_sums;

  // Floats of a term of a group's sums.
  int64_t plane() const { return pitch_of(c.channels * depth * columns / n); }
};

// Sums of some channels and outputs: element (term, (channel, tap), output) is at data[term * plane + (channel, tap) * pitch +
// output].
struct Sums {
  float* data;
  int64_t plane, pitch;
};

// The columns of a task, in vectors, and the panels they are cut into.
struct Columns {
  int64_t first, last;
  int64_t panels() const { return divided_up(last - first, tile_vectors); }
  int64_t begin(int64_t panel) const { return first + (last - first) * panel / panels(); }
};

// Transforms cotangents: to[term][panel][tile][column of the panel]. Adds them to `bias`, unless it is null.
void transform_results(const Job& job, int64_t group, const Plan& what, const Columns& columns, int64_t width,
                       float* bias, float* to) {
  thread_local Scratch memory;
  const int64_t pitch = pitch_of(width / n), plane = (columns.last - columns.first) * n * width;
  float* const copied = memory.floats(4 * n * pitch + 4 * n * width);
  float* const turned = copied + 4 * n * pitch;
  const float* const dy = job.dy + group * job.c.rows * job.results.per_channel;
  for (int64_t p = 0; p < columns.panels(); ++p) {
    const int64_t begin = columns.begin(p), wide = (columns.begin(p + 1) - begin) * n;
    for (int64_t v = begin; v < columns.begin(p + 1); ++v) {
      const int64_t rows = std::min(n, job.c.rows - v * n);
      pack(job.results, what, dy, v * n, v * n + rows, pitch, copied);
      for (int64_t k = 0; k < 4; ++k) transpose(copied + k * pitch, 4 * pitch, rows, width, turned + k * n * width, n);
      float* const at = to + (begin - columns.first) * n * width + (v - begin) * n;
      vfloat sum{};
      for (int64_t t = 0; t < width; ++t) {
        const float* const tile = turned + t * n;
        sum += (load(tile) + load(tile + n * width)) + (load(tile + 2 * n * width) + load(tile + 3 * n * width));
        winograd_transform<detail::ResultTransposed>([=](int i, int j) { return tile + (i * 2 + j) * n * width; },
                                                     [=](int i, int j) { return at + (i * 4 + j) * plane + t * wide; });
      }
      if (bias != nullptr) store(bias + v * n, load(bias + v * n) + sum);
    }
  }
}

// Writes sums of the channels from `first` and the outputs from `output` on as weights. A channel is one of a tap.
void write(const Job& job, int64_t group, int64_t first, int64_t channels, int64_t output, int64_t outputs,
           const Sums& sums, float* dw) {
  const Convolution& c = job.c;
  const int64_t all = c.channels * job.depth;
  float kernels[9 * lanes * lanes];  // of n channels: their taps are turned over together, vector by vector
  // A vector of outputs at a time: the weights of each are a page or more apart.
  for (int64_t o = 0; o < outputs; o += n)
    for (int64_t channel = 0; channel < channels; channel += n) {
      const int64_t taken = std::min(n, channels - channel);
      for (int64_t k = 0; k < taken; ++k) {
        const float* const own = sums.data + (channel + k) * sums.pitch + o;
        winograd_transform<detail::KernelTransposed>([&](int i, int j) { return own + (i * 4 + j) * sums.plane; },
                                                     [&](int i, int j) { return kernels + (k * 9 + i * 3 + j) * n; });
      }
      for (int64_t k = 0; k < 9 * taken; k += n) {
        float* const to = dw + ((group * c.rows + output + o) * all + first + channel) * 9 + k;
        transpose_to<false>(kernels + k * n, n, std::min(n, 9 * taken - k), std::min(n, outputs - o),
                            [=](int64_t r) { return to + r * all * 9; });
      }
    }
}

// Without splits, sums are written as weights while they are in the second-level cache.
void accumulate(const Job& job, int64_t group, int64_t channel_part, int64_t column_part, int64_t split, float* dw) {
  thread_local Scratch input_memory, result_memory, sum_memory;
  thread_local Plan input_plan, result_plan;
  const Convolution& c = job.c;
  const int64_t vectors = job.columns / n, tiles = divided_up(job.inputs.positions(), n);  // in vectors, too
  const int64_t first = c.channels * channel_part / job.channel_parts, last = c.channels * (channel_part + 1) / job.channel_parts;
  const Columns columns{vectors * column_part / job.column_parts, vectors * (column_part + 1) / job.column_parts};
  const int64_t begin = tiles * split / job.splits, end = tiles * (split + 1) / job.splits;
  const int64_t rows = (last - first) * job.depth, own_columns = (columns.last - columns.first) * n;
  const int64_t blocks = std::max<int64_t>(divided_up(end - begin, job.block), 1);
  float* const inputs = input_memory.floats(winograd_terms * rows * pitch_of(job.block));
  float* const results = result_memory.floats(winograd_terms * own_columns * job.block * n);
  Sums sums{job.sums, job.plane(), job.columns};
  if (job.splits > 1) {
    sums.data += (split * c.groups + group) * winograd_terms * sums.plane + first * job.depth * sums.pitch + columns.first * n;
  } else {
    sums.plane = pitch_of(rows * (columns.last - columns.first)), sums.pitch = own_columns;
    sums.data = sum_memory.floats(winograd_terms * sums.plane);
  }
  float* const bias = channel_part == 0 ? job.bias_sums + (split * c.groups + group) * job.columns : nullptr;
  if (bias != nullptr) std::fill_n(bias + columns.first * n, own_columns, 0.f);
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t at = begin + (end - begin) * block / blocks, width = (begin + (end - begin) * (block + 1) / blocks - at) * n;
    const int64_t pitch = pitch_of(width / n);
    const float* const own_x = job.x + group * c.channels * job.inputs.per_channel;
    plan(job.inputs, at * n, width, input_plan);
    plan(job.results, at * n, width, result_plan);
    transform_results(job, group, result_plan, columns, width, bias, results);
    transform_inputs(job.inputs, input_plan, own_x, first, last, width, pitch, inputs);
    for (int64_t term = 0; term < winograd_terms; ++term)
      for (int64_t p = 0; p < columns.panels(); ++p) {
        const int64_t column = columns.begin(p), wide = columns.begin(p + 1) - column;
        const float* const b = results + (term * own_columns + (column - columns.first) * n) * width;
        for (int64_t r = 0; r < rows; r += tile_rows)
          tile_of(std::min<int64_t>(tile_rows, rows - r), wide)(
              width, inputs + (term * rows + r) * pitch, 1, pitch, b, wide * n,
              sums.data + term * sums.plane + r * sums.pitch + (column - columns.first) * n, sums.pitch, block > 0);
      }
  }
  if (job.splits == 1)
    write(job, group, first * job.depth, rows, columns.first * n, std::min(own_columns, c.rows - columns.first * n), sums, dw);
}

// Adds up what the splits have of some channels, and writes it.
void finish(const Job& job, int64_t group, int64_t first, int64_t last, float* dw) {
  const int64_t plane = job.plane(), size = job.c.groups * winograd_terms * plane;
  float* const own = job.sums + group * winograd_terms * plane + first * job.columns;
  for (int64_t term = 0; term < winograd_terms; ++term)
    for (int64_t i = 0; i < (last - first) * job.columns; i += n) {
      float* const to = own + term * plane + i;
      for (int64_t split = 1; split < job.splits; ++split) store(to, load(to) + load(to + split * size));
    }
  write(job, group, first, last - first, 0, job.c.rows, {own, plane, job.columns}, dw);
}

}  // namespace

void winograd_weight_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* x, float* dw, float* db) {
  thread_local Scratch memory;
  const int64_t channels = winograd_channels(c);
  Job job{c, winograd_inputs(c, false), winograd_results(c), c.kernel[0], divided_up(c.rows, n) * n,
          std::min(divided_up(channels, most_channels), c.channels), divided_up(c.rows, most_channels), 1, 1, x, dy,
          nullptr, nullptr};
  const int64_t tiles = job.inputs.positions(), parts = c.groups * job.channel_parts * job.column_parts;
  // A split has sums of its own, which are added up in the end: four at first, more where each has tiles enough.
  const int64_t wanted = std::clamp<int64_t>(tiles / (4 * fewest_tiles), 4, 16);
  job.splits = std::clamp<int64_t>(tiles / fewest_tiles, 1, divided_up(wanted, parts));
  if (parts * job.splits == 1) job.channel_parts = std::min<int64_t>(c.channels, 2);
  const int64_t rows = divided_up(c.channels, job.channel_parts) * job.depth;
  const int64_t per_vector = winograd_terms * n * (rows + divided_up(job.columns, job.column_parts));
  job.block = std::clamp<int64_t>(block_floats / per_vector, 2, 9);
  const int64_t sums = c.groups * winograd_terms * job.plane();
  const int64_t kept = job.splits > 1 ? sums : 0;
  job.bias_sums = memory.floats(job.splits * (kept + c.groups * job.columns));
  job.sums = job.bias_sums + job.splits * c.groups * job.columns;
  const int64_t tasks = c.groups * job.channel_parts * job.column_parts * job.splits;
  threads.run(static_cast<std::size_t>(tasks), [&](std::size_t task) {
    auto index = static_cast<int64_t>(task);
    const int64_t split = index % job.splits;
    const int64_t column_part = (index /= job.splits) % job.column_parts;
    const int64_t channel_part = (index /= job.column_parts) % job.channel_parts;
    accumulate(job, index / job.channel_parts, channel_part, column_part, split, dw);
  });
  const int64_t pieces = std::clamp<int64_t>(sums / (64 * 1024) / c.groups, 1, std::min<int64_t>(most_parts, channels));
  if (kept)
    threads.run(static_cast<std::size_t>(c.groups * pieces), [&](std::size_t task) {
      const int64_t group = static_cast<int64_t>(task) / pieces, piece = static_cast<int64_t>(task) % pieces;
      finish(job, group, channels * piece / pieces, channels * (piece + 1) / pieces, dw);
    });
  if (db == nullptr) return;
  for (int64_t i = 0; i < c.groups * c.rows; ++i) {
    const int64_t group = i / c.rows, o = i % c.rows;
    float sum = 0;
    for (int64_t split = 0; split < job.splits; ++split) sum += job.bias_sums[(split * c.groups + group) * job.columns + o];
    db[i] = sum;
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
