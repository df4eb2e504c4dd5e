// The innermost product: a tile of sums that stays in registers.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Registers for rows * vectors sums, the vectors of one step, and a repeated number: 8 * 3 + 3 + 1 of 32, or 4 * 3 + 3 + 1
// of 16. Eight sums or more hide the latency of a multiply-add.
constexpr int tile_rows = registers == 32 ? 8 : 4, tile_vectors = 3;
constexpr int64_t tile_width = tile_vectors * static_cast<int64_t>(lanes);

using Tile = void (*)(int64_t, const float*, int64_t, int64_t, const float*, int64_t, float*, int64_t, bool);

// to[r][v] = sum over k of a[k * a_step + r * a_row] * b[k * b_step + v-th vector], or that much more: what has been
// summed before is added last, so that errors grow with the number of blocks and not with that of terms.
template <int Rows, int Vectors>
inline void tile(int64_t depth, const float* a, int64_t a_step, int64_t a_row, const float* b, int64_t b_step,
                 float* to, int64_t to_row, bool add) {
  vfloat sums[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) sums[r][v] = vfloat{};
  for (int64_t k = 0; k < depth; ++k, a += a_step, b += b_step) {
    vfloat column[Vectors];
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) column[v] = load(b + v * lanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const vfloat factor = splat(a[r * a_row]);
#pragma GCC unroll 4
      for (int v = 0; v < Vectors; ++v) sums[r][v] += factor * column[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < Vectors; ++v) {
      float* const at = to + r * to_row + v * lanes;
      store(at, add ? load(at) + sums[r][v] : sums[r][v]);
    }
}

// Kind::run<rows, vectors> for 1 to tile_rows rows and 1 to tile_vectors vectors.
template <class Kind, int Rows, int... Vectors>
constexpr std::array<Tile, tile_vectors> row_of_tiles(std::integer_sequence<int, Vectors...>) {
  return {Kind::template run<Rows, Vectors + 1>...};
}

template <class Kind, int... Rows>
constexpr std::array<std::array<Tile, tile_vectors>, tile_rows> rows_of_tiles(std::integer_sequence<int, Rows...>) {
  return {row_of_tiles<Kind, Rows + 1>(std::make_integer_sequence<int, tile_vectors>())...};
}

template <class Kind>
constexpr std::array<std::array<Tile, tile_vectors>, tile_rows> all_tiles() {
  return rows_of_tiles<Kind>(std::make_integer_sequence<int, tile_rows>());
}

// The tile of so many rows and vectors: 1 to tile_rows, 1 to tile_vectors.
Tile tile_of(int64_t rows, int64_t vectors);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
