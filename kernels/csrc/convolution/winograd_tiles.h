// The tiles of a convolution and their inputs, transformed.
#pragma once

#include "convolution/gather.h"
#include "convolution/winograd_transforms.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

constexpr int64_t winograd_terms = 16;  // of a transformed tile: (i, j) is term i * 4 + j

constexpr int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// A distance for rows of so many vectors that puts them into different sets of a cache: an odd number of lines.
constexpr int64_t pitch_of(int64_t vectors) { return (vectors | 1) * static_cast<int64_t>(lanes); }

// The channels that the sums over channels have: one for each tap of the first axis.
inline int64_t winograd_channels(const Convolution& c) { return c.channels * c.kernel[0]; }

// The tiles of the results, and the 4 x 4 inputs under each, for each tap of the first axis. Its taps are the other way round
// for an input gradient, whose c is that of the convolution from dy to dx.
Gather winograd_inputs(const Convolution& c, bool turned);

// The tiles of the results, and the 2 x 2 results of each.
Gather winograd_results(const Convolution& c);

// Transforms the inputs of some channels at `width` tiles that are planned: to[term][channel, tap][tile], with
// `pitch` floats between rows, for each tap of the first axis.
void transform_inputs(const Gather& from, const Plan& what, const float* x, int64_t first, int64_t last,
                      int64_t width, int64_t pitch, float* to);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
