// What recurrent layers have in common: sizes, the order of time, and the gradients of weights.
#pragma once

#include <algorithm>
#include <cstddef>

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

  // Rows [begin, end) of the batch are one thread's through all of time: between steps nobody waits for anybody.
  template <class Task>
  void share_batch(const Threads& threads, Task&& task) const {
    const size_t parts = std::clamp<size_t>(batch, 1, threads.width());
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

// Sums of the columns of [rows, columns]. Blocks of rows are summed up first, which keeps the rounding small.
inline void sum_rows(const Threads& threads, const float* from, size_t rows, size_t columns, float* to) {
  threads.ranges(divided_up(columns, lanes), 4, [&](size_t begin, size_t end) {
    for (size_t column = begin * lanes; column < std::min(columns, end * lanes); column += lanes) {
      const size_t count = std::min(lanes, columns - column);
      vfloat total{};
      for (size_t block = 0; block < rows; block += 32) {
        vfloat part{};
        for (size_t row = block; row < std::min(rows, block + 32); ++row)
          part += load_some(from + row * columns + column, count);
        total += part;
      }
      store_some(to + column, total, count);
    }
  });
}

// Cotangents of W [gates, input], R [gates, hidden] and B [2 gates] from those of the gates' two parts, x Wᵀ + Wb and
// h Rᵀ + Rb, both [time, batch, gates], where h is the hidden state before each step.
inline void weight_gradients(const Threads& threads, const Sequence& s, size_t gates, const float* ct_input,
                             const float* ct_hidden, const float* x, const float* y, const float* h0, float* ct_w,
                             float* ct_r, float* ct_b) {
  const size_t rows = s.time * s.batch, later = rows - std::min(rows, s.batch);
  if (ct_w)
    gemm(threads, gates, s.input, rows, rows_of(ct_input, gates).transposed(), rows_of(x, s.input), ct_w, s.input);
  if (ct_r) {
    // All steps but the first have y of the step before, which lies behind them in time where it runs backwards.
    const size_t shift = later ? s.batch : 0, own = s.reverse ? 0 : shift, before = s.reverse ? shift : 0;
    const Matrix others = rows_of(ct_hidden + own * gates, gates).transposed();
    gemm(threads, gates, s.hidden, later, others, rows_of(y + before * s.hidden, s.hidden), ct_r, s.hidden);
    const float* first = ct_hidden + (s.reverse ? later : 0) * gates;
    gemm(threads, gates, s.hidden, rows - later, rows_of(first, gates).transposed(), rows_of(h0, s.hidden), ct_r,
         s.hidden, true);
  }
  if (ct_b) {
    sum_rows(threads, ct_input, rows, gates, ct_b);
    if (ct_hidden == ct_input)
      std::copy(ct_b, ct_b + gates, ct_b + gates);
    else
      sum_rows(threads, ct_hidden, rows, gates, ct_b + gates);
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
