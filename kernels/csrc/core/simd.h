// Vectors of floats as wide as the level's registers, and the functions that ops need of them.
//
// GCC's and Clang's vector extensions: the same source is AVX-512, AVX2, SSE or NEON. Everything is in the level's
// namespace, so that no two levels share a symbol.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace onnxtrain::ONNXTRAIN_LEVEL {

#if defined(__AVX512F__)
constexpr std::size_t lanes = 16, registers = 32;
#elif defined(__AVX2__)
constexpr std::size_t lanes = 8, registers = 16;
#elif defined(__aarch64__)
constexpr std::size_t lanes = 4, registers = 32;
#else
constexpr std::size_t lanes = 4, registers = 16;
#endif

typedef float vfloat __attribute__((vector_size(lanes * sizeof(float))));
typedef int32_t vint __attribute__((vector_size(lanes * sizeof(int32_t))));
typedef uint32_t vuint __attribute__((vector_size(lanes * sizeof(uint32_t))));

#if defined(__aarch64__)
// GCC would move what memcpy copies through two integer registers.
typedef float vfloat_in_memory
    __attribute__((vector_size(lanes * sizeof(float)), aligned(alignof(float)), may_alias));
inline vfloat load(const float* from) { return *reinterpret_cast<const vfloat_in_memory*>(from); }
inline void store(float* to, vfloat v) { *reinterpret_cast<vfloat_in_memory*>(to) = v; }
#else
inline vfloat load(const float* from) {
  vfloat v;
  std::memcpy(&v, from, sizeof v);
  return v;
}
inline void store(float* to, vfloat v) { std::memcpy(to, &v, sizeof v); }
#endif

// Indices, which(i) at place i.
template <class Which>
inline vint indices(Which&& which) {
  vint all;
#pragma GCC unroll 16
  for (int i = 0; i < static_cast<int>(lanes); ++i) all[i] = which(i);
  return all;
}

// Whether a lane is among the first `count`.
inline vint among_first(std::size_t count) { return indices([](int i) { return i; }) < static_cast<int32_t>(count); }

// The first `count` <= lanes elements; the others are zero, and their memory is not touched. Not by memcpy, which is a
// call where the number of bytes is known at run time only, and writes a vector that is read again at once.
inline vfloat load(const float* from, std::size_t count) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << count) - 1), from);
#elif defined(__AVX2__)
  return (vfloat)_mm256_maskload_ps(from, (__m256i)among_first(count));
#else
  vfloat v{};
  if (count > 0) v[0] = from[0];
  if (count > 1) v[1] = from[1];
  if (count > 2) v[2] = from[2];
  if (count > 3) v[3] = from[3];
  return v;
#endif
}
inline void store(float* to, vfloat v, std::size_t count) {
#if defined(__AVX512F__)
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << count) - 1), (__m512)v);
#elif defined(__AVX2__)
  // By halves: AMD's processors take some twenty cycles for a store with a mask.
  if (count == lanes) return store(to, v);
  __m128 part = _mm256_castps256_ps128((__m256)v);
  if (count & 4) {
    _mm_storeu_ps(to, part);
    part = _mm256_extractf128_ps((__m256)v, 1);
    to += 4;
  }
  if (count & 2) {
    _mm_storel_pi(reinterpret_cast<__m64*>(to), part);
    part = _mm_movehl_ps(part, part);
    to += 2;
  }
  if (count & 1) _mm_store_ss(to, part);
#else
  if (count > 0) to[0] = v[0];
  if (count > 1) to[1] = v[1];
  if (count > 2) to[2] = v[2];
  if (count > 3) to[3] = v[3];
#endif
}

// The first `count` <= lanes elements, of which most often there are as many as that.
inline vfloat load_some(const float* from, std::size_t count) { return count == lanes ? load(from) : load(from, count); }
inline void store_some(float* to, vfloat value, std::size_t count) {
  if (count == lanes)
    store(to, value);
  else
    store(to, value, count);
}

inline vfloat splat(float x) { return x - vfloat{}; }
inline vfloat select(vint where, vfloat yes, vfloat no) { return where ? yes : no; }
inline vfloat max(vfloat a, vfloat b) { return a > b ? a : b; }
inline vfloat min(vfloat a, vfloat b) { return a < b ? a : b; }
inline vfloat abs(vfloat a) { return a < 0 ? -a : a; }

