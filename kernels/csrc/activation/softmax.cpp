// Gradients of Softmax and LogSoftmax along any axis.
#include "activation/family.h"
#include "core/op.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// `Formula` has part(y, ct), what is summed along the axis, and whole(y, ct, sum).
template <class Formula>
struct AlongAxis {
  static constexpr const char* name = Formula::name;
  static constexpr Floats<2> inputs{};
  static constexpr Floats<1> outputs{};

  explicit AlongAxis(const Attributes& attributes) : axis_(attributes.integer("axis")) {}

  void compute(Context& context) const {
    const auto y = context.input<float>(0), ct = context.input<float>(1);
    require(y.shape == ct.shape, "y and its cotangent must have the same shape");
    const auto to = context.output<float>(0, y.shape);
    const int64_t rank = static_cast<int64_t>(y.shape.size()), axis = axis_ < 0 ? axis_ + rank : axis_;
    require(0 <= axis && axis < rank, "the axis must be one of y");
    if (to.data == nullptr || y.size() == 0) return;
    const auto place = y.shape.begin() + axis;
    const std::size_t outer = count(y.shape.begin(), place), n = *place, inner = count(place + 1, y.shape.end());
    const std::size_t least = 1 + 8192 / (n * inner);
    context.threads().ranges(outer, least, [&](std::size_t o, std::size_t end) {
      for (; o < end; ++o) {
        const std::size_t at = o * n * inner;
        if (inner == 1) {
          row(y.data + at, ct.data + at, to.data + at, n);
        } else {
          columns(y.data + at, ct.data + at, to.data + at, n, inner);
        }
      }
    });
  }

 private:
  static void row(const float* y, const float* ct, float* to, std::size_t n) {
    vfloat along{};
    vectors(n, [&](std::size_t i, auto extent) { along += Formula::part(load(y + i, extent), load(ct + i, extent)); });
    const vfloat total = splat(sum(along));
    vectors(n, [&](std::size_t i, auto extent) {
      store(to + i, Formula::whole(load(y + i, extent), load(ct + i, extent), total), extent);
    });
  }

  static void columns(const float* y, const float* ct, float* to, std::size_t n, std::size_t inner) {
    vectors(inner, [&](std::size_t i, auto extent) {
      vfloat total{};
      for (std::size_t k = i; k < n * inner; k += inner) total += Formula::part(load(y + k, extent), load(ct + k, extent));
      for (std::size_t k = i; k < n * inner; k += inner)
        store(to + k, Formula::whole(load(y + k, extent), load(ct + k, extent), total), extent);
    });
  }

  int64_t axis_;
};

// y (ct - sum(ct y))
struct OfSoftmax {
  static constexpr const char* name = "SoftmaxGradient_float";
  static vfloat part(vfloat y, vfloat ct) { return y * ct; }
  static vfloat whole(vfloat y, vfloat ct, vfloat total) { return y * (ct - total); }
};

// ct - exp(y) sum(ct)
struct OfLogSoftmax {
  static constexpr const char* name = "LogSoftmaxGradient_float";
  static vfloat part(vfloat, vfloat ct) { return ct; }
  static vfloat whole(vfloat y, vfloat ct, vfloat total) { return ct - exp(y) * total; }
};

}  // namespace

void add_softmax(Domain& domain) {
  domain.add<AlongAxis<OfSoftmax>>();
  domain.add<AlongAxis<OfLogSoftmax>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
