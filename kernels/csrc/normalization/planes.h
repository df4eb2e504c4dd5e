// Channels that are normalised at once: one, or several whose planes are short. Both have the same interface, so that an
// op is written once: what it calls for vectors of elements gets (offset, place, extent), where `place` says for which
// channels the vector's elements are.
#pragma once

#include <algorithm>
#include <array>

#include "normalization/channels.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// [sum][channel]
template <std::size_t Sums, std::size_t channels>
using Totals = std::array<std::array<double, channels>, Sums>;

class OneChannel {
 public:
  static constexpr std::size_t most = 1;

  explicit OneChannel(const Sizes& sizes) : channel_(sizes.channel()) {}

  std::size_t channels() const { return 1; }
  double count() const { return channel_.count(); }

  template <class Each>
  void all(Each&& each) const {
    channel_.all([&](std::size_t i, auto extent) { each(i, 0, extent); });
  }

  template <std::size_t Sums, class Each>
  Totals<Sums, most> sums(Each&& each) const {
    const auto sums = channel_.sums<Sums>([&](std::size_t i, auto extent, vfloat* sums) { each(i, 0, extent, sums); });
    Totals<Sums, most> totals;
    for (std::size_t s = 0; s < Sums; ++s) totals[s][0] = sums[s];
    return totals;
  }

  // A number of each channel, as a vector beside its elements.
  struct Numbers {
    template <class Of>
    Numbers(const OneChannel&, Of&& of) : value(of(0)) {}
    template <class Extent>
    vfloat operator()(std::size_t, Extent) const { return splat(value); }

    float value;
  };

 private:
  Channel channel_;
};

// Vectors go over the planes of several channels, which lie one after the other in each sample: those of one channel
// alone would be incomplete, half or less of them used. Sums are kept for each place of a plane, in float over blocks of
// samples, and added up per channel in double.
class ShortPlanes {
 public:
  static constexpr std::size_t most = 512;  // elements of a sample, and hence channels

  // Whether planes are short enough: for longer ones the sums that each vector adds to memory cost more than is gained.
  static bool are_in(const Sizes& sizes) { return 0 < sizes.positions && sizes.positions <= 16; }

  // How many channels at once. What is read a second time should lie in the second-level cache.
  static std::size_t channels_of(const Sizes& sizes) {
    const std::size_t width = std::clamp<std::size_t>(32768 / (1 + sizes.batch), 4 * lanes, most);
    return std::max<std::size_t>(width / sizes.positions, 1);
  }

  ShortPlanes(const Sizes& sizes, std::size_t channels)
      : samples_(sizes.batch), positions_(sizes.positions), channels_(channels),
        distance_(sizes.channels * sizes.positions) {}

  std::size_t channels() const { return channels_; }
  double count() const { return static_cast<double>(samples_) * static_cast<double>(positions_); }

  template <class Each>
  void all(Each&& each) const {
    for (std::size_t n = 0; n < samples_; ++n)
      vectors(channels_ * positions_, [&](std::size_t i, auto extent) { each(n * distance_ + i, i, extent); });
  }

  template <std::size_t Sums, class Each>
  Totals<Sums, most> sums(Each&& each) const {
    Totals<Sums, most> totals{};
    float block[Sums][most];
    for (std::size_t begin = 0; begin < samples_; begin += block_samples) {
      for (auto& row : block) std::fill_n(row, channels_ * positions_, 0.f);
      for (std::size_t n = begin; n < std::min(begin + block_samples, samples_); ++n)
        vectors(channels_ * positions_, [&](std::size_t i, auto extent) {
          vfloat sums[Sums];
          for (std::size_t s = 0; s < Sums; ++s) sums[s] = load(block[s] + i, extent);
          each(n * distance_ + i, i, extent, sums);
          for (std::size_t s = 0; s < Sums; ++s) store(block[s] + i, sums[s], extent);
        });
      for (std::size_t s = 0; s < Sums; ++s)
        for (std::size_t c = 0; c < channels_; ++c)
          for (std::size_t p = 0; p < positions_; ++p) totals[s][c] += block[s][c * positions_ + p];
    }
    return totals;
  }

  struct Numbers {
    template <class Of>
    Numbers(const ShortPlanes& planes, Of&& of) {
      for (std::size_t c = 0; c < planes.channels_; ++c)
        std::fill_n(values + c * planes.positions_, planes.positions_, of(c));
    }
    template <class Extent>
    vfloat operator()(std::size_t place, Extent extent) const { return load(values + place, extent); }

    float values[most];
  };

 private:
  static constexpr std::size_t block_samples = 32;

  std::size_t samples_, positions_, channels_, distance_;
};

// Calls task(channels, first channel) with a OneChannel or ShortPlanes, until all channels were among them.
template <class Task>
void for_planes(const Threads& threads, const Sizes& sizes, Task&& task) {
  // Threads get as many channels as fill some vectors.
  const std::size_t least = ShortPlanes::are_in(sizes) ? 128 / sizes.positions : 1;
  for_channel_ranges(threads, sizes, least, [&](std::size_t begin, std::size_t end) {
    if (!ShortPlanes::are_in(sizes)) {
      for (std::size_t c = begin; c < end; ++c) task(OneChannel(sizes), c);
      return;
    }
    const std::size_t most = ShortPlanes::channels_of(sizes);
    for (std::size_t c = begin; c < end; c += most) task(ShortPlanes(sizes, std::min(most, end - c)), c);
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
