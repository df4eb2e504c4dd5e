// Square blocks of floats turned over in registers.
#pragma once

#include <cstdint>

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace detail {

// Exchanges one bit of the indices of rows and columns.
template <int Bit>
inline void exchange(vfloat (&v)[lanes]) {
  const vint low = indices([](int j) { return j & Bit ? static_cast<int>(lanes) + j - Bit : j; });
  const vint high = indices([](int j) { return j & Bit ? static_cast<int>(lanes) + j : j + Bit; });
#pragma GCC unroll 16
  for (int i = 0; i < static_cast<int>(lanes); ++i) {
    if (i & Bit) continue;
    const vfloat a = v[i], b = v[i + Bit];
    v[i] = shuffle(a, b, low);
    v[i + Bit] = shuffle(a, b, high);
  }
}

inline void turn(vfloat (&v)[lanes]) {
  exchange<1>(v);
  exchange<2>(v);
  if constexpr (lanes > 4) exchange<4>(v);
  if constexpr (lanes > 8) exchange<8>(v);
}

}  // namespace detail

// place(c)[r] = from[r * from_row + c] for `rows` <= lanes rows and any number of columns, in their order. With Whole
// whole vectors are written, with zeros for rows that are not there.
template <bool Whole, class Place>
inline void transpose_to(const float* from, int64_t from_row, int64_t rows, int64_t columns, Place&& place) {
  constexpr int64_t n = lanes;
  for (int64_t c = 0; c < columns; c += n) {
    const int64_t wide = columns - c < n ? columns - c : n;
    vfloat v[lanes];
    if (rows == n && wide == n) {
#pragma GCC unroll 16
      for (int64_t r = 0; r < n; ++r) v[r] = load(from + r * from_row + c);
    } else {
      for (int64_t r = 0; r < n; ++r) v[r] = r < rows ? load(from + r * from_row + c, wide) : vfloat{};
    }
    detail::turn(v);
    if (wide == n && (Whole || rows == n)) {
#pragma GCC unroll 16
      for (int64_t r = 0; r < n; ++r) store(place(c + r), v[r]);
    } else if (Whole) {
      for (int64_t r = 0; r < wide; ++r) store(place(c + r), v[r]);
    } else {
      for (int64_t r = 0; r < wide; ++r) store(place(c + r), v[r], rows);
    }
  }
}

inline void transpose(const float* from, int64_t from_row, int64_t rows, int64_t columns, float* to, int64_t to_row) {
  transpose_to<true>(from, from_row, rows, columns, [=](int64_t c) { return to + c * to_row; });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
