// BatchNormalization by the statistics of the batch, alone or with a ReLU or ReLU6 behind it, and their gradients.
#include <cmath>

#include "normalization/channels.h"
#include "normalization/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// What is behind: what it makes of a value, and what its gradient, told by the result, makes of a cotangent. Neither is
// by max() or min(), which of what is no number would make a bound.
struct Nothing {
  static constexpr bool reads_result = false;
  static constexpr const char *name = "BatchNormalizationTraining_float", *gradient = "BatchNormalizationGradient_float";
  static vfloat apply(vfloat value) { return value; }
  static vfloat back(vfloat, vfloat ct) { return ct; }
};
struct Relu {
  static constexpr bool reads_result = true;
  static constexpr const char *name = "BatchNormalizationRelu_float", *gradient = "BatchNormalizationReluGradient_float";
  static vfloat apply(vfloat value) { return select(value < 0.f, vfloat{}, value); }
  static vfloat back(vfloat y, vfloat ct) { return select(y <= 0.f, vfloat{}, ct); }
};
struct Relu6 {
  static constexpr bool reads_result = true;
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
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      const Channel channel = sizes.channel();
      const float* const from = x.data + c * sizes.positions;
      const Statistics statistics(channel, from);
      const float center = statistics.center;
      const double variance = statistics.variance;
      if (new_mean.data) new_mean.data[c] = mean.data[c] * momentum_ + center * (1 - momentum_);
      if (new_var.data) new_var.data[c] = var.data[c] * momentum_ + static_cast<float>(variance) * (1 - momentum_);
      if (y.data == nullptr) return;
      const float factor = scale.data[c] / std::sqrt(static_cast<float>(variance) + epsilon_), shift = bias.data[c];
      float* const to = y.data + c * sizes.positions;
      channel.all([=](std::size_t i, auto extent) {
        store(to + i, Activation::apply((load(from + i, extent) - center) * factor + shift), extent);
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

  explicit NormalizationGradient(const Attributes& a) : epsilon_(a.number("epsilon")) {}

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), scale = context.input<const float>(2);
    const auto y = Activation::reads_result ? context.input<const float>(3) : ct;
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
        return Activation::back(load(ys + i, extent), load(cts + i, extent));
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
  domain.add<Normalization<Nothing>>();
  domain.add<Normalization<Relu>>();
  domain.add<Normalization<Relu6>>();
  domain.add<NormalizationGradient<Nothing>>();
  domain.add<NormalizationGradient<Relu>>();
  domain.add<NormalizationGradient<Relu6>>();
  add_batch_norm_pool(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
