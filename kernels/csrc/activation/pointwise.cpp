// SiLU and gradients of activations, in one pass over memory.
#include "activation/elementwise.h"
#include "activation/family.h"
#include "core/op.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct ReluGradient : Elementwise<ReluGradient> {
  static constexpr const char* name = "ReluGradient_float";
  static vfloat apply(vfloat y, vfloat ct) { return select(y <= 0.f, vfloat{}, ct); }  // ct for NaN, as in PyTorch
};

// The body of this one is right for finite cotangents only.
struct ReluGradientOfFinite : Elementwise<ReluGradientOfFinite> {
  static constexpr const char* name = "ReluGradientOfFinite_float";
  static vfloat apply(vfloat y, vfloat ct) { return ReluGradient::apply(y, ct); }
};

struct SigmoidGradient : Elementwise<SigmoidGradient> {
  static constexpr const char* name = "SigmoidGradient_float";
  static vfloat apply(vfloat y, vfloat ct) { return ct * (y * (1.f - y)); }
};

struct TanhGradient : Elementwise<TanhGradient> {
  static constexpr const char* name = "TanhGradient_float";
  static vfloat apply(vfloat y, vfloat ct) { return ct * (1.f - y * y); }
};

struct Silu : Unary<Silu> {
  static constexpr const char* name = "Silu_float";
  static vfloat apply(vfloat x) { return x * sigmoid(x); }
};

// ct s (1 + x (1 - s)), s = sigmoid(x)
struct SiluGradient : Elementwise<SiluGradient> {
  static constexpr const char* name = "SiluGradient_float";
  static vfloat apply(vfloat x, vfloat ct) {
    const vfloat s = sigmoid(x);
    return ct * (s * (x * (1.f - s) + 1.f));
  }
};

// ct (Φ(x) + x φ(x)) of the standard normal
struct GeluGradient : Elementwise<GeluGradient> {
  static constexpr const char* name = "GeluGradient_float";
  static vfloat apply(vfloat x, vfloat ct) {
    const vfloat s = x * 0.70710678f;
    const vfloat distribution = erf(s) * 0.5f + 0.5f;
    const vfloat density = exp(-(s * s)) * 0.39894228f;
    return ct * (distribution + x * density);
  }
};

// x (1 + t) / 2 with t = tanh(k (x + 0.044715 x³)), k = sqrt(2 / π)
struct GeluTanhGradient : Elementwise<GeluTanhGradient> {
  static constexpr const char* name = "GeluTanhGradient_float";
  static vfloat apply(vfloat x, vfloat ct) {
    constexpr float scale = 0.79788456f, cubic = 0.044715f;
    const vfloat square = x * x;
    const vfloat t = tanh(x * (square * (scale * cubic) + scale));
    const vfloat slope = x * (square * (3 * scale * cubic) + scale) * (1.f - t * t);
    return ct * (t + 1.f + slope) * 0.5f;
  }
};

// x t with t = tanh(softplus(x)) = n / (n + 2), n = eˣ (eˣ + 2); above 20 it is x.
struct MishGradient : Elementwise<MishGradient> {
  static constexpr const char* name = "MishGradient_float";
  static vfloat apply(vfloat x, vfloat ct) {
    const vfloat e = exp(min(x, splat(20.f))), n = e * (e + 2.f), rest = 2.f / (n + 2.f);  // rest = 1 - t
    const vfloat slope = n / (n + 2.f) + x * rest * (2.f - rest) * (e / (1.f + e));
    return ct * select(x > 20.f, splat(1.f), slope);
  }
};

// Of a value, scalar bounds and its cotangent: `Op::apply(vfloat, float, float, vfloat)` is the formula.
template <class Op>
struct Bounded {
  static constexpr Floats<4> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr int in_place[] = {3, 0};

  void compute(Context& context) const {
    const auto x = context.input<const float>(0), ct = context.input<const float>(3);
    const auto low = context.input<const float>(1), high = context.input<const float>(2);
    require(x.shape == ct.shape, "the value and the cotangent must have the same shape");
    require(low.size() == 1 && high.size() == 1, "the bounds must be scalars");
    const auto y = context.output<float>(0, x.shape);
    if (!y.data) return;
    const float least = *low.data, most = *high.data;
    context.threads().ranges(x.size(), 16384, [&](std::size_t begin, std::size_t end) {
      vectors(end - begin, [=, x = x.data + begin, ct = ct.data + begin, y = y.data + begin](std::size_t i, auto extent) {
        store(y + i, Op::apply(load(x + i, extent), least, most, load(ct + i, extent)), extent);
      });
    });
  }
};

// ct where low <= x <= high
struct ClipGradient : Bounded<ClipGradient> {
  static constexpr const char* name = "ClipGradient_float";
  static vfloat apply(vfloat x, float low, float high, vfloat ct) {
    return select((x >= low) & (x <= high), ct, vfloat{});
  }
};

// 0 where y <= low or y >= high, else ct.
struct HardtanhGradient : Bounded<HardtanhGradient> {
  static constexpr const char* name = "HardtanhGradient_float";
  static vfloat apply(vfloat y, float low, float high, vfloat ct) { return select((y <= low) | (y >= high), vfloat{}, ct); }
};

// The bodies of these are right for finite cotangents only.
struct ClipGradientOfFinite : ClipGradient {
  static constexpr const char* name = "ClipGradientOfFinite_float";
};
struct HardtanhGradientOfFinite : HardtanhGradient {
  static constexpr const char* name = "HardtanhGradientOfFinite_float";
};

}  // namespace

void add_pointwise(Domain& domain) {
  domain.add<ReluGradient>();
  domain.add<ReluGradientOfFinite>();
  domain.add<ClipGradient>();
  domain.add<ClipGradientOfFinite>();
  domain.add<HardtanhGradient>();
  domain.add<HardtanhGradientOfFinite>();
  domain.add<Silu>();
  domain.add<SiluGradient>();
  domain.add<SigmoidGradient>();
  domain.add<TanhGradient>();
  domain.add<GeluGradient>();
  domain.add<GeluTanhGradient>();
  domain.add<MishGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
