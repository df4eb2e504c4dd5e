// GroupNormalization and its gradient, which is InstanceNormalization's, too. A group, contiguous in memory, is read
// three times: for its mean, for its variance and sums, and for the result; it stays in the cache where it is small enough.
#include <algorithm>
#include <cmath>

#include "core/op.h"
#include "normalization/channels.h"
#include "normalization/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// Mean, and 1 / sqrt(variance + epsilon), of a group.
struct Moments : Statistics {
  Moments(const float* values, std::size_t size, float epsilon)
      : Statistics(Channel{1, size, 0}, values), inverse(1.f / std::sqrt(static_cast<float>(variance) + epsilon)) {}

  float inverse;
};

struct GroupNormalization {
  static constexpr const char* name = "GroupNormalization_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<1> outputs{};

  explicit GroupNormalization(const Attributes& attributes)
      : epsilon_(attributes.number("epsilon")), groups_(attributes.integer("num_groups")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0), scale = context.input<float>(1), bias = context.input<float>(2);
    require(x.shape.size() >= 2, "x must have a batch and channels");
    const std::size_t batch = x.shape[0], channels = x.shape[1], spatial = count(x.shape.begin() + 2, x.shape.end());
    require(scale.size() == channels && bias.size() == channels, "one scale and bias per channel");
    require(groups_ > 0 && channels % static_cast<std::size_t>(groups_) == 0, "the groups must share the channels evenly");
    const std::size_t groups = static_cast<std::size_t>(groups_), per_group = channels / groups, size = per_group * spatial;
    const auto y = context.output<float>(0, x.shape);
    if (y.data == nullptr || size == 0) return;
    context.threads().run(batch * groups, [&](std::size_t group) {
      const std::size_t first = group * per_group;  // of all samples' channels
      const Moments moments(x.data + first * spatial, size, epsilon_);
      for (std::size_t c = first; c < first + per_group; ++c) {
        const float *xs = x.data + c * spatial, factor = moments.inverse * scale.data[c % channels], shift = bias.data[c % channels];
        float* to = y.data + c * spatial;
        vectors(spatial, [&](std::size_t i, auto extent) {
          store(to + i, (load(xs + i, extent) - moments.center) * factor + shift, extent);
        });
      }
    });
  }

 private:
  float epsilon_;
  int64_t groups_;
};

struct GroupNormalizationGradient {
  static constexpr const char* name = "GroupNormalizationGradient_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<3> outputs{};
  static constexpr int in_place[] = {0, 1};

  explicit GroupNormalizationGradient(const Attributes& attributes)
      : epsilon_(attributes.number("epsilon")), groups_(attributes.integer("num_groups")) {}

  void compute(Context& context) const {
    const auto ct = context.input<float>(0), x = context.input<float>(1), scale = context.input<float>(2);
    require(x.shape.size() >= 2 && ct.shape == x.shape, "x and its cotangent must have a batch and channels");
    const std::size_t batch = x.shape[0], channels = x.shape[1], spatial = count(x.shape.begin() + 2, x.shape.end());
    require(scale.size() == channels, "one scale per channel");
    require(groups_ >= 0, "there must be groups");
    const std::size_t groups = std::min(groups_ ? static_cast<std::size_t>(groups_) : channels, channels);
    require(groups_ == 0 || channels % static_cast<std::size_t>(groups_) == 0, "the groups must share the channels evenly");
    const auto ct_x = context.output<float>(0, x.shape), ct_scale = context.output<float>(1, scale.shape);
    const auto ct_bias = context.output<float>(2, scale.shape);

    // Per sample and channel; summed over samples at the end, in their order.
    std::vector<double> of_scale(batch * channels), of_bias(batch * channels);
    const std::size_t per_group = groups ? channels / groups : 0;
    context.threads().run(batch * groups, [&](std::size_t group) {
      const std::size_t first = group * per_group;  // of all samples' channels
      const float* values = x.data + first * spatial;
      const std::size_t size = per_group * spatial;
      if (size == 0) return;
      const Moments moments(values, size, epsilon_);
      const float mean = moments.center, inverse = moments.inverse;
      double sum_g = 0, sum_along = 0;
      for (std::size_t c = first; c < first + per_group; ++c) {
        const float *cts = ct.data + c * spatial, *xs = x.data + c * spatial;
        const auto [total, along] = Channel{1, spatial, 0}.sums<2>([=](std::size_t i, auto extent, vfloat* sums) {
          const vfloat g = load(cts + i, extent);
          sums[0] += g;
          sums[1] += g * (load(xs + i, extent) - mean);
        });
        of_bias[c] = total;
        of_scale[c] = inverse * (along - moments.off * total);
        sum_g += of_bias[c] * scale.data[c % channels];
        sum_along += of_scale[c] * scale.data[c % channels];
      }
      if (ct_x.data == nullptr) return;
      const float mean_g = static_cast<float>(sum_g / size), along = static_cast<float>(sum_along / size) * inverse;
      for (std::size_t c = first; c < first + per_group; ++c) {
        const float *cts = ct.data + c * spatial, *xs = x.data + c * spatial, factor = scale.data[c % channels];
        float* to = ct_x.data + c * spatial;
        vectors(spatial, [&](std::size_t i, auto extent) {
          const vfloat centered = load(xs + i, extent) - mean;
          store(to + i, (load(cts + i, extent) * factor - mean_g - centered * along) * inverse, extent);
        });
      }
    });
    for (std::size_t c = 0; c < channels; ++c) {
      double scale_sum = 0, bias_sum = 0;
      for (std::size_t n = 0; n < batch; ++n) {
        scale_sum += of_scale[n * channels + c];
        bias_sum += of_bias[n * channels + c];
      }
      if (ct_scale.data) ct_scale.data[c] = static_cast<float>(scale_sum);
      if (ct_bias.data) ct_bias.data[c] = static_cast<float>(bias_sum);
    }
  }

 private:
  float epsilon_;
  int64_t groups_;
};

}  // namespace

void add_group_norm(Domain& domain) {
  domain.add<GroupNormalization>();
  domain.add<GroupNormalizationGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
