// Ops that compute each element by itself: of one tensor, or of two of one shape.
#pragma once

#include "core/op.h"
#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// `Op::apply(vfloat)` is the formula.
template <class Op>
struct Unary {
  static constexpr Floats<1> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr int in_place[] = {0};

  void compute(Context& context) const {
    const auto x = context.input<float>(0);
    const auto y = context.output<float>(0, x.shape);
    if (!y.data) return;
    context.threads().ranges(x.size(), 16384, [&](std::size_t i, std::size_t end) {
      for (; i + lanes <= end; i += lanes) store(y.data + i, Op::apply(load(x.data + i)));
      if (i < end) store(y.data + i, Op::apply(load(x.data + i, end - i)), end - i);
    });
  }
};

// `Op::apply(vfloat, vfloat)` is the formula.
template <class Op>
struct Elementwise {
  static constexpr Floats<2> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr int in_place[] = {1, 0};

  void compute(Context& context) const {
    const auto a = context.input<float>(0), b = context.input<float>(1);
    require(a.shape == b.shape, "both inputs must have the same shape");
    const auto y = context.output<float>(0, a.shape);
    if (!y.data) return;
    context.threads().ranges(a.size(), 16384, [&](std::size_t i, std::size_t end) {
      for (; i + lanes <= end; i += lanes) store(y.data + i, Op::apply(load(a.data + i), load(b.data + i)));
      if (i < end) store(y.data + i, Op::apply(load(a.data + i, end - i), load(b.data + i, end - i)), end - i);
    });
  }
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
