// LayerNormalization and its gradient: a row is read from memory once, and again from the cache.
#include <cmath>

#include "core/op.h"
#include "core/rows.h"
#include "normalization/channels.h"
#include "normalization/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct LayerNormalization {
  static constexpr const char* name = "LayerNormalizationTraining_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<3> outputs{};

  explicit LayerNormalization(const Attributes& attributes)
      : axis_(attributes.integer("axis")), epsilon_(attributes.number("epsilon")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0), scale = context.input<float>(1), bias = context.input<float>(2);
    const int64_t rank = static_cast<int64_t>(x.shape.size()), axis = axis_ < 0 ? axis_ + rank : axis_;
    require(0 <= axis && axis < rank, "axis must be one of x");
    const std::size_t n = count(x.shape.begin() + axis, x.shape.end());
    require(scale.size() == n && bias.size() == n, "scale and bias must have the size of a row");
    Shape rows_shape = x.shape;
    std::fill(rows_shape.begin() + axis, rows_shape.end(), 1);
    const std::size_t rows = count(rows_shape);
    const auto y = context.output<float>(0, x.shape);
    const auto means = context.output<float>(1, rows_shape), inverses = context.output<float>(2, rows_shape);
    const Threads threads = context.threads();
    const auto parts = row_parts(rows, n);
    threads.run(parts, [&](std::size_t part) {
      for (std::size_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        const float* const from = x.data + r * n;
        const Statistics statistics(Channel{1, n, 0}, from);
        const float mean = statistics.center, inverse = 1.f / std::sqrt(static_cast<float>(statistics.variance) + epsilon_);
        if (means.data) means.data[r] = mean;
        if (inverses.data) inverses.data[r] = inverse;
        if (y.data == nullptr) continue;
        float* const to = y.data + r * n;
        vectors(n, [&](std::size_t i, auto extent) {
          const vfloat standard = (load(from + i, extent) - mean) * inverse;
          store(to + i, standard * load(scale.data + i, extent) + load(bias.data + i, extent), extent);
        });
      }
    });
  }

 private:
  int64_t axis_;
  float epsilon_;
};

struct LayerNormalizationGradient {
  static constexpr const char* name = "LayerNormalizationGradient_float";
  static constexpr Floats<5> inputs{};
  static constexpr Floats<3> outputs{};
  static constexpr int in_place[] = {0, 1};

  // Gradients of scale and bias over a part of the rows.
  struct Sums {
    explicit Sums(std::size_t n) : scale(n), bias(n) {}
    ColumnSums scale, bias;
  };

  void compute(Context& context) const {
    const auto ct = context.input<float>(0), x = context.input<float>(1), scale = context.input<float>(2);
    const auto mean = context.input<float>(3), inverse = context.input<float>(4);
    const auto ct_x = context.output<float>(0, x.shape), ct_scale = context.output<float>(1, scale.shape);
    const auto ct_bias = context.output<float>(2, scale.shape);
    const std::size_t n = scale.size(), rows = n ? x.size() / n : 0;
    require(ct.shape == x.shape && rows * n == x.size(), "x and its cotangent must be rows of the size of scale");
    require(mean.size() == inverse.size() && (n == 0 || mean.size() == rows), "one mean and deviation per row");

    const Threads threads = context.threads();
    const auto parts = sum_parts(rows, n, rows);
    std::vector<Sums> sums(parts, Sums(n));
    threads.run(parts, [&](std::size_t part) {
      Sums& own = sums[part];
      for (std::size_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
        row(ct.data + r * n, x.data + r * n, scale.data, mean.data[r], inverse.data[r], n,
            ct_x.data ? ct_x.data + r * n : nullptr, own.scale.block(), own.bias.block());
        own.scale.row_done();
        own.bias.row_done();
      }
      own.scale.flush();
      own.bias.flush();
    });
    write_sums(sums, &Sums::scale, ct_scale.data, n);
    write_sums(sums, &Sums::bias, ct_bias.data, n);
  }

  // With x̂ = (x - mean) r and g = ct scale: ct_x = r (g - mean(g) - x̂ mean(g x̂)).
  static void row(const float* ct, const float* x, const float* scale, float mean, float inverse, std::size_t n,
                  float* ct_x, float* scale_sums, float* bias_sums) {
    vfloat total{}, along{};
    vectors(n, [&](std::size_t i, auto extent) {
      const vfloat c = load(ct + i, extent), g = c * load(scale + i, extent);
      const vfloat standard = (load(x + i, extent) - mean) * inverse;
      total += g;
      along += g * standard;
      store(scale_sums + i, load(scale_sums + i, extent) + c * standard, extent);
      store(bias_sums + i, load(bias_sums + i, extent) + c, extent);
    });
    if (ct_x == nullptr) return;
    const float share = 1.f / static_cast<float>(n), mean_g = sum(total) * share, mean_along = sum(along) * share;
    vectors(n, [&](std::size_t i, auto extent) {
      const vfloat g = load(ct + i, extent) * load(scale + i, extent);
      const vfloat standard = (load(x + i, extent) - mean) * inverse;
      store(ct_x + i, (g - mean_g - standard * mean_along) * inverse, extent);
    });
  }
};

}  // namespace

void add_layer_norm(Domain& domain) {
  domain.add<LayerNormalization>();
  domain.add<LayerNormalizationGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
