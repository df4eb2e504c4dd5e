#include "product/bfloat16.h"

#include <algorithm>

#include "core/scratch.h"
#include "product/pairs.h"
#include "product/rounding.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

// A block of A, packed, stays in the second- and third-level caches while panels of B go over it; a group of panels
// stays in the second-level cache while strips of A go over it.
constexpr size_t block_rows = 1024, block_depth = 1024, most_panels = 4;

struct Job {
  size_t rows, columns, depth;
  Matrix a, b;
  float* c;
  float alpha;
  const Summand& summand;
};

// The epilogue: a vector of sums over the last block of the depth becomes one of C.
inline vfloat finished(const Job& job, vfloat sum, size_t i, size_t j, size_t count) {
  sum *= job.alpha;
  const Summand& more = job.summand;
  if (more.data == nullptr) return sum;
  const float* from = more.data + static_cast<ptrdiff_t>(i) * more.row + static_cast<ptrdiff_t>(j) * more.column;
  return sum + (more.column == 0 ? splat(*from) : load_some(from, count)) * more.factor;
}

// Adds A's packed strips [first, end) times a packed group of panels to C, whose columns start at `column`.
void multiply_group(const Job& job, const PairRows& a, size_t row0, size_t rows, size_t first, size_t end,
                    const uint32_t* panels, size_t column, size_t columns, size_t pairs, bool more, bool last) {
  alignas(64) float sums[tile_rows * tile_columns];
  for (size_t strip = first; strip < end; ++strip) {
    const size_t height = std::min(tile_rows, rows - strip * tile_rows);
    for (size_t j = 0; j < columns; j += tile_columns) {
      const size_t width = std::min(tile_columns, columns - j), vectors = divided_up(width, lanes);
      multiply_pairs(height, vectors, a, strip, panels + j * pairs, pairs, sums);
      for (size_t r = 0; r < height; ++r)
        for (size_t v = 0; v < vectors; ++v) {
          const size_t i = row0 + strip * tile_rows + r, at = column + j + v * lanes;
          const size_t count = std::min(lanes, width - v * lanes);
          float* const to = job.c + i * job.columns + at;
          vfloat sum = load(sums + (r * vectors + v) * lanes);
          if (more) sum += load_some(to, count);
          store_some(to, last ? finished(job, sum, i, at, count) : sum, count);
        }
    }
  }
}

// The part of the product that takes `depth` from k0 on, for a block of rows.
void multiply_block(const Threads& threads, const Job& job, size_t row0, size_t rows, size_t k0, size_t depth) {
  thread_local Scratch row_memory;
  const size_t strips = divided_up(rows, tile_rows), panels = divided_up(job.columns, tile_columns);
  const size_t pairs = pairs_of(depth);
  const Matrix a = job.a.from(row0, k0);
  const PairRows packed =
      PairRows::of(a, depth, reinterpret_cast<uint32_t*>(row_memory.floats(PairRows::words(rows, depth))));
  threads.ranges(strips, 1 + (size_t{1} << 16) / (tile_rows * depth + 1),
                 [&](size_t first, size_t end) { pack_pair_rows(a, rows, depth, first, end, packed); });
  const double work = static_cast<double>(rows) * static_cast<double>(job.columns) * static_cast<double>(depth);
  // Panels are packed once for each part of the rows, which are many or few enough not to matter.
  const size_t wanted = work < 1e6 ? 1 : static_cast<size_t>(std::clamp(work / 1e7, 4., 32.));
  const size_t groups = std::max(divided_up(panels, most_panels), std::min<size_t>({panels, wanted, 8}));
  const size_t most = groups < 4 ? divided_up(strips, 4) : std::max<size_t>(strips / 20, 1);
  const size_t down = std::clamp<size_t>(divided_up(wanted, groups), 1, most);
  threads.run(groups * down, [&](size_t part) {
    thread_local Scratch panel_memory;
    const size_t group = part / down, across = part % down;
    const size_t column = panels * group / groups * tile_columns;
    const size_t columns = std::min(job.columns, panels * (group + 1) / groups * tile_columns) - column;
    const size_t words = divided_up(columns, tile_columns) * tile_columns * pairs;
    auto* const memory = reinterpret_cast<uint32_t*>(panel_memory.floats(words));
    pack_pair_panels(job.b.from(k0, column), depth, columns, memory);
    multiply_group(job, packed, row0, rows, strips * across / down, strips * (across + 1) / down, memory, column, columns,
                   pairs, k0 > 0, k0 + depth == job.depth);
  });
}

// Copies a matrix as rows of rounded numbers.
Matrix rounded_copy(const Threads& threads, Matrix from, size_t rows, size_t columns, float* to) {
  if (from.column != 1 && from.row == 1) return rounded_copy(threads, from.transposed(), columns, rows, to).transposed();
  threads.ranges(rows, 1 + (size_t{1} << 15) / (columns + 1), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i) {
      float* const row = to + i * columns;
      if (from.column != 1)
        for (size_t j = 0; j < columns; ++j) row[j] = *from.at(i, j);
      const float* const source = from.column == 1 ? from.at(i, 0) : row;
      for (size_t j = 0; j < columns; j += lanes) {
        const size_t count = std::min(lanes, columns - j);
        store_some(row + j, rounded_to_bfloat16(load_some(source + j, count)), count);
      }
    }
  });
  return rows_of(to, columns);
}

// In float32 with factors that are rounded, where the processor has nothing for bfloat16.
void product_of_rounded(const Threads& threads, const Job& job) {
  const Buffer a(job.rows * job.depth), b(job.depth * job.columns);
  const Matrix left = rounded_copy(threads, job.a, job.rows, job.depth, a.data());
  const Matrix right = rounded_copy(threads, job.b, job.depth, job.columns, b.data());
  gemm(threads, job.rows, job.columns, job.depth, left, right, job.c, job.columns, false,
       [&](vfloat sum, size_t i, size_t j, size_t count) { return finished(job, sum, i, j, count); });
}

