// Functions of float32 within 2 ulp. Those of `core/simd.h` are faster, and further off near ±1.
#pragma once

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {

inline vfloat magnitude(vfloat a) { return as_floats(as_ints(a) & 0x7fffffff); }
inline vfloat with_sign(vfloat a, vfloat of) { return as_floats(as_ints(a) | (as_ints(of) & INT32_MIN)); }

// As ONNX Runtime: NaN if one of them is, and of two zeros the second.
inline vfloat larger(vfloat a, vfloat b) { return select(a == a, max(a, b), a); }
inline vfloat smaller(vfloat a, vfloat b) { return select(a == a, min(a, b), a); }

inline vfloat sign(vfloat a) {
  return select(a > 0.f, splat(1.f), select(a < 0.f, splat(-1.f), select(a == 0.f, vfloat{}, a)));
}

// q = e / (1 + e), where x < 0 and e = eˣ, else 1 / (1 + e), e = e⁻ˣ. What rounding took from 1 + e is put back:
// dividing by d more changes q by -q d / (1 + e).
inline vfloat precise_sigmoid(vfloat x) {
  const vfloat e = exp(-magnitude(x)), u = e + 1.f, d = (1.f - u) + e;
  const vfloat q = select(x < 0.f, e, splat(1.f)) / u;
  return q - q * d * select(x < 0.f, 1.f - q, q);
}

// Below 0.625 x + x³ P(x²), by Remez for relative error (4.4e-9); above 1 - 2 / (e²ˣ + 1).
inline vfloat precise_tanh(vfloat x) {
  const vfloat a = magnitude(x), s = a * a;
  const vfloat p = detail::horner(s, -0.3333328195467953f, 0.1333144258328011f, -0.0537397499491466f,
                                  0.020639208510990905f, -0.005705129889910518f);
  const vfloat far = 1.f - 2.f / (exp(a + a) + 1.f);
  return with_sign(select(a < 0.625f, a + a * s * p, far), x);
}

// Below 0.925 x + x P(x²), by Remez for relative error (1.8e-8); above 1 - exp(-t - t Q(t)) of t = |x|
// (7.4e-10).
inline vfloat precise_erf(vfloat x) {
  const vfloat s = x * x, t = min(magnitude(x), splat(4.f));
  const vfloat p = detail::horner(s, 0.12837914702383244f, -0.3761247664896477f, 0.11281635841449553f,
                                  -0.02676002877095958f, 0.004983469485217374f, -0.0005941222561912509f);
  const vfloat q = detail::horner(t, 0.12864849200932427f, 0.6351513085463796f, 0.10623689183056956f,
                                  -0.02376207611783173f, 0.003642465714717429f, -0.0003228056045633599f,
                                  1.1231490190749797e-05f);
  const vfloat far = 1.f - exp(-(t * q + t));
  return select(magnitude(x) < 0.925f, x + x * p, select(x == x, with_sign(far, x), x));
}

// max(x, 0) + ln(1 + e^-|x|)
inline vfloat softplus(vfloat x) { return select(x < 0.f, vfloat{}, x) + log1p(exp(-magnitude(x))); }

// What only the C library has.
template <float (*function)(float)>
vfloat each(vfloat a) {
  vfloat r;
  for (std::size_t i = 0; i < lanes; ++i) r[i] = function(a[i]);
  return r;
}
inline float sine(float a) { return __builtin_sinf(a); }
inline float cosine(float a) { return __builtin_cosf(a); }

// aᵇ of these b; what ONNX Runtime computes for 2 and 3.
inline vfloat square(vfloat a) { return a * a; }
inline vfloat cube(vfloat a) { return a * a * a; }
inline vfloat square_root(vfloat a) {
  constexpr float infinite = __builtin_inff();
  return select(a == -infinite, splat(infinite), sqrt(a) + 0.f);  // 0 of -0
}

inline float power(float a, float b) {
  constexpr float infinite = __builtin_inff();
  if (b == 2.f) return a * a;
  if (b == 3.f) return a * a * a;
  if (b == 1.f) return a;
  if (b == -1.f) return 1.f / a;
  if (b == 0.5f) return a == -infinite ? infinite : __builtin_sqrtf(a) + 0.f;
  return __builtin_powf(a, b);
}
inline vfloat power(vfloat a, vfloat b) {
  vfloat r;
  for (std::size_t i = 0; i < lanes; ++i) r[i] = power(a[i], b[i]);
  return r;
}

// The compiler makes no product and sum of this and what follows, which would round once.
inline vfloat rounded(vfloat a) {
#if defined(__aarch64__)
  __asm__("" : "+w"(a));
#elif defined(__FMA__)
  __asm__("" : "+x"(a));
#endif
  return a;
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