// The elements at these places of a and b, which lie one after the other. Indices must be known when this is compiled.
inline vfloat shuffle(vfloat a, vfloat b, vint from) {
#if defined(__clang__)
  vfloat v;
  for (int i = 0; i < static_cast<int>(lanes); ++i)
    v[i] = from[i] < static_cast<int>(lanes) ? a[from[i]] : b[from[i] - static_cast<int>(lanes)];
  return v;
#else
  return __builtin_shuffle(a, b, from);
#endif
}

// Every other element of a and b.
inline vfloat even(vfloat a, vfloat b) { return shuffle(a, b, indices([](int i) { return 2 * i; })); }
inline vfloat odd(vfloat a, vfloat b) { return shuffle(a, b, indices([](int i) { return 2 * i + 1; })); }

// a[0] b[0] a[1] b[1] ...: the first half and the second.
inline vfloat first_alternating(vfloat a, vfloat b) {
  return shuffle(a, b, indices([](int i) { return i / 2 + i % 2 * static_cast<int>(lanes); }));
}
inline vfloat second_alternating(vfloat a, vfloat b) {
  return shuffle(a, b, indices([](int i) { return static_cast<int>(lanes) / 2 + i / 2 + i % 2 * static_cast<int>(lanes); }));
}

// The bits of a vector as the other type of element.
inline vfloat as_floats(vint bits) { return (vfloat)bits; }
inline vint as_ints(vfloat a) { return (vint)a; }

// Compilers make one instruction of each of these, as the baseline has one for them.
inline vfloat sqrt(vfloat a) {
  vfloat r;
  for (std::size_t i = 0; i < lanes; ++i) r[i] = __builtin_sqrtf(a[i]);
  return r;
}
inline vfloat floor(vfloat a) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_roundscale_ps(0xffff, (__m512)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vfloat)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
#else
  vfloat r;
  for (std::size_t i = 0; i < lanes; ++i) r[i] = __builtin_floorf(a[i]);
  return r;
