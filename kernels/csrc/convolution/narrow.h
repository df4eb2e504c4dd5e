// Convolutions in bfloat16: factors are rounded, and paired along an axis that is summed over, before all else. Gathering
// and tiling take a pair, a word, for a number; what is missing and what is padding are pairs of zeros.
#pragma once

#include "convolution/tile.h"
#include "core/threads.h"
#include "product/words.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

inline int64_t pairs_of(int64_t count) { return (count + 1) / 2; }

// from: [outer, count, inner]; to: [outer, pairs_of(count), inner], of neighbours in the middle axis.
void pair(const Threads& threads, const float* from, int64_t outer, int64_t count, int64_t inner, float* to);

// The same on the calling thread, of one matrix.
void pair(const float* from, int64_t count, int64_t inner, float* to);

// As `tile_of`, of pairs.
Tile pair_tile_of(int64_t rows, int64_t vectors);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
