// BatchNormalization by the statistics of the batch, alone or with a ReLU or ReLU6 behind it, and their gradients.
#include <array>
#include <cmath>
#include <type_traits>

#include "normalization/family.h"
#include "normalization/planes.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// What is behind: what it makes of a value, and what its gradient, told by the result, makes of a cotangent. Neither is
// by max() or min(), which of what is no number would make a bound.
struct Nothing {
  static constexpr bool reads_result = false;
  static constexpr std::array<int, 2> in_place{0, 1};
  static constexpr const char *name = "BatchNormalizationTraining_float", *gradient = "BatchNormalizationGradient_float";
  static vfloat apply(vfloat value) { return value; }
  static vfloat back(vfloat, vfloat ct) { return ct; }
};
struct Relu {
  static constexpr bool reads_result = true;
  static constexpr std::array<int, 3> in_place{0, 1, 3};
  static constexpr const char *name = "BatchNormalizationRelu_float", *gradient = "BatchNormalizationReluGradient_float";
  static vfloat apply(vfloat value) { return select(value < 0.f, vfloat{}, value); }
  static vfloat back(vfloat y, vfloat ct) { return select(y <= 0.f, vfloat{}, ct); }
};
struct Relu6 {
  static constexpr bool reads_result = true;
  static constexpr std::array<int, 3> in_place{0, 1, 3};
  static constexpr const char *name = "BatchNormalizationRelu6_float", *gradient = "BatchNormalizationRelu6Gradient_float";
  static vfloat apply(vfloat value) { return select(value > 6.f, splat(6.f), Relu::apply(value)); }
  static vfloat back(vfloat y, vfloat ct) { return select(y < 6.f, Relu::back(y, ct), vfloat{}); }
};

template <class Activation>
struct Normalization {
  static constexpr const char* name = Activation::name;
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
    for_planes(context.threads(), sizes, [&](const auto& channels, std::size_t first) {
      using Channels = std::decay_t<decltype(channels)>;
      const float* const from = x.data + first * sizes.positions;
      double off[Channels::most], variance[Channels::most];
      const auto totals = channels.template sums<1>(
          [=](std::size_t i, std::size_t, auto extent, vfloat* sums) { sums[0] += load(from + i, extent); });
      // Rounded for what is subtracted from x; what that leaves is in the variance.
      const typename Channels::Numbers center(channels, [&](std::size_t c) {
        const double exact = totals[0][c] / channels.count();
        const float rounded = static_cast<float>(exact);
        off[c] = exact - rounded;
        if (new_mean.data) new_mean.data[first + c] = mean.data[first + c] * momentum_ + rounded * (1 - momentum_);
        return rounded;
      });
      const auto squares = channels.template sums<1>([&](std::size_t i, std::size_t place, auto extent, vfloat* sums) {
        const vfloat d = kept(load(from + i, extent) - center(place, extent), extent);
        sums[0] += d * d;
      });
      for (std::size_t c = 0; c < channels.channels(); ++c) {
        variance[c] = squares[0][c] / channels.count() - off[c] * off[c];
        if (new_var.data)
          new_var.data[first + c] = var.data[first + c] * momentum_ + static_cast<float>(variance[c]) * (1 - momentum_);
      }
      if (y.data == nullptr) return;
      const typename Channels::Numbers factor(channels, [&](std::size_t c) {
        return scale.data[first + c] / std::sqrt(static_cast<float>(variance[c]) + epsilon_);
      });
      const typename Channels::Numbers shift(channels, [&](std::size_t c) { return bias.data[first + c]; });
      float* const to = y.data + first * sizes.positions;
      channels.all([&](std::size_t i, std::size_t place, auto extent) {
        const vfloat d = load(from + i, extent) - center(place, extent);
        store(to + i, Activation::apply(d * factor(place, extent) + shift(place, extent)), extent);
      });
    });
  }

 private:
  float epsilon_, momentum_;
};

