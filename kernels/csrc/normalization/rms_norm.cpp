// Root mean square normalisations y = x r scale of rows, and their gradients: with s = sum(ct x scale) over the row,
// ct_x = ct scale r - x r³ share s and ct_scale = sum over rows of ct x r, where dr/dx = -r³ share x.
#include <cmath>

#include "core/op.h"
#include "core/rows.h"
#include "normalization/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

float sum_of_squares(const float* x, std::size_t n) {
  vfloat total{};
  vectors(n, [&](std::size_t i, auto extent) {
    const vfloat v = load(x + i, extent);
    total += v * v;
  });
  return sum(total);
}

// How many rows of the size of scale x has.
std::size_t rows_of(const Tensor<const float>& x, const Tensor<const float>& scale) {
  return scale.size() ? x.size() / scale.size() : 0;
}

// The factor of a row, and how it changes with the row.
struct Factor {
  float inverse, share;
};

// factor_of(r) gives the factor of row r.
template <class FactorOf>
void gradient(Context& context, const Tensor<const float>& ct, const Tensor<const float>& x,
              const Tensor<const float>& scale, FactorOf&& factor_of) {
  const auto ct_x = context.output<float>(0, x.shape), ct_scale = context.output<float>(1, scale.shape);
  const std::size_t n = scale.size(), rows = rows_of(x, scale);
  require(ct.shape == x.shape && rows * n == x.size(), "x and its cotangent must be rows of the size of scale");
  struct Sums {
    explicit Sums(std::size_t n) : scale(n) {}
    ColumnSums scale;
  };
  const Threads threads = context.threads();
  const auto parts = sum_parts(rows, n, rows);
  std::vector<Sums> sums(parts, Sums(n));
  threads.run(parts, [&](std::size_t part) {
    ColumnSums& own = sums[part].scale;
    for (std::size_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
      const float *c = ct.data + r * n, *v = x.data + r * n;
      const Factor factor = factor_of(r);
      const float inverse = factor.inverse;
      vfloat along{};
      float* block = own.block();
      vectors(n, [&](std::size_t i, auto extent) {
        const vfloat product = load(c + i, extent) * load(v + i, extent);
        along += product * load(scale.data + i, extent);
        store(block + i, load(block + i, extent) + product * inverse, extent);
      });
      own.row_done();
      if (ct_x.data == nullptr) continue;
      // One factor r at a time: r³ alone leaves the range of float32 where x is large.
      const float slope = sum(along) * inverse * inverse * inverse * factor.share;
      float* to = ct_x.data + r * n;
      vectors(n, [&](std::size_t i, auto extent) {
        const vfloat g = load(c + i, extent) * load(scale.data + i, extent);
        store(to + i, g * inverse - load(v + i, extent) * slope, extent);
      });
    }
    own.flush();
  });
  write_sums(sums, &Sums::scale, ct_scale.data, n);
}

// saved_of(mean square's root or such) is written to output 1, one number per row; y = x r scale to output 0.
// numbers(sum of squares, n) gives r and what is saved.
template <class Numbers>
void forward(Context& context, const Tensor<const float>& x, const Tensor<const float>& scale, Numbers&& numbers) {
  Shape rows_shape = x.shape;
  require(!rows_shape.empty() && scale.size() == static_cast<std::size_t>(rows_shape.back()),
          "scale must have the size of the last axis of x");
  rows_shape.back() = 1;
  const auto y = context.output<float>(0, x.shape), saved = context.output<float>(1, rows_shape);
  const std::size_t n = scale.size(), rows = count(rows_shape);
  const Threads threads = context.threads();
  const auto parts = row_parts(rows, n);
  threads.run(parts, [&](std::size_t part) {
    for (std::size_t r = rows * part / parts; r < rows * (part + 1) / parts; ++r) {
      const float* v = x.data + r * n;
      const auto [inverse, kept] = numbers(sum_of_squares(v, n), n);
      if (saved.data) saved.data[r] = kept;
      if (y.data == nullptr) continue;
      float* to = y.data + r * n;
      vectors(n, [&, factor = inverse](std::size_t i, auto extent) {
        store(to + i, load(v + i, extent) * factor * load(scale.data + i, extent), extent);
      });
    }
  });
}

