// Numbers rounded to bfloat16, packed in pairs for AVX512_BF16: what a processor that has it multiplies two at a time.
//
// A word holds two neighbours along the axis that is summed over, the first in the low half; an odd one is paired with
// zero. Where `pairs_supported` is false, no function here may be called.
#pragma once

#include <cstdint>

#include "core/gemm.h"
#include "product/words.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

inline size_t pairs_of(size_t depth) { return (depth + 1) / 2; }

// Rows of the first factor: the pair p of row i is data[i / tile_rows * strip + i % tile_rows * row + p * step].
struct PairRows {
  uint32_t* data;
  size_t strip, row, step;

  // How rows of this depth are laid out, which is as they lie in memory: each in one piece, or tile_rows side by side.
  static PairRows of(Matrix a, size_t depth, uint32_t* data);
  static size_t words(size_t rows, size_t depth);
};

// Packs the strips [first, end) of A [rows, depth].
void pack_pair_rows(Matrix a, size_t rows, size_t depth, size_t first, size_t end, const PairRows& to);

// Packs columns of B [depth, columns] into panels of tile_columns, [panel][pair][column], those behind the last zeros.
void pack_pair_panels(Matrix b, size_t depth, size_t columns, uint32_t* to);

// sums [rows][vectors * lanes] = one strip of A, of `rows` <= tile_rows, times the first `vectors` of a panel.
void multiply_pairs(size_t rows, size_t vectors, const PairRows& a, size_t strip, const uint32_t* panel, size_t pairs,
                    float* sums);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
