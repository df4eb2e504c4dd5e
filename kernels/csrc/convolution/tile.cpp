#include "convolution/tile.h"

#include <array>
#include <utility>

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

template <int Rows, int... Vectors>
constexpr std::array<Tile, tile_vectors> row(std::integer_sequence<int, Vectors...>) {
  return {tile<Rows, Vectors + 1>...};
}

template <int... Rows>
constexpr std::array<std::array<Tile, tile_vectors>, tile_rows> all(std::integer_sequence<int, Rows...>) {
  return {row<Rows + 1>(std::make_integer_sequence<int, tile_vectors>())...};
}

constexpr auto tiles = all(std::make_integer_sequence<int, tile_rows>());

}  // namespace

Tile tile_of(int64_t rows, int64_t vectors) { return tiles[rows - 1][vectors - 1]; }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
