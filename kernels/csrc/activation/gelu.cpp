// Gradients of GELU, exact and by tanh, in one pass over memory.
#include <cmath>

#include "activation/elementwise.h"
#include "core/op.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

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

}  // namespace

void add_activations(Domain& domain) {
  domain.add<GeluGradient>();
  domain.add<GeluTanhGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
