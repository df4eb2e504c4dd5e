// y[m, position] = sum over (c, tap) of a[m, (c, tap)] * x[c, position * step + offset(tap)] (+ bias[m]).
#pragma once

#include "convolution/gather.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Where the results of a product go: positions of a grid that is every `step`-th place of y from `start` on.
struct Scatter {
  int64_t rows;                     // of one group
  int64_t per_sample, per_channel;  // distances in y
  Axes out, start, step;            // sizes of y, places of the positions
};

// Writes a row of results, of the positions of `segments`, to their places in y.
void write_row(const std::vector<Segment>& segments, const Scatter& to, const float* row, float bias, float* y);

// a: [groups][tiles][depth][rows of the tile], as `pack_rows` writes it, or as it is: [groups][rows][depth].
struct PackedRows {
  int64_t tiles;
  int64_t begin(int64_t tile, int64_t rows) const { return rows * tile / tiles; }
};

PackedRows tiles_of(int64_t rows);

// A matrix of each group: element (m, (c, tap)) is at m * per_row + c * per_channel + taps[tap] of the group's.
struct Rows {
  int64_t count, channels;
  int64_t per_group, per_row, per_channel;
  std::vector<int64_t> taps;
  bool bfloat16;  // whether channels are paired (`narrow.h`)
};

void pack_rows(const Threads& threads, int64_t groups, const Rows& rows, const float* from, float* to);

// All groups; x and y are those of the first one. Results in y are written, not added to. In bfloat16 the channels of x and a
// have been paired, and a is packed.
void product(const Threads& threads, int64_t groups, const Gather& from, const float* x, const float* a, bool packed,
             const float* bias, const Scatter& to, float* y, bool bfloat16);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