// With r = 1 / sqrt(var + epsilon) and g the cotangent of what is before the activation, y its result:
// ct_x = scale r (g - mean(g) - (x - mean) r² mean(g (x - mean))).
template <class Activation>
struct NormalizationGradient {
  static constexpr const char* name = Activation::gradient;
  static constexpr Floats<(Activation::reads_result ? 4 : 3)> inputs{};
  static constexpr Floats<3> outputs{};
  static constexpr auto in_place = Activation::in_place;

  explicit NormalizationGradient(const Attributes& a) : epsilon_(a.number("epsilon")) {}

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), scale = context.input<const float>(2);
    const auto y = Activation::reads_result ? context.input<const float>(3) : ct;
    const Sizes sizes(x.shape);
    require(ct.shape == x.shape && y.shape == x.shape, "x, y and the cotangent must have one shape");
    require(scale.size() == sizes.channels, "one scale per channel");
    const auto ct_x = context.output<float>(0, x.shape);
    const auto ct_scale = context.output<float>(1, {x.shape[1]}), ct_bias = context.output<float>(2, {x.shape[1]});
    for_planes(context.threads(), sizes, [&](const auto& channels, std::size_t first) {
      using Channels = std::decay_t<decltype(channels)>;
      const std::size_t begin = first * sizes.positions;
      const float *const xs = x.data + begin, *const cts = ct.data + begin, *const ys = y.data + begin;
      const auto cotangent = [=](std::size_t i, auto extent) {
        return Activation::back(load(ys + i, extent), load(cts + i, extent));
      };
      double off[Channels::most];
      const auto totals = channels.template sums<1>(
          [=](std::size_t i, std::size_t, auto extent, vfloat* sums) { sums[0] += load(xs + i, extent); });
      const typename Channels::Numbers center(channels, [&](std::size_t c) {
        const double exact = totals[0][c] / channels.count();
        const float rounded = static_cast<float>(exact);
        off[c] = exact - rounded;
        return rounded;
      });
      const auto sums = channels.template sums<3>([&](std::size_t i, std::size_t place, auto extent, vfloat* sums) {
        const vfloat d = kept(load(xs + i, extent) - center(place, extent), extent), g = cotangent(i, extent);
        sums[0] += d * d;
        sums[1] += g;
        sums[2] += g * d;
      });
      float factors[Channels::most], means[Channels::most], slopes[Channels::most];
      for (std::size_t c = 0; c < channels.channels(); ++c) {
        const double total = sums[1][c], product = sums[2][c] - off[c] * total;
        const double inverse = 1 / std::sqrt(sums[0][c] / channels.count() - off[c] * off[c] + epsilon_);
        if (ct_scale.data) ct_scale.data[first + c] = static_cast<float>(product * inverse);
        if (ct_bias.data) ct_bias.data[first + c] = static_cast<float>(total);
        factors[c] = static_cast<float>(scale.data[first + c] * inverse);
        means[c] = static_cast<float>(total / channels.count());
        slopes[c] = static_cast<float>(product / channels.count() * inverse * inverse);
      }
      if (ct_x.data == nullptr) return;
      const typename Channels::Numbers factor(channels, [&](std::size_t c) { return factors[c]; });
      const typename Channels::Numbers mean(channels, [&](std::size_t c) { return means[c]; });
      const typename Channels::Numbers slope(channels, [&](std::size_t c) { return slopes[c]; });
      float* const to = ct_x.data + begin;
      channels.all([&](std::size_t i, std::size_t place, auto extent) {
        const vfloat d = load(xs + i, extent) - center(place, extent);
        store(to + i, (cotangent(i, extent) - mean(place, extent) - d * slope(place, extent)) * factor(place, extent), extent);
      });
    });
  }

 private:
  float epsilon_;
};

}  // namespace

void add_batch_norm(Domain& domain) {
  domain.add<Normalization<Nothing>>();
  domain.add<Normalization<Relu>>();
  domain.add<Normalization<Relu6>>();
  domain.add<NormalizationGradient<Nothing>>();
  domain.add<NormalizationGradient<Relu>>();
  domain.add<NormalizationGradient<Relu6>>();
  add_batch_norm_pool(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
