// BatchNormalization by the statistics of the batch, with a ReLU behind it or not, and their gradients.
//
// A channel of all samples is read from memory once: what later passes over it read lies in the second-level cache,
// 128 KB for 32 samples of 32 x 32. Sums are in float over blocks and of those in double.
#include <algorithm>
#include <array>
#include <cmath>

#include "convolution/family.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

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

  // Sums of what each(offset, extent, sums) adds to an array of vectors.
  template <std::size_t Sums, class Each>
  std::array<double, Sums> sums(Each&& each) const {
    std::array<double, Sums> totals{};
    vfloat block[Sums] = {};
    std::size_t filled = 0;
    const auto flush = [&] {
      for (std::size_t s = 0; s < Sums; ++s) totals[s] += sum(block[s]), block[s] = vfloat{};
      filled = 0;
    };
    for (std::size_t r = 0; r < rows; ++r)
      for (std::size_t begin = 0; begin < length; begin += block_elements) {
        const std::size_t size = std::min(block_elements, length - begin);
        vectors(size, [&](std::size_t i, auto extent) { each(r * distance + begin + i, extent, block); });
        if ((filled += size) >= block_elements) flush();
      }
    flush();
    return totals;
  }
};

// Zeros the lanes of a vector that are not there.
inline vfloat kept(vfloat v, Full) { return v; }
inline vfloat kept(vfloat v, Part part) {
  float values[lanes];
  store(values, v);
  return load(values, part.count);
}

double mean_of(const Channel& channel, const float* x) {
  return channel.sums<1>([=](std::size_t i, auto extent, vfloat* sums) { sums[0] += load(x + i, extent); })[0] /
         channel.count();
}

struct Sizes {
  explicit Sizes(const Shape& x) {
    require(x.size() >= 2, "x must have a batch and channels");
    batch = static_cast<std::size_t>(x[0]), channels = static_cast<std::size_t>(x[1]);
    positions = count(x.begin() + 2, x.end());
  }
  Channel channel() const { return {batch, positions, channels * positions}; }

  std::size_t batch, channels, positions;
};

// Calls task(channel) for all channels, some at a time on each thread.
template <class Task>
void for_channels(const Threads& threads, const Sizes& sizes, Task&& task) {
  const std::size_t least = 1 + 4096 / (1 + sizes.batch * sizes.positions);
  const std::size_t parts = std::clamp<std::size_t>(sizes.channels / least, 1, 4 * threads.width());
  threads.run(parts, [&](std::size_t part) {
    for (std::size_t c = sizes.channels * part / parts; c < sizes.channels * (part + 1) / parts; ++c) task(c);
  });
}

template <bool Relu>
struct Normalization {
  static constexpr const char* name = Relu ? "BatchNormalizationRelu_float" : "BatchNormalizationTraining_float";
  static constexpr Floats<5> inputs{};
  static constexpr Floats<3> outputs{};

  explicit Normalization(const Attributes& a) : epsilon_(a.number("epsilon")), momentum_(a.number("momentum")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0), scale = context.input<const float>(1), bias = context.input<const float>(2);
    const auto mean = context.input<const float>(3), var = context.input<const float>(4);
    const Sizes sizes(x.shape);
    for (const auto& parameter : {scale, bias, mean, var})
      require(parameter.size() == sizes.channels, "one scale, bias, mean and variance per channel");
    const auto y = context.output<float>(0, x.shape);
    const auto new_mean = context.output<float>(1, mean.shape), new_var = context.output<float>(2, var.shape);
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      const Channel channel = sizes.channel();
      const float* const from = x.data + c * sizes.positions;
      const double exact = mean_of(channel, from);
      const float center = static_cast<float>(exact);
      const double off = exact - center;
      const double squares = channel.sums<1>([=](std::size_t i, auto extent, vfloat* sums) {
        const vfloat d = kept(load(from + i, extent) - center, extent);
        sums[0] += d * d;
      })[0];
      const double variance = squares / channel.count() - off * off;
      if (new_mean.data) new_mean.data[c] = mean.data[c] * momentum_ + center * (1 - momentum_);
      if (new_var.data) new_var.data[c] = var.data[c] * momentum_ + static_cast<float>(variance) * (1 - momentum_);
      if (y.data == nullptr) return;
      const float factor = scale.data[c] / std::sqrt(static_cast<float>(variance) + epsilon_), shift = bias.data[c];
      float* const to = y.data + c * sizes.positions;
      channel.all([=](std::size_t i, auto extent) {
        const vfloat value = (load(from + i, extent) - center) * factor + shift;
        // Not max(): of what is no number it would make zero.
        store(to + i, Relu ? select(value < 0.f, vfloat{}, value) : value, extent);
      });
    });
  }

 private:
  float epsilon_, momentum_;
};

