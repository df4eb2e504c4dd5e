// BatchNormalization by the statistics of the batch, MaxPool and ReLU in one, and their gradient.
//
// What BatchNormalization gives never reaches memory; its gradient is read where the maxima were.
#include <cmath>

#include "core/scratch.h"
#include "normalization/channels.h"
#include "normalization/family.h"
#include "pooling/pool.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct BatchNormalizationMaxPoolRelu {
  static constexpr const char* name = "BatchNormalizationMaxPoolRelu_float";
  static constexpr Floats<5> inputs{};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float, Type::Int64};

  explicit BatchNormalizationMaxPoolRelu(const Attributes& a)
      : epsilon_(a.number("epsilon")), momentum_(a.number("momentum")), kernel_(a.integers("kernel_shape")),
        strides_(a.integers("strides")), pads_(a.integers("pads")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0), scale = context.input<const float>(1), bias = context.input<const float>(2);
    const auto mean = context.input<const float>(3), var = context.input<const float>(4);
    const Sizes sizes(x.shape);
    const Pool pool(x.shape, kernel_, strides_, pads_);
    for (const auto& parameter : {scale, bias, mean, var})
      require(parameter.size() == sizes.channels, "one scale, bias, mean and variance per channel");
    const Shape result = pool.result(x.shape);
    const auto y = context.output<float>(0, result);
    const auto new_mean = context.output<float>(1, mean.shape), new_var = context.output<float>(2, var.shape);
    const auto places = context.output<int64_t>(3, result);
    const std::size_t windows = static_cast<std::size_t>(volume(pool.out));
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      thread_local Scratch plane_memory, result_memory;
      thread_local std::vector<int64_t> unread;
      const Channel channel = sizes.channel();
      const Statistics s(channel, x.data + c * sizes.positions);
      if (new_mean.data) new_mean.data[c] = mean.data[c] * momentum_ + s.center * (1 - momentum_);
      if (new_var.data) new_var.data[c] = var.data[c] * momentum_ + static_cast<float>(s.variance) * (1 - momentum_);
      const float factor = scale.data[c] / std::sqrt(static_cast<float>(s.variance) + epsilon_), shift = bias.data[c];
      float* const z = plane_memory.floats(sizes.positions);
      if (!places.data) unread.resize(windows);
      for (std::size_t n = 0; n < sizes.batch; ++n) {
        const std::size_t plane = n * sizes.channels + c;
        const float* const from = x.data + plane * sizes.positions;
        vectors(sizes.positions, [=, center = s.center](std::size_t i, auto extent) {
          store(z + i, (load(from + i, extent) - center) * factor + shift, extent);
        });
        pool.run(z, static_cast<int64_t>(plane * sizes.positions), y.data ? y.data + plane * windows : result_memory.floats(windows),
                 places.data ? places.data + plane * windows : unread.data());
      }
    });
  }

 private:
  float epsilon_, momentum_;
  std::vector<int64_t> kernel_, strides_, pads_;
};

// ct_x as in BatchNormalization's gradient, where the cotangent of its result is ct at the places of maxima that are positive or
// NaN, no two of which are the same, and zero elsewhere.
struct BatchNormalizationMaxPoolReluGradient {
  static constexpr const char* name = "BatchNormalizationMaxPoolReluGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float, Type::Int64};
  static constexpr Floats<3> outputs{};

  explicit BatchNormalizationMaxPoolReluGradient(const Attributes& a) : epsilon_(a.number("epsilon")) {}

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), scale = context.input<const float>(2);
    const auto y = context.input<const float>(3);
    const auto places = context.input<const int64_t>(4);
    const Sizes sizes(x.shape);
    require(ct.shape == y.shape && places.shape == y.shape, "y, its places and cotangent must have one shape");
    require(y.shape.size() == x.shape.size() && y.shape[0] == x.shape[0] && y.shape[1] == x.shape[1], "y must have the batch and channels of x");
    require(scale.size() == sizes.channels, "one scale per channel");
    const std::size_t windows = count(y.shape.begin() + 2, y.shape.end());
    const auto ct_x = context.output<float>(0, x.shape);
    const auto ct_scale = context.output<float>(1, {x.shape[1]}), ct_bias = context.output<float>(2, {x.shape[1]});
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      const Channel channel = sizes.channel();
      const Statistics s(channel, x.data + c * sizes.positions);
      double total = 0, along = 0;
      for (std::size_t n = 0; n < sizes.batch; ++n) {
        const std::size_t plane = n * sizes.channels + c, first = plane * sizes.positions;
        float plane_total = 0, plane_along = 0;
        for (std::size_t i = plane * windows; i < (plane + 1) * windows; ++i) {
          const std::size_t place = static_cast<std::size_t>(places.data[i]);
          require(place - first < sizes.positions, "a maximum must lie in the plane of its window");
          const float g = y.data[i] <= 0.f ? 0.f : ct.data[i];
          plane_total += g;
          plane_along += g * (x.data[place] - s.center);
        }
        total += plane_total, along += plane_along;
      }
      const double product = along - s.off * total, inverse = 1 / std::sqrt(s.variance + epsilon_);
      if (ct_scale.data) ct_scale.data[c] = static_cast<float>(product * inverse);
      if (ct_bias.data) ct_bias.data[c] = static_cast<float>(total);
      if (ct_x.data == nullptr) return;
      const float factor = static_cast<float>(scale.data[c] * inverse), mean = static_cast<float>(total / channel.count());
      const float slope = static_cast<float>(product / channel.count() * inverse * inverse);
      for (std::size_t n = 0; n < sizes.batch; ++n) {
        const std::size_t plane = n * sizes.channels + c, first = plane * sizes.positions;
        const float* const from = x.data + first;
        float* const to = ct_x.data + first;
        vectors(sizes.positions, [=, center = s.center](std::size_t i, auto extent) {
          store(to + i, -(mean + (load(from + i, extent) - center) * slope) * factor, extent);
        });
        for (std::size_t i = plane * windows; i < (plane + 1) * windows; ++i)
          ct_x.data[places.data[i]] += (y.data[i] <= 0.f ? 0.f : ct.data[i]) * factor;
      }
    });
  }

 private:
  float epsilon_;
};

}  // namespace

void add_batch_norm_pool(Domain& domain) {
  domain.add<BatchNormalizationMaxPoolRelu>();
  domain.add<BatchNormalizationMaxPoolReluGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
