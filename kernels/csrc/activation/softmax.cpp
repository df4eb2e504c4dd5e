// Softmax of masked rows, LogSoftmax of rows, and gradients of Softmax and LogSoftmax, along any axis.
#include <cmath>

#include "activation/family.h"
#include "core/op.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// The lanes that are not there are `other`.
inline vfloat load_or(const float* from, Full, float) { return load(from); }
inline vfloat load_or(const float* from, Part part, float other) {
  return select(among_first(part.count), load(from, part.count), splat(other));
}

// exp(x - max) / sum; zero where all are minus infinity.
struct SafeSoftmax {
  static constexpr const char* name = "SafeSoftmax_float";
  static constexpr Floats<1> inputs{};
  static constexpr Floats<1> outputs{};

  explicit SafeSoftmax(const Attributes& attributes) : axis_(attributes.integer("axis")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0);
    const auto y = context.output<float>(0, x.shape);
    const Along axis(x.shape, axis_);
    if (y.data == nullptr || x.size() == 0) return;
    context.threads().ranges(axis.outer, 1 + 8192 / (axis.n * axis.inner), [&](std::size_t o, std::size_t end) {
      for (; o < end; ++o) {
        const std::size_t at = o * axis.n * axis.inner;
        if (axis.inner == 1)
          row(x.data + at, y.data + at, axis.n);
        else
          columns(x.data + at, y.data + at, axis.n, axis.inner);
      }
    });
  }

 private:
  static constexpr float kNone = -__builtin_inff();
  static constexpr std::size_t kBlock = 1024;  // elements summed in float

  static void row(const float* x, float* y, std::size_t n) {
    vfloat most = splat(kNone);
    vint unknown{};  // where something is no number
    vectors(n, [&](std::size_t i, auto extent) {
      const vfloat value = load_or(x + i, extent, kNone);
      most = max(value, most), unknown |= value != value;
    });
    float top = kNone;
    bool known = true;
    for (std::size_t i = 0; i < lanes; ++i) top = most[i] > top ? most[i] : top, known = known && !unknown[i];
    if (top == kNone && known) {
      vectors(n, [&](std::size_t i, auto extent) { store(y + i, vfloat{}, extent); });
      return;
    }
    double total = 0;
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
      vfloat block{};
      vectors(std::min(kBlock, n - begin), [&](std::size_t i, auto extent) {
        const vfloat value = exp(load_or(x + begin + i, extent, kNone) - top);
        store(y + begin + i, value, extent);
        block += value;
      });
      total += sum(block);
    }
    const float factor = static_cast<float>(1 / total);
    vectors(n, [&](std::size_t i, auto extent) { store(y + i, load(y + i, extent) * factor, extent); });
  }

  static void columns(const float* x, float* y, std::size_t n, std::size_t inner) {
    vectors(inner, [&](std::size_t i, auto extent) {
      vfloat most = splat(kNone), total{};
      vint unknown{};
      for (std::size_t k = i; k < n * inner; k += inner) {
        const vfloat value = load(x + k, extent);
        most = max(value, most), unknown |= value != value;
      }
      const vint masked = (most == kNone) & ~unknown;
      for (std::size_t k = i; k < n * inner; k += inner) {
        const vfloat value = exp(load(x + k, extent) - most);
        store(y + k, value, extent);
        total += value;
      }
      for (std::size_t k = i; k < n * inner; k += inner)
        store(y + k, select(masked, vfloat{}, load(y + k, extent) / total), extent);
    });
  }

  int64_t axis_;
};

// x - max - log(sum(exp(x - max))) of each row, the last axis.
struct LogSoftmaxOfRows {
  static constexpr const char* name = "LogSoftmaxOfRows_float";
  static constexpr Floats<1> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr int in_place[] = {0};

  void compute(Context& context) const {
    const auto x = context.input<const float>(0);
    require(!x.shape.empty(), "there must be rows");
    const auto y = context.output<float>(0, x.shape);
    if (y.data == nullptr || x.size() == 0) return;
    const std::size_t n = x.shape.back(), rows = x.size() / n;
    context.threads().ranges(rows, 1 + 8192 / n, [&](std::size_t r, std::size_t end) {
      for (; r < end; ++r) row(x.data + r * n, y.data + r * n, n);
    });
  }

 private:
  static constexpr float kNone = -__builtin_inff();
  static constexpr std::size_t kBlock = 1024;  // elements summed in float

  // Where a number is not one, or infinite, the sum is no number, and so is the row.
  static void row(const float* x, float* y, std::size_t n) {
    vfloat most = splat(kNone);
    vectors(n, [&](std::size_t i, auto extent) { most = max(load_or(x + i, extent, kNone), most); });
    float top = kNone;
    for (std::size_t i = 0; i < lanes; ++i) top = most[i] > top ? most[i] : top;
    double total = 0;
    for (std::size_t begin = 0; begin < n; begin += kBlock) {
      vfloat block{};
      vectors(std::min(kBlock, n - begin), [&](std::size_t i, auto extent) {
        block += exp(load_or(x + begin + i, extent, kNone) - top);
      });
      total += sum(block);
    }
    const float log_sum = static_cast<float>(std::log(total));
    vectors(n, [&](std::size_t i, auto extent) { store(y + i, load(x + i, extent) - top - log_sum, extent); });
  }
};

// `Formula` has part(y, ct), what is summed along the axis, and whole(y, ct, sum).
template <class Formula>
struct AlongAxis {
  static constexpr const char* name = Formula::name;
  static constexpr Floats<2> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr int in_place[] = {1, 0};

  explicit AlongAxis(const Attributes& attributes) : axis_(attributes.integer("axis")) {}

  void compute(Context& context) const {
    const auto y = context.input<float>(0), ct = context.input<float>(1);
    require(y.shape == ct.shape, "y and its cotangent must have the same shape");
    const auto to = context.output<float>(0, y.shape);
    const Along axis(y.shape, axis_);
    if (to.data == nullptr || y.size() == 0) return;
    const std::size_t outer = axis.outer, n = axis.n, inner = axis.inner;
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
  domain.add<SafeSoftmax>();
  domain.add<LogSoftmaxOfRows>();
  domain.add<AlongAxis<OfSoftmax>>();
  domain.add<AlongAxis<OfLogSoftmax>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
