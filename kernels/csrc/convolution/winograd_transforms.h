// The transforms of F(2 x 2, 3 x 3), of as many tiles at a time as a vector has lanes. Each is a small
// matrix that is applied to columns and then to rows.
#pragma once

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace detail {

// The matrices, each as its product with a column.
struct InputMatrix {  // Bᵀ
  static constexpr int from = 4, to = 4;
  static void apply(const vfloat* d, vfloat* t) { t[0] = d[0] - d[2], t[1] = d[1] + d[2], t[2] = d[2] - d[1], t[3] = d[1] - d[3]; }
};
struct KernelMatrix {  // G
  static constexpr int from = 3, to = 4;
  static void apply(const vfloat* g, vfloat* u) {
    const vfloat ends = (g[0] + g[2]) * .5f, middle = g[1] * .5f;
    u[0] = g[0], u[1] = ends + middle, u[2] = ends - middle, u[3] = g[2];
  }
};
struct KernelTransposed {  // Gᵀ
  static constexpr int from = 4, to = 3;
  static void apply(const vfloat* s, vfloat* g) {
    const vfloat both = (s[1] + s[2]) * .5f;
    g[0] = s[0] + both, g[1] = (s[1] - s[2]) * .5f, g[2] = both + s[3];
  }
};
struct ResultMatrix {  // Aᵀ
  static constexpr int from = 4, to = 2;
  static void apply(const vfloat* m, vfloat* y) { y[0] = m[0] + m[1] + m[2], y[1] = m[1] - m[2] - m[3]; }
};
struct ResultTransposed {  // A
  static constexpr int from = 2, to = 4;
  static void apply(const vfloat* y, vfloat* d) { d[0] = y[0], d[1] = y[0] + y[1], d[2] = y[0] - y[1], d[3] = -y[1]; }
};

}  // namespace detail

// to = M from Mᵀ for a vector of each element, in registers.
template <class Matrix>
inline void winograd_product(const vfloat (&from)[Matrix::from][Matrix::from], vfloat (&to)[Matrix::to][Matrix::to]) {
  vfloat half[Matrix::from][Matrix::to];
#pragma GCC unroll 4
  for (int j = 0; j < Matrix::from; ++j) {
    vfloat column[Matrix::from];
#pragma GCC unroll 4
    for (int i = 0; i < Matrix::from; ++i) column[i] = from[i][j];
    Matrix::apply(column, half[j]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < Matrix::to; ++i) {
    vfloat row[Matrix::from];
#pragma GCC unroll 4
    for (int j = 0; j < Matrix::from; ++j) row[j] = half[j][i];
    Matrix::apply(row, to[i]);
  }
}

// The same in memory: from(i, j) and to(i, j) are the places.
template <class Matrix, class From, class To>
inline void winograd_transform(From&& from, To&& to) {
  vfloat elements[Matrix::from][Matrix::from], results[Matrix::to][Matrix::to];
#pragma GCC unroll 4
  for (int i = 0; i < Matrix::from; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Matrix::from; ++j) elements[i][j] = load(from(i, j));
  winograd_product<Matrix>(elements, results);
#pragma GCC unroll 4
  for (int i = 0; i < Matrix::to; ++i)
#pragma GCC unroll 4
    for (int j = 0; j < Matrix::to; ++j) store(to(i, j), results[i][j]);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
