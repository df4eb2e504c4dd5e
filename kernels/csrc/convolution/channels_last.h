// Products of convolution for images of a few pixels a row, with the channels of each place side by side.
//
// A panel of `product` has a row for each channel and tap, of consecutive positions: where rows of images are short, it is
// copied in pieces of a few numbers, which takes as long as half of the product. Here nothing is copied for a tap: channels
// are turned to the last axis once, and each position and tap is the place where so many channels begin. The weights of many
// rows of the result are the vectors.
#pragma once

#include "convolution/product.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Whether this takes less time than `product` for each of these grids, of one group in float32, with so many taps in all.
bool channels_last_pays(int64_t batch, int64_t channels, int64_t rows, int64_t taps, const Axes& grid);

// Factors as the product takes them: x [batch, size, channels], and the weights of all taps.
struct ChannelsLast {
  const float *x, *weights;
  int64_t taps;
};

// x: [batch, channels, size]; `rows` has all taps, in their order. The memory is the calling thread's, until it asks again.
ChannelsLast turn_channels(const Threads& threads, int64_t batch, int64_t size, const float* x, const Rows& rows, const float* w);

// As `product` of one group; of each tap of `from` the index among all.
void channels_last_product(const Threads& threads, const Gather& from, const ChannelsLast& turned,
                           const std::vector<int64_t>& taps, const float* bias, const Scatter& to, float* y);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
