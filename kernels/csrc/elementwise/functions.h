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

// Between two numbers; NaN stays NaN.
inline vfloat between(float low, vfloat x, float high) {
  // Of these instructions the second operand is the result where one is NaN.
#if defined(__AVX512F__)
  const __m512 above = _mm512_maskz_max_ps(0xffff, (__m512)splat(low), (__m512)x);
  return (vfloat)_mm512_maskz_min_ps(0xffff, (__m512)splat(high), above);
#elif defined(__AVX2__)
  return (vfloat)_mm256_min_ps((__m256)splat(high), _mm256_max_ps((__m256)splat(low), (__m256)x));
#else
  return select(x < low, splat(low), select(x > high, splat(high), x));
#endif
}

// eˣ as in `core/simd.h`, but denormal numbers are results, too. Infinite above 88.72, 0 below -103.98.
inline vfloat precise_exp(vfloat x) {
  const vfloat c = between(-110.f, x, 90.f), n = round(c * 1.44269504f);
  const vfloat r = c - n * 0.693359375f + n * 2.12194440e-4f;
  const vfloat g = detail::horner(r, 0.5000000014291074f, 0.16666573358081668f, 0.041666456777951784f,
                                  0.008363776466627502f, 0.001393454451840694f);
  const vfloat y = r * r * g + r + 1.f;
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_scalef_ps(0xffff, (__m512)y, (__m512)n);
#else
  // In two factors, as 2^128 is infinite and 2^-150 is 0. Of NaN n is any integer.
  const vint whole = __builtin_convertvector(n, vint), half = whole >> 1;
  const vuint low = ((vuint)half + 127u) << 23, high = ((vuint)whole - (vuint)half + 127u) << 23;
  return y * (vfloat)low * (vfloat)high;
#endif
}

// As PyTorch computes it: near 1 its rounding shows in 1 - sigmoid(x).
inline vfloat precise_sigmoid(vfloat x) { return 1.f / (1.f + precise_exp(-x)); }

// Below 0.625 x + x³ P(x²), by Remez for relative error (4.4e-9); above 1 - 2 / (e²ˣ + 1).
inline vfloat precise_tanh(vfloat x) {
  const vfloat a = magnitude(x), s = a * a;
  const vfloat p = detail::horner(s, -0.3333328195467953f, 0.1333144258328011f, -0.0537397499491466f,
                                  0.020639208510990905f, -0.005705129889910518f);
  const vfloat far = 1.f - 2.f / (precise_exp(a + a) + 1.f);
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
  const vfloat far = 1.f - precise_exp(-(t * q + t));
  return select(magnitude(x) < 0.925f, x + x * p, select(x == x, with_sign(far, x), x));
}

// max(x, 0) + ln(1 + e^-|x|)
inline vfloat softplus(vfloat x) { return select(x < 0.f, vfloat{}, x) + log1p(precise_exp(-magnitude(x))); }

inline bool everywhere(vint mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) == 0xffff;
#elif defined(__AVX2__)
  return _mm256_movemask_epi8((__m256i)mask) == -1;
#else
  bool all = true;
  for (std::size_t i = 0; i < lanes; ++i) all &= mask[i] != 0;
  return all;
#endif
}

// x = n π / 2 + rest for |x| <= 2^20, |rest| <= 0.83, and n modulo 4, perhaps with more bits.
struct Quadrant {
  vfloat rest;
  vint n;
};
#if defined(__FMA__) || defined(__aarch64__)
// In float, by products and sums that round once. The rounding of 2 / π may take the neighbour of n, of the largest x.
inline Quadrant quadrant(vfloat x) {
  constexpr float magic = 12582912;  // 1.5 * 2^23: adding it rounds to an integer, which the last bits then hold
  const vfloat whole = x * 0.6366197466850281f + magic, n = whole - magic;
  // π / 2 in three parts. x - n times the first one is exact, as both are multiples of 2^-23, or of 2^-24 and n <= 1.
  const vfloat rest = ((x - n * 1.5707963705062866f) + n * 4.371138828673793e-08f) + n * 1.7151244994428829e-15f;
  return {rest, as_ints(whole)};
}
#else
// In double.
inline Quadrant quadrant(vfloat x) {
  constexpr std::size_t half = lanes / 2;
  typedef float vhalf __attribute__((vector_size(half * sizeof(float))));
  typedef int32_t vhalfint __attribute__((vector_size(half * sizeof(int32_t))));
  typedef double vdouble __attribute__((vector_size(half * sizeof(double))));
  // Integers of larger numbers, or of NaN, are undefined.
  x = select(magnitude(x) <= 1048576.f, x, vfloat{});
  vhalf from[2], rest[2];
  vhalfint whole[2];
  std::memcpy(from, &x, sizeof x);
  for (int i = 0; i < 2; ++i) {
    const vdouble wide = __builtin_convertvector(from[i], vdouble);
    const vdouble n = (wide * 0.6366197723675814 + 6755399441055744.) - 6755399441055744.;  // 1.5 * 2^52 rounds
    // π / 2 in two parts, of which the first times n is exact.
    rest[i] = __builtin_convertvector((wide - n * 1.570796325802803) - n * 9.920935796805404e-10, vhalf);
    whole[i] = __builtin_convertvector(n, vhalfint);
  }
  Quadrant all;
  std::memcpy(&all.rest, rest, sizeof rest);
  std::memcpy(&all.n, whole, sizeof whole);
  return all;
}
#endif

// y where `there`, else function(x). Out of the way of the loops.
template <float (*function)(float)>
__attribute__((noinline)) vfloat one_by_one(vint there, vfloat y, vfloat x) {
  for (std::size_t i = 0; i < lanes; ++i)
    if (!there[i]) y[i] = function(x[i]);
  return y;
}

// The sine, or the cosine, which is the sine `turn` = 1 quadrant further on. Within a quadrant they are x + x³ P(x²) and
// 1 - x² / 2 + x⁴ Q(x²), by Remez for relative error (5.9e-9 and 2.1e-10). Beyond 2^20 `function` computes them.
template <float (*function)(float)>
vfloat sine(vfloat x, int32_t turn) {
  const auto [r, n] = quadrant(x);
  const vint place = n + turn;
  const vfloat s = r * r;
  const vfloat p = detail::horner(s, -0.1666664928197861f, 0.00833186972886324f, -0.000194772714166902f);
  const vfloat q = detail::horner(s, 0.041666637248916186f, -0.00138869209169092f, 2.438966541546238e-05f);
  vfloat y = select((place & 1) == 0, r + r * s * p, 1.f - s * 0.5f + s * s * q);
  y = as_floats(as_ints(y) ^ (vint)((vuint)(place & 2) << 30));
  const vint usual = magnitude(x) <= 1048576.f;
  return __builtin_expect(everywhere(usual), true) ? y : one_by_one<function>(usual, y, x);
}
inline float sine_of_one(float a) { return __builtin_sinf(a); }
inline float cosine_of_one(float a) { return __builtin_cosf(a); }
inline vfloat sine(vfloat x) { return select(x == 0.f, x, sine<sine_of_one>(x, 0)); }  // -0 of -0
inline vfloat cosine(vfloat x) { return sine<cosine_of_one>(x, 1); }

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
