#include "convolution/dense.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "convolution/channels_last.h"
#include "convolution/narrow.h"
#include "convolution/product.h"
#include "core/scratch.h"
#include "convolution/winograd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

int64_t taps_of(const Convolution& c) { return volume(c.kernel); }

std::vector<int64_t> all_taps(const Convolution& c) {
  std::vector<int64_t> taps(static_cast<std::size_t>(taps_of(c)));
  std::iota(taps.begin(), taps.end(), 0);
  return taps;
}

// Calls each(tap) for the three indices of each tap in row-major order.
template <class Each>
void for_taps(const Axes& kernel, Each&& each) {
  for (int64_t i = 0; i < kernel[0]; ++i)
    for (int64_t j = 0; j < kernel[1]; ++j)
      for (int64_t k = 0; k < kernel[2]; ++k) each(Axes{i, j, k});
}

// Where positions and inputs are the same, as with a kernel of one tap, all axes are one long one.
void flatten(Gather& from, Scatter& to) {
  const Axes none{0, 0, 0}, unit{1, 1, 1};
  if (from.taps.size() != 1 || from.taps[0] != none || from.step != unit || from.in != from.grid ||
      to.start != none || to.step != unit || to.out != from.grid)
    return;
  from.in = from.grid = to.out = Axes{1, 1, volume(from.grid)};
}

// What a product reads: the channels of each group, in bfloat16 those of all samples in pairs.
struct Channels {
  Channels(const Threads& threads, const Convolution& c, int64_t channels, int64_t size, const float* x)
      : count(c.bfloat16 ? pairs_of(channels) : channels), data(x) {
    if (!c.bfloat16) return;
    thread_local Scratch memory;
    float* const pairs = memory.floats(c.batch * c.groups * count * size);
    pair(threads, x, c.batch * c.groups, channels, size, pairs);
    data = pairs;
  }

  int64_t count;
  const float* data;
};

}  // namespace

void forward(
    const Threads& threads, const Convolution& c, const float* x, const float* w, const float* bias, float* y) {
  // Kernels that few tiles read take longer to transform than to multiply with where they are.
  const int64_t tiles = c.batch * c.out[0] * ((c.out[1] + 1) / 2) * ((c.out[2] + 1) / 2);
  const bool transforms = tiles > 32 || (tiles > 8 && c.channels * c.rows * c.kernel[0] <= 256 * 256);
  if (transforms && winograd_pays(c)) return winograd_forward(threads, c, x, w, bias, y);
  thread_local Scratch memory;
  const int64_t size = volume(c.in), positions = volume(c.out), depth = c.channels * taps_of(c);
  const Channels channels(threads, c, c.channels, size, x);
  Gather from{c.batch, channels.count, c.groups * channels.count * size, size, c.in, c.out, c.stride, {}};
  for_taps(c.kernel, [&](const Axes& t) {
    Axes offset;
    for (int i = 0; i < 3; ++i) offset[i] = t[i] * c.dilation[i] - c.pad[i];
    from.taps.push_back(offset);
  });
  Scatter to{c.rows, c.groups * c.rows * positions, positions, c.out, {0, 0, 0}, {1, 1, 1}};
  const Rows rows{c.rows, c.channels, c.rows * depth, depth, taps_of(c), all_taps(c), c.bfloat16};
  if (c.groups == 1 && !c.bfloat16 && channels_last_pays(c.batch, c.channels, c.rows, taps_of(c), c.out)) {
    const ChannelsLast turned = turn_channels(threads, c.batch, size, x, rows, w);
    return channels_last_product(threads, from, turned, rows.taps, bias, to, y);
  }
  flatten(from, to);
  // Weights that few positions read take longer to pack than to multiply with where they are.
  if (!c.bfloat16 && from.positions() < 1024)
    return product(threads, c.groups, from, channels.data, w, false, bias, to, y, false);
  float* const a = memory.floats(c.groups * c.rows * depth);
  pack_rows(threads, c.groups, rows, w, a);
  product(threads, c.groups, from, channels.data, a, true, bias, to, y, c.bfloat16);
}

void input_gradient(
    const Threads& threads, const Convolution& c, const float* dy, const float* w, const float* bias, float* dx) {
  if (winograd_pays(c)) return winograd_input_gradient(threads, c, dy, w, bias, dx);
  thread_local Scratch memory;
  const int64_t size = volume(c.in), positions = volume(c.out), kernel = taps_of(c);
  const Channels channels(threads, c, c.rows, positions, dy);
  // x at i takes from y at (i + pad - t * dilation) / stride for the taps t that make it whole: for every i = r + stride
  // * j with the same r these are the same taps.
  Axes residues, fewest;
  for (int i = 0; i < 3; ++i) residues[i] = std::min(c.stride[i], c.in[i]), fewest[i] = c.in[i] / std::max<int64_t>(residues[i], 1);
  const bool last = c.groups == 1 && !c.bfloat16 && channels_last_pays(c.batch, c.rows, c.channels, kernel, fewest);
  const Rows all{c.channels, c.rows, c.rows * c.channels * kernel, kernel, c.channels * kernel, all_taps(c), c.bfloat16};
  const ChannelsLast turned = last ? turn_channels(threads, c.batch, positions, dy, all, w) : ChannelsLast{};
  float* const a = last ? nullptr : memory.floats(c.groups * c.rows * c.channels * kernel);
  for_taps(residues, [&](const Axes& r) {
    Gather from{c.batch, channels.count, c.groups * channels.count * positions, positions, c.out, {}, {1, 1, 1}, {}};
    Scatter to{c.channels, c.groups * c.channels * size, size, c.in, r, c.stride};
    for (int i = 0; i < 3; ++i) from.grid[i] = (c.in[i] - r[i] + c.stride[i] - 1) / c.stride[i];
    std::vector<int64_t> taps;
    int64_t tap = 0;
    for_taps(c.kernel, [&](const Axes& t) {
      Axes offset;
      bool whole = true;
      for (int i = 0; i < 3; ++i) {
        const int64_t place = r[i] + c.pad[i] - t[i] * c.dilation[i];
        whole = whole && place % c.stride[i] == 0;
        offset[i] = place / c.stride[i];
      }
      if (whole) from.taps.push_back(offset), taps.push_back(tap);
      ++tap;
    });
    if (last) return channels_last_product(threads, from, turned, taps, bias, to, dx);
    if (taps.empty()) {  // no tap reaches these: a product over nothing
      from.taps.push_back({0, 0, 0});
      from.channels = 0;
    }
    flatten(from, to);
    Rows rows = all;
    rows.taps = taps;
    pack_rows(threads, c.groups, rows, w, a);
    product(threads, c.groups, from, channels.data, a, true, bias, to, dx, c.bfloat16);
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