struct Numbers {
  float inverse, kept;
};

// r = 1 / sqrt(mean(x²) + epsilon), kept
struct InverseRMSNormalization {
  static constexpr const char* name = "InverseRMSNormalization_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<2> outputs{};

  void compute(Context& context) const {
    const float epsilon = context.number<float>(2);
    forward(context, context.input<float>(0), context.input<float>(1), [&](float squares, std::size_t n) {
      const float inverse = 1.f / std::sqrt(squares / static_cast<float>(n) + epsilon);
      return Numbers{inverse, inverse};
    });
  }
};

struct InverseRMSNormalizationGradient {
  static constexpr const char* name = "InverseRMSNormalizationGradient_float";
  static constexpr Floats<4> inputs{};
  static constexpr Floats<2> outputs{};
  static constexpr int in_place[] = {0, 1};

  void compute(Context& context) const {
    const auto scale = context.input<float>(2), inverse = context.input<float>(3);
    require(inverse.size() == rows_of(context.input<float>(1), scale), "one factor per row");
    const float share = 1.f / static_cast<float>(scale.size());
    gradient(context, context.input<float>(0), context.input<float>(1), scale, [&](std::size_t r) {
      return Factor{inverse.data[r], share};
    });
  }
};

// r = 1 / max(rms, floor) with rms = factor ||x||, kept
struct FlooredRMSNormalization {
  static constexpr const char* name = "FlooredRMSNormalization_float";
  static constexpr Floats<4> inputs{};
  static constexpr Floats<2> outputs{};

  void compute(Context& context) const {
    const float factor = context.number<float>(2), floor = context.number<float>(3);
    forward(context, context.input<float>(0), context.input<float>(1), [&](float squares, std::size_t) {
      const float rms = std::sqrt(squares) * factor;
      return Numbers{1.f / (rms < floor ? floor : rms), rms};  // of NaN the result is NaN
    });
  }
};

struct FlooredRMSNormalizationGradient {
  static constexpr const char* name = "FlooredRMSNormalizationGradient_float";
  static constexpr Floats<6> inputs{};
  static constexpr Floats<2> outputs{};
  static constexpr int in_place[] = {0, 1};

  void compute(Context& context) const {
    const auto rms = context.input<float>(3);
    require(rms.size() == rows_of(context.input<float>(1), context.input<float>(2)), "one root mean square per row");
    const float factor = context.number<float>(4), floor = context.number<float>(5);
    gradient(context, context.input<float>(0), context.input<float>(1), context.input<float>(2), [&](std::size_t r) {
      const float value = rms.data[r];
      return Factor{1.f / (value < floor ? floor : value), value >= floor ? factor * factor : 0.f};
    });
  }
};

// RMSNormalization of opset 23, which keeps no statistics: r is computed again. Rows may be several axes.
struct RMSNormalizationGradient {
  static constexpr const char* name = "RMSNormalizationGradient_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<2> outputs{};
  static constexpr int in_place[] = {0, 1};

  explicit RMSNormalizationGradient(const Attributes& attributes) : epsilon_(attributes.number("epsilon")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(1), scale = context.input<float>(2);
    const std::size_t n = scale.size();
    gradient(context, context.input<float>(0), x, scale, [&](std::size_t r) {
      const float square = sum_of_squares(x.data + r * n, n) / static_cast<float>(n);
      return Factor{1.f / std::sqrt(square + epsilon_), 1.f / static_cast<float>(n)};
    });
  }

 private:
  float epsilon_;
};

}  // namespace

void add_rms_norm(Domain& domain) {
  domain.add<InverseRMSNormalization>();
  domain.add<InverseRMSNormalizationGradient>();
  domain.add<FlooredRMSNormalization>();
  domain.add<FlooredRMSNormalizationGradient>();
  domain.add<RMSNormalizationGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
