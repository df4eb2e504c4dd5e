// Reversible instance normalisation: statistics of each series, over the axes between the first and the last; the
// gradient takes them for constants. A tensor is seen as [outer, length, inner], reduced over its middle.
#include <algorithm>
#include <cmath>

#include "core/op.h"
#include "core/rows.h"
#include "normalization/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct View {
  std::size_t outer = 1, length = 1, inner = 1;
  Shape reduced;  // the tensor's shape with 1 for the axes of the middle

  View(const Shape& shape, const std::vector<int64_t>& axes) : reduced(shape) {
    const auto rank = static_cast<int64_t>(shape.size());
    std::vector<int64_t> sorted(axes);
    for (auto& axis : sorted) axis += axis < 0 ? rank : 0;
    std::sort(sorted.begin(), sorted.end());
    for (std::size_t i = 0; i < sorted.size(); ++i)
      require(0 <= sorted[i] && sorted[i] < rank && sorted[i] == sorted[0] + static_cast<int64_t>(i),
              "the axes of a series must be neighbours");
    const int64_t first = sorted.empty() ? rank : sorted.front(), last = sorted.empty() ? rank - 1 : sorted.back();
    for (int64_t axis = 0; axis < rank; ++axis) {
      (axis < first ? outer : axis <= last ? length : inner) *= static_cast<std::size_t>(shape[axis]);
      if (first <= axis && axis <= last) reduced[axis] = 1;
    }
  }
  std::size_t series() const { return outer * length * inner; }
};

// Mean and stdev = sqrt(variance + epsilon) of the series i of one outer position, `columns` of them.
template <class Extent>
void statistics(const float* x, const View& view, float epsilon, Extent extent, vfloat& mean, vfloat& stdev) {
  const float share = 1.f / static_cast<float>(view.length);
  const auto average = [&](auto&& of) {  // in blocks, so that rounding does not grow with the length
    vfloat total{};
    for (std::size_t begin = 0; begin < view.length; begin += 32) {
      vfloat block{};
      for (std::size_t t = begin; t < std::min(begin + 32, view.length); ++t) block += of(load(x + t * view.inner, extent));
      total += block;
    }
    return total * share;
  };
  mean = average([](vfloat v) { return v; });
  const vfloat variance = average([&](vfloat v) { return (v - mean) * (v - mean); });
  stdev = sqrt(variance + epsilon);
}

// each(o, i, extent) for the vectors of series of each outer position.
template <class Each>
void each_series(const Threads& threads, const View& view, Each&& each) {
  threads.ranges(view.outer, 1 + 8192 / (view.length * view.inner + 1), [&](std::size_t o, std::size_t end) {
    for (; o < end; ++o) vectors(view.inner, [&](std::size_t i, auto extent) { each(o, i, extent); });
  });
}

struct InstanceStandardization {
  static constexpr const char* name = "InstanceStandardization_float";
  static constexpr Floats<2> inputs{};
  static constexpr Floats<3> outputs{};

  explicit InstanceStandardization(const Attributes& attributes) : axes_(attributes.integers("axes")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0);
    const float epsilon = *context.input<float>(1).data;
    const View view(x.shape, axes_);
    const auto y = context.output<float>(0, x.shape), means = context.output<float>(1, view.reduced);
    const auto stdevs = context.output<float>(2, view.reduced);
    each_series(context.threads(), view, [&](std::size_t o, std::size_t i, auto extent) {
      const std::size_t at = o * view.length * view.inner + i;
      vfloat mean, stdev;
      statistics(x.data + at, view, epsilon, extent, mean, stdev);
      if (means.data) store(means.data + o * view.inner + i, mean, extent);
      if (stdevs.data) store(stdevs.data + o * view.inner + i, stdev, extent);
      for (std::size_t t = at; y.data && t < at + view.length * view.inner; t += view.inner)
        store(y.data + t, (load(x.data + t, extent) - mean) / stdev, extent);
    });
  }

 private:
  std::vector<int64_t> axes_;
};

struct ReversibleInstanceNormalization {
  static constexpr const char* name = "ReversibleInstanceNormalization_float";
  static constexpr Floats<4> inputs{};
  static constexpr Floats<4> outputs{};