// Where there is one row, or one term of each sum, each number is read once: packing it would cost more than all else.

constexpr size_t row_vectors = 8;

// Columns [begin, end) of a product of one row, whose factor is rounded: each column in one piece, or each row of B.
void row_times_columns(const Job& job, const float* row, size_t begin, size_t end) {
  for (size_t j = begin; j < end; j += lanes) {
    const size_t count = std::min(lanes, end - j);
    alignas(64) float sums[lanes] = {};
    for (size_t c = 0; c < count; ++c) {
      const float* const column = job.b.at(0, j + c);
      vfloat sum[4] = {};
      size_t k = 0;
      for (; k + 4 * lanes <= job.depth; k += 4 * lanes)
        for (size_t v = 0; v < 4; ++v)
          sum[v] += load(row + k + v * lanes) * rounded_to_bfloat16(load(column + k + v * lanes));
      for (; k < job.depth; k += lanes) {
        const size_t some = std::min(lanes, job.depth - k);
        sum[0] += load_some(row + k, some) * rounded_to_bfloat16(load_some(column + k, some));
      }
      sums[c] = onnxtrain::ONNXTRAIN_LEVEL::sum((sum[0] + sum[1]) + (sum[2] + sum[3]));
    }
    store_some(job.c + j, finished(job, load(sums), 0, j, count), count);
  }
}

void row_times_rows(const Job& job, const float* row, size_t begin, size_t end) {
  for (size_t j = begin; j < end; j += row_vectors * lanes) {
    const size_t width = std::min(row_vectors * lanes, end - j), whole = width / lanes;
    vfloat sums[row_vectors] = {};
    for (size_t k = 0; k < job.depth; ++k) {
      const float* const from = job.b.at(k, j);
      for (size_t v = 0; v < whole; ++v) sums[v] += row[k] * rounded_to_bfloat16(load(from + v * lanes));
      if (whole * lanes < width)
        sums[whole] += row[k] * rounded_to_bfloat16(load(from + whole * lanes, width - whole * lanes));
    }
    for (size_t v = 0; v * lanes < width; ++v) {
      const size_t count = std::min(lanes, width - v * lanes);
      store_some(job.c + j + v * lanes, finished(job, sums[v], 0, j + v * lanes, count), count);
    }
  }
}

void product_of_row(const Threads& threads, const Job& job) {
  thread_local Scratch memory;
  float* const row = memory.floats(job.depth);
  rounded_copy(Threads(), job.a, 1, job.depth, row);
  const size_t blocks = divided_up(job.columns, row_vectors * lanes);
  threads.ranges(blocks, 1 + (size_t{1} << 15) / (job.depth * row_vectors * lanes), [&](size_t begin, size_t end) {
    const size_t first = begin * row_vectors * lanes, last = std::min(job.columns, end * row_vectors * lanes);
    if (job.b.row == 1)
      row_times_columns(job, row, first, last);
    else
      row_times_rows(job, row, first, last);
  });
}

// C = a bᵀ of two vectors.
void outer_product(const Threads& threads, const Job& job) {
  thread_local Scratch memory;
  float* const left = memory.floats(job.rows + lanes + job.columns);
  float* const right = left + divided_up(job.rows, lanes) * lanes;
  rounded_copy(Threads(), job.a.transposed(), 1, job.rows, left);
  rounded_copy(Threads(), job.b, 1, job.columns, right);
  threads.ranges(job.rows, 1 + (size_t{1} << 15) / job.columns, [&](size_t begin, size_t end) {
    const size_t columns = job.columns;
    const size_t whole = job.alpha == 1 && job.summand.data == nullptr ? columns / lanes * lanes : 0;
    for (size_t i = begin; i < end; ++i) {
      float* const to = job.c + i * columns;
      const float factor = left[i];
      for (size_t j = 0; j < whole; j += lanes) store(to + j, factor * load(right + j));
      for (size_t j = whole; j < columns; j += lanes) {
        const size_t count = std::min(lanes, columns - j);
        store_some(to + j, finished(job, factor * load_some(right + j, count), i, j, count), count);
      }
    }
  });
}

}  // namespace

void product_in_bfloat16(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c,
                         float alpha, const Summand& summand) {
  if (rows == 0 || columns == 0) return;
  if (columns == 1 && rows > 1) {  // a column is as well a row
    return product_in_bfloat16(threads, 1, rows, depth, b.transposed(), a.transposed(), c, alpha,
                               {summand.data, summand.column, summand.row, summand.factor});
  }
  const Job job{rows, columns, depth, a, b, c, alpha, summand};
  if (depth == 1) return outer_product(threads, job);
  if (rows == 1 && depth > 0 && (b.row == 1 || b.column == 1)) return product_of_row(threads, job);
  if (!pairs_supported()) return product_of_rounded(threads, job);
  const size_t down = divided_up(rows, block_rows), deep = std::max<size_t>(divided_up(depth, block_depth), 1);
  const size_t strips = divided_up(rows, tile_rows), pairs = pairs_of(depth);
  for (size_t i = 0; i < down; ++i)
    for (size_t k = 0; k < deep; ++k) {
      const size_t row0 = strips * i / down * tile_rows, end = std::min(rows, strips * (i + 1) / down * tile_rows);
      const size_t k0 = 2 * (pairs * k / deep), k1 = std::min(depth, 2 * (pairs * (k + 1) / deep));
      multiply_block(threads, job, row0, end - row0, k0, k1 - k0);
    }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
