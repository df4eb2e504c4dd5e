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

// Series that lie side by side and are walked together, a row of them at a time: what is read lies in one piece, and is
// still in the second-level cache when it is read again.
class Series {
 public:
  static constexpr std::size_t kColumns = 512;

  // Those of one outer position from column `first` on.
  Series(const float* x, const View& view, std::size_t first)
      : columns(std::min(kColumns, view.inner - first)), x_(x), length_(view.length), stride_(view.inner) {}

  // Fills mean and stdev = sqrt(variance + epsilon).
  void measure(float epsilon) {
    average(mean, [](vfloat v, vfloat) { return v; });
    average(stdev, [](vfloat v, vfloat m) { return (v - m) * (v - m); });
    each([&](std::size_t i, auto extent) { store(stdev + i, sqrt(load(stdev + i, extent) + epsilon), extent); });
  }

  // apply(t, i, extent) for the vectors of each row t.
  template <class Apply>
  void rows(Apply&& apply) const {
    for (std::size_t t = 0; t < length_; ++t) each([&](std::size_t i, auto extent) { apply(t, i, extent); });
  }

  template <class Apply>
  void each(Apply&& apply) const {
    vectors(columns, apply);
  }

  const std::size_t columns;
  float mean[kColumns] = {}, stdev[kColumns] = {};

 private:
  // The mean of of(x, mean), in blocks of rows, so that rounding does not grow with the length.
  template <class Of>
  void average(float* to, Of&& of) {
    float block[kColumns] = {}, total[kColumns] = {};
    for (std::size_t begin = 0; begin < length_; begin += 32) {
      for (std::size_t t = begin; t < std::min(begin + 32, length_); ++t)
        each([&](std::size_t i, auto extent) {
          const vfloat value = of(load(x_ + t * stride_ + i, extent), load(mean + i, extent));
          store(block + i, load(block + i, extent) + value, extent);
        });
      each([&](std::size_t i, auto extent) {
        store(total + i, load(total + i, extent) + load(block + i, extent), extent);
        store(block + i, vfloat{}, extent);
      });
    }
    const float share = 1.f / static_cast<float>(length_);
    each([&](std::size_t i, auto extent) { store(to + i, load(total + i, extent) * share, extent); });
  }

  const float* x_;
  std::size_t length_, stride_;
};

// Measures all series; use(series, at, place) then has them beside each other: `at` is where the first of them begins in
// the tensor, `place` its number among all series. Writes means and stdevs where they are wanted.
template <class Use>
void each_series(const Threads& threads, const View& view, const float* x, float epsilon, float* means, float* stdevs,
                 Use&& use) {
  const std::size_t blocks = (view.inner + Series::kColumns - 1) / Series::kColumns;
  threads.ranges(view.outer * blocks, 1 + 8192 / (view.length * view.inner + 1), [&](std::size_t b, std::size_t end) {
    for (; b < end; ++b) {
      const std::size_t outer = b / blocks, first = b % blocks * Series::kColumns;
      const std::size_t at = outer * view.length * view.inner + first, place = outer * view.inner + first;
      Series series(x + at, view, first);
      series.measure(epsilon);
      series.each([&](std::size_t i, auto extent) {
        if (means) store(means + place + i, load(series.mean + i, extent), extent);
        if (stdevs) store(stdevs + place + i, load(series.stdev + i, extent), extent);
      });
      use(series, at, first);
    }
  });
}

struct InstanceStandardization {
  static constexpr const char* name = "InstanceStandardization_float";
  static constexpr Floats<2> inputs{};
  static constexpr Floats<3> outputs{};

  explicit InstanceStandardization(const Attributes& attributes) : axes_(attributes.integers("axes")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0);
    const float epsilon = context.number<float>(1);
    const View view(x.shape, axes_);
    const auto y = context.output<float>(0, x.shape), means = context.output<float>(1, view.reduced);
    const auto stdevs = context.output<float>(2, view.reduced);
    each_series(context.threads(), view, x.data, epsilon, means.data, stdevs.data,
                [&](const Series& series, std::size_t at, std::size_t) {
                  if (y.data == nullptr) return;
                  series.rows([&](std::size_t t, std::size_t i, auto extent) {
                    const std::size_t place = at + t * view.inner + i;
                    const vfloat centered = load(x.data + place, extent) - load(series.mean + i, extent);
                    store(y.data + place, centered / load(series.stdev + i, extent), extent);
                  });
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
    const float epsilon = context.number<float>(3);
    const View view(x.shape, axes_);
    const auto y = context.output<float>(0, x.shape), means = context.output<float>(1, view.reduced);
    const auto stdevs = context.output<float>(2, view.reduced), centered = context.output<float>(3, x.shape);
    const std::size_t n = weight.size();
    require(bias.size() == n && !x.shape.empty() && static_cast<std::size_t>(x.shape.back()) == n,
            "weight and bias must have the size of the last axis of x");
    each_series(context.threads(), view, x.data, epsilon, means.data, stdevs.data,
                [&](Series& series, std::size_t at, std::size_t first) {
                  const bool side_by_side = view.inner == n;
                  if (side_by_side)  // one factor per series: weight / stdev
                    series.each([&](std::size_t i, auto extent) {
                      store(series.stdev + i, load(weight.data + first + i, extent) / load(series.stdev + i, extent), extent);
                    });
                  series.rows([&](std::size_t t, std::size_t i, auto extent) {
                    const std::size_t place = at + t * view.inner + i;
                    const vfloat difference = load(x.data + place, extent) - load(series.mean + i, extent);
                    if (centered.data) store(centered.data + place, difference, extent);
                    if (y.data == nullptr) return;
                    const vfloat number = load(series.stdev + i, extent);
                    const vfloat factor = side_by_side ? number : gathered(weight.data, place, n) / number;
                    const vfloat shift = side_by_side ? load(bias.data + first + i, extent) : gathered(bias.data, place, n);
                    store(y.data + place, difference * factor + shift, extent);
                  });
                });
  }

 private:
  // The numbers of the last axis for the elements from `place` on, where series run across it.
  static vfloat gathered(const float* values, std::size_t place, std::size_t n) {
    vfloat v;
    for (std::size_t k = 0; k < lanes; ++k) v[k] = values[(place + k) % n];
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
    const auto parts = sum_parts(view.outer * view.length, n, view.outer);
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
