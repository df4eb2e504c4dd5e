// What recurrent layers have in common: sizes, the order of time, and the gradients of weights.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "core/gemm.h"
#include "core/simd.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// One direction of a layer. Arrays are [time, batch, ...], in the order of the input also where it is read backwards.
struct Sequence {
  size_t time, batch, input, hidden;
  bool reverse;

  // The place in time of the step-th step.
  size_t at(size_t step) const { return reverse ? time - 1 - step : step; }

  // Rows [begin, end) of the batch are one thread's through all of time: between steps nobody waits for anybody. Each part
  // reads all `weights` at each step, so that parts have more rows where weights do not stay in the second-level cache.
  template <class Task>
  void share_batch(const Threads& threads, size_t weights, Task&& task) const {
    const size_t rows = weights <= 128 * 1024 ? 8 : 16;
    const size_t parts = std::clamp<size_t>(batch / rows, std::clamp<size_t>(batch, 1, 2), most_parts);
    threads.run(parts, [&](size_t part) {
      const size_t begin = batch * part / parts, end = batch * (part + 1) / parts;
      if (begin < end) task(begin, end);
    });
  }
};

// Calls each(offset, count) for vectors of `count` lanes that together are `size` floats.
template <class Each>
inline void vectors(size_t size, Each&& each) {
  size_t i = 0;
  for (; i + lanes <= size; i += lanes) each(i, lanes);
  if (i < size) each(i, size - i);
}

// to[row] += the sum of a strip's numbers [depth][row]; blocks are summed up first, which keeps the rounding small.
inline void add_up(const float* strip, size_t depth, size_t rows, float* to) {
  for (size_t block = 0; block < depth; block += 32) {
    float part[tile_rows] = {};
    for (size_t k = block; k < std::min(depth, block + 32); ++k)
      for (size_t r = 0; r < tile_rows; ++r) part[r] += strip[k * tile_rows + r];
    for (size_t r = 0; r < rows; ++r) to[r] += part[r];
  }
}

// C [gates, columns] = Aᵀ B, of a B packed beforehand.
struct WeightProduct {
  const float* packed;
  size_t columns;
  float* c;
};

// Several products Aᵀ B with the same A [depth, gates], and the sums of its columns where `sums` is given. A is the
// largest operand by far, and lies across in memory: a strip of its columns is copied once for all products.
inline void transposed_products(const Threads& threads, const float* a, size_t depth, size_t gates,
                                const std::vector<WeightProduct>& products, float* sums) {
  constexpr size_t group = 4 * tile_rows;
  const size_t strips = divided_up(gates, tile_rows), parts = std::min(std::max(strips / 4, std::min<size_t>(strips, 4)), most_parts);
  const Matrix rows = rows_of(a, gates).transposed();
  threads.run(parts, [&](size_t part) {
    alignas(64) float copy[group * depth_block] = {};  // rows behind the last one are summed up, too
    const size_t end = std::min(gates, strips * (part + 1) / parts * tile_rows);
    for (size_t i = strips * part / parts * tile_rows; i < end; i += group) {
      const size_t taken = std::min(group, end - i);
      if (sums) std::fill(sums + i, sums + i + taken, 0.f);
      size_t k = 0;
      do {
        const size_t deep = part_of_depth(depth - k);
        copy_strips(rows.from(i, k), taken, deep, copy, deep * tile_rows);
        for (size_t r = 0; r < taken; r += tile_rows) {
          const size_t height = std::min(tile_rows, taken - r);
          const Matrix strip{copy + r * deep, 1, static_cast<ptrdiff_t>(tile_rows)};
          for (const auto& [packed, columns, c] : products) {
            Into out{c, columns, k > 0};
            for (size_t column = 0; column < columns; column += tile_columns)
              tile_of(height, strip, packed + column * depth + k * tile_columns, tile_columns, deep, i + r, column,
                      std::min(tile_columns, columns - column), out);
          }
          if (sums) add_up(copy + r * deep, deep, height, sums + i + r);
        }
        k += deep;
      } while (k < depth);
    }
  });
}

// Cotangents of W [gates, input], R [gates, hidden] and B [2 gates] from those of the gates' two parts, x Wᵀ + Wb and
// h Rᵀ + Rb, both [time, batch, gates], where h is the hidden state before each step.
inline void weight_gradients(const Threads& threads, const Sequence& s, size_t gates, const float* ct_input,
                             const float* ct_hidden, const float* x, const float* y, const float* h0, float* ct_w,
                             float* ct_r, float* ct_b) {
  const size_t rows = s.time * s.batch, first = std::min(rows, s.batch), later = rows - first;
  const Buffer inputs(ct_w ? packed_size(rows, s.input) : 0), states(ct_r ? packed_size(rows, s.hidden) : 0);
  if (ct_w) pack(threads, rows_of(x, s.input), rows, s.input, inputs.data());
  if (ct_r) {
    // All steps but the first have y of the step before, which lies behind them in time where it runs backwards.
    const Matrix start = rows_of(h0, s.hidden), others = rows_of(y + (s.reverse ? first : 0) * s.hidden, s.hidden);
    threads.ranges(divided_up(s.hidden, tile_columns), 1, [&](size_t panel, size_t end) {
      for (; panel < end; ++panel) {
        float* to = states.data() + panel * rows * tile_columns;
        pack_panel(start, first, s.hidden, panel, to + (s.reverse ? later : 0) * tile_columns);
        pack_panel(others, later, s.hidden, panel, to + (s.reverse ? 0 : first) * tile_columns);
      }
    });
  }
  std::vector<WeightProduct> own, recurrent;
  if (ct_w) own.push_back({inputs.data(), s.input, ct_w});
  std::vector<WeightProduct>& with_states = ct_hidden == ct_input ? own : recurrent;
  if (ct_r) with_states.push_back({states.data(), s.hidden, ct_r});
  transposed_products(threads, ct_input, rows, gates, own, ct_b);
  if (ct_hidden != ct_input)
    transposed_products(threads, ct_hidden, rows, gates, recurrent, ct_b ? ct_b + gates : nullptr);
  else if (ct_b)
    std::copy(ct_b, ct_b + gates, ct_b + gates);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
