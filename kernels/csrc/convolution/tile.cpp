#include "convolution/tile.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

struct FloatTile {
  template <int Rows, int Vectors>
  static void run(int64_t depth, const float* a, int64_t a_step, int64_t a_row, const float* b, int64_t b_step, float* to,
                  int64_t to_row, bool add) {
    tile<Rows, Vectors>(depth, a, a_step, a_row, b, b_step, to, to_row, add);
  }
};

constexpr auto tiles = all_tiles<FloatTile>();

}  // namespace

Tile tile_of(int64_t rows, int64_t vectors) { return tiles[rows - 1][vectors - 1]; }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