// With r = 1 / sqrt(var + epsilon) and g the cotangent of what is before the ReLU, y its result:
// ct_x = scale r (g - mean(g) - (x - mean) r² mean(g (x - mean))).
template <bool Relu>
struct NormalizationGradient {
  static constexpr const char* name = Relu ? "BatchNormalizationReluGradient_float" : "BatchNormalizationGradient_float";
  static constexpr Floats<(Relu ? 4 : 3)> inputs{};
  static constexpr Floats<3> outputs{};

  explicit NormalizationGradient(const Attributes& a) : epsilon_(a.number("epsilon")) {}

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), scale = context.input<const float>(2);
    const auto y = Relu ? context.input<const float>(3) : ct;
    const Sizes sizes(x.shape);
    require(ct.shape == x.shape && y.shape == x.shape, "x, y and the cotangent must have one shape");
    require(scale.size() == sizes.channels, "one scale per channel");
    const auto ct_x = context.output<float>(0, x.shape);
    const auto ct_scale = context.output<float>(1, {x.shape[1]}), ct_bias = context.output<float>(2, {x.shape[1]});
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      const Channel channel = sizes.channel();
      const std::size_t first = c * sizes.positions;
      const float *const xs = x.data + first, *const cts = ct.data + first, *const ys = y.data + first;
      const auto cotangent = [=](std::size_t i, auto extent) {
        const vfloat g = load(cts + i, extent);
        return Relu ? select(load(ys + i, extent) > 0.f, g, vfloat{}) : g;
      };
      const double exact = mean_of(channel, xs);
      const float center = static_cast<float>(exact);
      const double off = exact - center;
      const auto [squares, total, along] = channel.sums<3>([=](std::size_t i, auto extent, vfloat* sums) {
        const vfloat d = kept(load(xs + i, extent) - center, extent), g = cotangent(i, extent);
        sums[0] += d * d;
        sums[1] += g;
        sums[2] += g * d;
      });
      const double variance = squares / channel.count() - off * off, product = along - off * total;
      const double inverse = 1 / std::sqrt(variance + epsilon_);
      if (ct_scale.data) ct_scale.data[c] = static_cast<float>(product * inverse);
      if (ct_bias.data) ct_bias.data[c] = static_cast<float>(total);
      if (ct_x.data == nullptr) return;
      const float factor = static_cast<float>(scale.data[c] * inverse), mean = static_cast<float>(total / channel.count());
      const float slope = static_cast<float>(product / channel.count() * inverse * inverse);
      float* const to = ct_x.data + first;
      channel.all([=](std::size_t i, auto extent) {
        store(to + i, (cotangent(i, extent) - mean - (load(xs + i, extent) - center) * slope) * factor, extent);
      });
    });
  }

 private:
  float epsilon_;
};

}  // namespace

void add_batch_norm(Domain& domain) {
  domain.add<Normalization<false>>();
  domain.add<Normalization<true>>();
  domain.add<NormalizationGradient<false>>();
  domain.add<NormalizationGradient<true>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