  explicit ReversibleInstanceNormalization(const Attributes& attributes) : axes_(attributes.integers("axes")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0), weight = context.input<float>(1), bias = context.input<float>(2);
    const float epsilon = *context.input<float>(3).data;
    const View view(x.shape, axes_);
    const auto y = context.output<float>(0, x.shape), means = context.output<float>(1, view.reduced);
    const auto stdevs = context.output<float>(2, view.reduced), centered = context.output<float>(3, x.shape);
    const std::size_t n = weight.size();
    require(bias.size() == n && !x.shape.empty() && static_cast<std::size_t>(x.shape.back()) == n,
            "weight and bias must have the size of the last axis of x");
    const bool whole = view.inner != n;  // the last axis is one of those reduced, or not the only one that is left
    each_series(context.threads(), view, [&](std::size_t o, std::size_t i, auto extent) {
      const std::size_t at = o * view.length * view.inner + i;
      vfloat mean, stdev;
      statistics(x.data + at, view, epsilon, extent, mean, stdev);
      if (means.data) store(means.data + o * view.inner + i, mean, extent);
      if (stdevs.data) store(stdevs.data + o * view.inner + i, stdev, extent);
      for (std::size_t t = at; t < at + view.length * view.inner; t += view.inner) {
        const vfloat difference = load(x.data + t, extent) - mean;
        if (centered.data) store(centered.data + t, difference, extent);
        if (y.data == nullptr) continue;
        const vfloat w = whole ? gathered(weight.data, t, n) : load(weight.data + i, extent);
        const vfloat b = whole ? gathered(bias.data, t, n) : load(bias.data + i, extent);
        store(y.data + t, difference * (w / stdev) + b, extent);
      }
    });
  }

 private:
  // The numbers of the last axis for the elements from t on.
  static vfloat gathered(const float* values, std::size_t t, std::size_t n) {
    vfloat v;
    for (std::size_t k = 0; k < lanes; ++k) v[k] = values[(t + k) % n];
    return v;
  }

  std::vector<int64_t> axes_;
};

// Cotangents of weight and bias, and of x where the op has one: ct (weight / stdev).
template <bool of_x>
struct Gradient {
  static constexpr const char* name = of_x ? "ReversibleInstanceNormalizationGradient_float"
                                           : "ReversibleInstanceNormalizationParameterGradient_float";
  static constexpr Floats<3 + of_x> inputs{};
  static constexpr Floats<2 + of_x> outputs{};

  struct Sums {
    explicit Sums(std::size_t n) : weight(n), bias(n) {}
    ColumnSums weight, bias;
  };

  explicit Gradient(const Attributes& attributes) : axes_(attributes.integers("axes")) {}

  void compute(Context& context) const {
    const auto ct = context.input<float>(0), centered = context.input<float>(1);
    const auto stdev = context.input<float>(2 + of_x);
    require(!ct.shape.empty() && ct.shape == centered.shape, "x - mean and the cotangent must have the same shape");
    const View view(ct.shape, axes_);
    const std::size_t n = view.inner, stdevs = stdev.size();
    require(n == static_cast<std::size_t>(ct.shape.back()), "series must lie along all axes but the first and last");
    require(stdevs == view.outer * n || stdevs == view.outer, "one stdev per series");
    const float* weight = nullptr;
    float* ct_x = nullptr;
    if constexpr (of_x) {
      const auto weights = context.input<float>(2);
      require(weights.size() == n, "one weight for each element of the last axis");
      weight = weights.data;
      ct_x = context.output<float>(0, ct.shape).data;
    }
    const auto ct_weight = context.output<float>(of_x, {static_cast<int64_t>(n)});
    const auto ct_bias = context.output<float>(1 + of_x, {static_cast<int64_t>(n)});

    const Threads threads = context.threads();
    const auto parts = row_parts(threads, view.outer, view.length * n);
    std::vector<Sums> sums(parts, Sums(n));
    threads.run(parts, [&](std::size_t part) {
      Sums& own = sums[part];
      float *weight_sums = own.weight.block(), *bias_sums = own.bias.block();
      for (std::size_t o = view.outer * part / parts; o < view.outer * (part + 1) / parts; ++o) {
        const auto inverse = [&](std::size_t i, auto extent) {
          return 1.f / (stdevs == view.outer ? splat(stdev.data[o]) : load(stdev.data + o * n + i, extent));
        };
        for (std::size_t t = o * view.length; t < (o + 1) * view.length; ++t) {
          vectors(n, [&](std::size_t i, auto extent) {
            const vfloat c = load(ct.data + t * n + i, extent), scaled = c * inverse(i, extent);
            const vfloat along = scaled * load(centered.data + t * n + i, extent);
            store(weight_sums + i, load(weight_sums + i, extent) + along, extent);
            store(bias_sums + i, load(bias_sums + i, extent) + c, extent);
            if (of_x && ct_x) store(ct_x + t * n + i, scaled * load(weight + i, extent), extent);
          });
          own.weight.row_done();
          own.bias.row_done();
        }
      }
      own.weight.flush();
      own.bias.flush();
    });
    write_sums(sums, &Sums::weight, ct_weight.data, n);
    write_sums(sums, &Sums::bias, ct_bias.data, n);
  }

 private:
  std::vector<int64_t> axes_;
};

}  // namespace

void add_instance_norm(Domain& domain) {
  domain.add<InstanceStandardization>();
  domain.add<ReversibleInstanceNormalization>();
  domain.add<Gradient<true>>();
  domain.add<Gradient<false>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
