// What a product of convolution reads: for positions of a grid, the inputs under each tap.
//
// Forward and input gradient are one computation: y[m, position] = sum over (c, tap) of a[m, (c, tap)] *
// x[c, position * step + offset(tap)]. The weight gradient reads the same inputs. They are copied into panels, rows of
// consecutive positions for each (c, tap), so that products see matrices whatever stride, dilation and padding are.
#pragma once

#include <vector>

#include "convolution/geometry.h"
#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

struct Gather {
  int64_t batch, channels;       // of one group
  int64_t per_sample, per_channel;  // distances in x
  Axes in, grid, step;           // sizes of x, positions, inputs between two positions
  std::vector<Axes> taps;        // offset of each tap

  int64_t positions() const { return batch * volume(grid); }
  int64_t depth() const { return channels * static_cast<int64_t>(taps.size()); }
};

// What is to be copied for some positions: the same for every channel.
struct Plan {
  // Up to a vector of one row of a panel: elements [low, high) are x[source + distance * i], the others zero. Whole
  // vectors are written: what follows is written later. Of a pair [0, high) is what is written of the first row.
  struct Run {
    int64_t source;
    int32_t place;
    uint32_t bits;  // of the inputs that are read, where they lie one or two apart
    int32_t low, high;
  };

  // A vector of a row of a panel, each of whose elements has a place of its own.
  struct Picks {
    int32_t sources[lanes];
    uint32_t bits;
  };

  std::vector<Run> runs;     // of all taps
  std::vector<Picks> picks;  // instead of runs, where these would be short
  bool paired;               // a run is of two taps, side by side, of every other input
};

// Plans for `width` positions from `begin` on.
void plan(const Gather& from, int64_t begin, int64_t width, Plan& what);

// Copies inputs into `panel`: for each channel in [first, last) and each tap a row of the planned positions, `pitch`
// floats after the row before; zero beyond the last position. May write up to a vector beyond each row.
void pack(const Gather& from, const Plan& what, const float* x, int64_t first, int64_t last, int64_t pitch, float* panel);

// Both, for positions of which nothing else is packed.
void pack(const Gather& from, const float* x, int64_t first, int64_t last, int64_t begin, int64_t width, int64_t pitch,
          float* panel);

// Asks for what `pack` will read of these positions: with one tap, or about that with several. Rows of channels are too far
// apart, and too short, for the processor to foresee.
void prefetch(const Gather& from, const float* x, int64_t first, int64_t last, int64_t begin, int64_t width);

// A run of positions in one row of the grid.
struct Segment {
  int64_t sample, row0, row1, column;  // of the first position
  int64_t length, place;               // place: from the first position of the run of runs
};

// Cuts positions [begin, begin + width) into runs; those beyond the last position are left out.
void cut(const Axes& grid, int64_t batch, int64_t begin, int64_t width, std::vector<Segment>& segments);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