#endif
}
inline vfloat ceil(vfloat a) { return -floor(-a); }
// To the nearest integer, and halves to the even one.
inline vfloat round(vfloat a) {
#if defined(__AVX512F__)
  return (vfloat)_mm512_maskz_roundscale_ps(0xffff, (__m512)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return (vfloat)_mm256_round_ps((__m256)a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  vfloat r;
  for (std::size_t i = 0; i < lanes; ++i) r[i] = __builtin_rintf(a[i]);
  return r;
#endif
}

// Sum of the lanes, by halves: the order is fixed.
inline float sum(vfloat v) {
  float part[lanes];
  store(part, v);
  for (std::size_t half = lanes / 2; half > 0; half /= 2)
    for (std::size_t i = 0; i < half; ++i) part[i] += part[i + half];
  return part[0];
}

namespace detail {
inline vfloat horner(vfloat, float last) { return splat(last); }
template <class... Rest>
inline vfloat horner(vfloat t, float first, Rest... rest) {
  return horner(t, rest...) * t + first;
}
}  // namespace detail

// eˣ: x = n ln 2 + r with |r| <= ln 2 / 2; eʳ = 1 + r + r² g(r), g by Chebyshev interpolation (8e-9). Infinite above
// 88.72, 0 below -87.33, where float32 would be denormal.
inline vfloat exp(vfloat x) {
  const vfloat clamped = max(min(x, splat(89.f)), splat(-88.f));
  const vfloat magic = splat(12582912.f);  // 1.5 * 2^23: adding it rounds to an integer
  const vfloat n = (clamped * 1.44269504f + magic) - magic;
  const vfloat r = clamped - n * 0.693359375f + n * 2.12194440e-4f;
  const vfloat g = detail::horner(r, 0.5000000014291074f, 0.16666573358081668f, 0.041666456777951784f,
                                  0.008363776466627502f, 0.001393454451840694f);
  // In two factors, as 2^128 alone is infinite.
  const vint whole = __builtin_convertvector(n, vint), half = whole >> 1;
  vfloat y = r * r * g + r + 1.f, low, high;
  const vint low_bits = (half + 127) << 23, high_bits = (whole - half + 127) << 23;
  std::memcpy(&low, &low_bits, sizeof low);
  std::memcpy(&high, &high_bits, sizeof high);
  y = y * low * high;
  y = select(x < splat(-87.33654f), vfloat{}, y);
  return select(x == x, y, x);
}

// ln x. x = 2ᵏ (1 + f) with 1 + f in [√½, √2); ln(1 + f) = f - f² / 2 + f³ g(f), g by Remez for relative error (7.5e-10).
inline vfloat log(vfloat x) {
  const vint tiny = x < 1.17549435e-38f;  // denormal numbers are scaled by 2^23
  // Less the bits of √½. Those of negative numbers overflow.
  const vint bits = (vint)((vuint)select(tiny, x * 8388608.f, x) - 0x3f3504f3u);
  const vfloat k = __builtin_convertvector((bits >> 23) - (tiny & 23), vfloat);
  const vfloat f = as_floats((bits & 0x7fffff) + 0x3f3504f3) - 1.f, square = f * f;
  const vfloat g = detail::horner(f, 0.33333312605139376f, -0.2500000960387701f, 0.20002118588623033f,
                                  -0.16667995544062147f, 0.14219553499770857f, -0.12405595156777377f,
                                  0.11888160490808636f, -0.11675614166993367f, 0.06746598401107058f);
  // ln 2 in two parts, of which the first times k is exact.
  vfloat y = k * 0.693359375f + (f + (square * f * g - k * 2.12194440e-4f - square * 0.5f));
  y = select(x == 0.f, splat(-__builtin_inff()), y);
  y = select(x < 0.f, splat(__builtin_nanf("")), y);
  return select(x < __builtin_inff(), y, x);
}

// ln(1 + x): what rounding takes from u = 1 + x is added again, divided by u.
inline vfloat log1p(vfloat x) {
  const vfloat u = x + 1.f;
  const vfloat y = log(u) + select((u > 0.f) & (u < __builtin_inff()), (x - (u - 1.f)) / u, vfloat{});
  return select(u == 1.f, x, y);
}

// 1 / (1 + e⁻ˣ)
inline vfloat sigmoid(vfloat x) { return 1.f / (1.f + exp(-x)); }

// y where |x| <= limit, else the sign of x; NaN for NaN.
inline vfloat beyond(vfloat x, float limit, vfloat y) {
  y = select(x > limit, splat(1.f), select(x < -limit, splat(-1.f), max(min(y, splat(1.f)), splat(-1.f))));
  return select(x == x, y, x);
}

// tanh x = x P(x²) / Q(x²), fitted on [-9, 9] for relative error (1.3e-9), beyond which it is ±1 in float32.
inline vfloat tanh(vfloat x) {
  const vfloat c = max(min(x, splat(9.f)), splat(-9.f)), t = c * c;
  const vfloat p = detail::horner(t, 0.9999999987245626f, 0.13680854677877763f, 0.0038695058085781585f,
                                  2.8031268437969125e-05f, 3.0642432059280365e-08f, -1.2246181202562058e-11f);
  const vfloat q = detail::horner(t, 1.f, 0.47014186767910404f, 0.02725014855280903f, 0.0003940709586355134f,
                                  1.289032211714312e-06f);
  return beyond(x, 9.f, c * p / q);
}

// erf x = x P(x²) / Q(x²), fitted on [-3.95, 3.95] for relative error (5.6e-8), beyond which it is ±1 in float32.
inline vfloat erf(vfloat x) {
  const vfloat c = max(min(x, splat(3.95f)), splat(-3.95f)), t = c * c;
  const vfloat p = detail::horner(t, 1.1283791037332283f, 0.2025819044145114f, 0.05092312305414743f,
                                  0.00380779605283155f, 0.00014380800025859056f, -1.950892698190801e-06f,
                                  1.9603788654947173e-08f);
  const vfloat q = detail::horner(t, 1.f, 0.5128650495750524f, 0.11609409238600123f, 0.014575659614903367f,
                                  0.0009798347307289927f);
  return beyond(x, 3.95f, c * p / q);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
