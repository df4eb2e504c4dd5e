// What normalisations of channels share: loops over a channel of all samples, or a group of one, and its statistics.
//
// A channel is read from memory once: what later passes over it read lies in the second-level cache, 128 KB for 32
// samples of 32 x 32. Sums are in float over blocks and of those in double.
#pragma once

#include <algorithm>
#include <array>

#include "core/op.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

constexpr std::size_t block_elements = 1024;  // summed in float

// A channel's elements: `rows` runs of `length`, `distance` apart.
struct Channel {
  std::size_t rows, length, distance;

  double count() const { return static_cast<double>(rows) * static_cast<double>(length); }

  // Calls each(offset, extent) for all vectors.
  template <class Each>
  void all(Each&& each) const {
    for (std::size_t r = 0; r < rows; ++r)
      vectors(length, [&](std::size_t i, auto extent) { each(r * distance + i, extent); });
  }

  // Sums of what each(offset, extent, sums) adds to an array of vectors: to four arrays in turn, as one would wait for
  // its own additions.
  template <std::size_t Sums, class Each>
  std::array<double, Sums> sums(Each&& each) const {
    std::array<double, Sums> totals{};
    vfloat block[4][Sums] = {};
    std::size_t filled = 0;
    const auto flush = [&] {
      for (std::size_t s = 0; s < Sums; ++s) {
        totals[s] += sum((block[0][s] + block[1][s]) + (block[2][s] + block[3][s]));
        for (std::size_t k = 0; k < 4; ++k) block[k][s] = vfloat{};
      }
      filled = 0;
    };
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t begin = 0; begin < length; begin += block_elements) {
        const std::size_t from = r * distance + begin, size = std::min(block_elements, length - begin);
        std::size_t i = 0;
        for (; i + 4 * lanes <= size; i += 4 * lanes)
#pragma GCC unroll 4
          for (std::size_t k = 0; k < 4; ++k) each(from + i + k * lanes, Full{}, block[k]);
        for (; i + lanes <= size; i += lanes) each(from + i, Full{}, block[0]);
        if (i < size) each(from + i, Part{size - i}, block[0]);
        if ((filled += size) >= block_elements) flush();
      }
    flush();
    return totals;
  }
};

// Zeros the lanes of a vector that are not there.
inline vfloat kept(vfloat v, Full) { return v; }
inline vfloat kept(vfloat v, Part part) { return select(among_first(part.count), v, vfloat{}); }

inline double mean_of(const Channel& channel, const float* x) {
  return channel.sums<1>([=](std::size_t i, auto extent, vfloat* sums) { sums[0] += load(x + i, extent); })[0] /
         channel.count();
}

// Mean and variance of a channel. The mean is rounded for what is subtracted from x; what that leaves is in the variance.
struct Statistics {
  Statistics(const Channel& channel, const float* x) {
    const double exact = mean_of(channel, x);
    center = static_cast<float>(exact), off = exact - center;
    const double squares = channel.sums<1>([=, c = center](std::size_t i, auto extent, vfloat* sums) {
      const vfloat d = kept(load(x + i, extent) - c, extent);
      sums[0] += d * d;
    })[0];
    variance = squares / channel.count() - off * off;
  }

  float center;
  double off, variance;
};

struct Sizes {
  explicit Sizes(const Shape& x) {
    require(x.size() >= 2, "x must have a batch and channels");
    batch = static_cast<std::size_t>(x[0]), channels = static_cast<std::size_t>(x[1]);
    positions = count(x.begin() + 2, x.end());
  }
  Channel channel() const { return {batch, positions, channels * positions}; }

  std::size_t batch, channels, positions;
};

// Calls task(first, last) for ranges of at least so many channels, where there are as many, on the threads.
template <class Task>
void for_channel_ranges(const Threads& threads, const Sizes& sizes, std::size_t least, Task&& task) {
  threads.ranges(sizes.channels, std::max(least, 1 + 4096 / (1 + sizes.batch * sizes.positions)), task);
}

// Calls task(channel) for all channels.
template <class Task>
void for_channels(const Threads& threads, const Sizes& sizes, Task&& task) {
  for_channel_ranges(threads, sizes, 1, [&](std::size_t begin, std::size_t end) {
    for (std::size_t c = begin; c < end; ++c) task(c);
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
