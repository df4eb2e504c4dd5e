// BatchNormalization by the statistics of the batch, with a ReLU behind it or not, and their gradients.
#include <cmath>

#include "convolution/channels.h"
#include "convolution/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

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
      const Statistics statistics(channel, from);
      const float center = statistics.center;
      const double variance = statistics.variance;
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
  add_batch_norm_pool(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
