// Products of matrices, C = A B, in single precision.
//
// The heart is `tile`: tile_rows x tile_columns of C stay in registers while one column of A's rows and one row of B's
// columns after the other are multiplied into them. Each number of A is read from memory into all lanes, where it is
// (A needs no particular order, just some locality); B is packed into panels of tile_columns, [panel][depth][column], so
// that a panel streams from the L2 cache in order, while tile_rows of A, `depth_block` deep, stay in the L1 cache.
//
// All of C is cut into blocks, each of which is one thread's: sums are made in the same order whatever the number of
// threads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/scratch.h"
#include "core/simd.h"
#include "core/threads.h"
#include "core/transpose.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

using std::ptrdiff_t;
using std::size_t;

// 32 registers hold 24 sums, two vectors of B and a number of A; 16 registers hold 12.
constexpr size_t tile_rows = registers == 32 ? 12 : 6;
constexpr size_t tile_vectors = 2;
constexpr size_t tile_columns = tile_vectors * lanes;
constexpr size_t depth_block = 512;
// So many panels, 512 KB at most, stay in the L2 cache.
constexpr size_t panels_together = 8;
// Rows of B are fetched into the L1 cache so many rows before their turn: the processor alone fetches them too late.
constexpr ptrdiff_t rows_ahead = 12;

// How much of a depth is taken at once: of equal parts the first.
inline size_t part_of_depth(size_t depth) { return depth / std::max<size_t>(divided_up(depth, depth_block), 1); }

// An operand: element (i, j) is data[i * row + j * column]; transposed by exchanging the two.
struct Matrix {
  const float* data;
  ptrdiff_t row, column;

  const float* at(size_t i, size_t j) const {
    return data + static_cast<ptrdiff_t>(i) * row + static_cast<ptrdiff_t>(j) * column;
  }
  Matrix from(size_t i, size_t j) const { return {at(i, j), row, column}; }
  Matrix transposed() const { return {data, column, row}; }
};

inline Matrix rows_of(const float* data, size_t columns) { return {data, static_cast<ptrdiff_t>(columns), 1}; }

// How many floats `pack` writes for a matrix of these sizes.
inline size_t packed_size(size_t depth, size_t columns) { return depth * divided_up(columns, tile_columns) * tile_columns; }

// The largest power of two up to `most`, at least 1: so many parts are shared evenly by two or four threads.
inline size_t even_parts(size_t most) {
  size_t parts = 1;
  while (2 * parts <= most) parts *= 2;
  return parts;
}

// Copies one panel of B, whose columns behind the last are zeros.
inline void pack_panel(Matrix b, size_t depth, size_t columns, size_t panel, float* to) {
  const size_t first = panel * tile_columns, width = std::min(tile_columns, columns - first);
  const Matrix from = b.from(0, first);
  if (width == tile_columns && b.column == 1) {
    for (size_t k = 0; k < depth; ++k)
      for (size_t v = 0; v < tile_vectors; ++v) store(to + k * tile_columns + v * lanes, load(from.at(k, v * lanes)));
    return;
  }
  if (b.row == 1) {
    for (size_t j = 0; j < tile_columns; j += lanes) {
      const size_t count = std::min(lanes, width - std::min(width, j));
      transpose(from.at(0, j), b.column, static_cast<int64_t>(count), static_cast<int64_t>(depth), to + j, tile_columns);
    }
    return;
  }
  if (width < tile_columns) std::fill(to, to + depth * tile_columns, 0.f);
  for (size_t k = 0; k < depth; ++k)
    for (size_t j = 0; j < width; ++j) to[k * tile_columns + j] = *from.at(k, j);
}

// Packs B [depth, columns] into panels.
inline void pack(const Threads& threads, Matrix b, size_t depth, size_t columns, float* to) {
  const size_t panels = divided_up(columns, tile_columns), each = depth * tile_columns;
  threads.ranges(panels, divided_up(size_t{1} << 14, std::max<size_t>(each, 1)), [&](size_t begin, size_t end) {
    for (size_t panel = begin; panel < end; ++panel) pack_panel(b, depth, columns, panel, to + panel * each);
  });
}

// What is below zero becomes zero. Not by max(): what is no number stays.
inline vfloat rectified(vfloat x) { return select(x < vfloat{}, vfloat{}, x); }

// to [Rows][Vectors * lanes], whose rows are `stride` apart, (+)= A [Rows, depth] times so many vectors of a packed panel.
//
// `bias`, unless it is null, is added to each row; with `relu`, what is below zero then becomes zero.
//
// A function of its own, so that nothing else takes its registers: one pointer serves four rows. Its arguments are single
// numbers: a struct would be written to the stack in other pieces than it is read, which waits for all earlier stores.
template <size_t Rows, size_t Vectors>
__attribute__((noinline)) void multiply(const float* a, ptrdiff_t a_row, ptrdiff_t step, const float* __restrict panel,
                                        ptrdiff_t panel_row, size_t depth, float* __restrict to, size_t stride, bool add,
                                        const float* bias = nullptr, bool relu = false) {
  constexpr size_t pointers = divided_up(Rows, 4);
  vfloat sum[Rows][Vectors] = {};
  const float* from[pointers];
  const ptrdiff_t row[] = {0, a_row, 2 * a_row, 3 * a_row};
#pragma GCC unroll 4
  for (size_t p = 0; p < pointers; ++p) from[p] = a + static_cast<ptrdiff_t>(4 * p) * a_row;
  for (size_t k = 0; k < depth; ++k, panel += panel_row) {
    constexpr size_t line = 16;
#pragma GCC unroll 4
    for (size_t j = 0; j < Vectors * lanes; j += line) __builtin_prefetch(panel + rows_ahead * panel_row + j);
    vfloat b[Vectors];
#pragma GCC unroll 4
    for (size_t v = 0; v < Vectors; ++v) b[v] = load(panel + v * lanes);
#pragma GCC unroll 16
    for (size_t i = 0; i < Rows; ++i) {
      const vfloat x = splat(from[i / 4][row[i % 4]]);
#pragma GCC unroll 4
      for (size_t v = 0; v < Vectors; ++v) sum[i][v] += x * b[v];
    }
#pragma GCC unroll 4
    for (size_t p = 0; p < pointers; ++p) from[p] += step;
  }
  if (add) {
#pragma GCC unroll 16
    for (size_t i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (size_t v = 0; v < Vectors; ++v) sum[i][v] += load(to + i * stride + v * lanes);
  }
  if (bias) {
#pragma GCC unroll 4
    for (size_t v = 0; v < Vectors; ++v) {
      const vfloat b = load(bias + v * lanes);
#pragma GCC unroll 16
      for (size_t i = 0; i < Rows; ++i) sum[i][v] += b;
    }
  }
  if (relu) {
#pragma GCC unroll 16
    for (size_t i = 0; i < Rows; ++i)
#pragma GCC unroll 4
      for (size_t v = 0; v < Vectors; ++v) sum[i][v] = rectified(sum[i][v]);
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (size_t v = 0; v < Vectors; ++v) store(to + i * stride + v * lanes, sum[i][v]);
}

// Epilogues: what becomes of a vector of C once its sum is complete. (value, row, column, count) -> value.
struct AsItIs {
  vfloat operator()(vfloat value, size_t, size_t, size_t) const { return value; }
};

// A linear layer's: a number is added to each column; with `relu`, what is below zero then becomes zero.
struct Bias {
  const float* bias;
  bool relu;

  vfloat operator()(vfloat value, size_t, size_t column, size_t count) const {
    value += load_some(bias + column, count);
    return relu ? rectified(value) : value;
  }
};

// The epilogue for a part of C that begins at a column.
inline AsItIs from_column(AsItIs epilogue, size_t) { return epilogue; }
inline Bias from_column(Bias epilogue, size_t column) { return {epilogue.bias + column, epilogue.relu}; }
template <class Epilogue>
auto from_column(const Epilogue& epilogue, size_t column) {
  return [&epilogue, column](vfloat value, size_t i, size_t j, size_t count) { return epilogue(value, i, column + j, count); };
}

// What becomes of the sums: nothing but that they are stored in, or added to, C, whose rows are `stride` apart. A bias and a
// ReLU are `Bias`'s.
struct Into {
  float* c;
  size_t stride;
  bool add;
  const float* bias = nullptr;
  bool relu = false;

  void operator()(vfloat value, size_t row, size_t column, size_t count) const {
    float* const to = c + row * stride + column;
    if (add) value += load_some(to, count);
    if (bias) value = Bias{bias, relu}(value, row, column, count);
    store_some(to, value, count);
  }
};

// What becomes of the sums: out(value, row, column, count) stores `count` lanes of C from (row, column) on.
template <size_t Rows, size_t Vectors, class Out>
inline void tile(const Matrix& a, const float* panel, ptrdiff_t panel_row, size_t depth, size_t row, size_t column,
                 size_t width, Out& out) {
  if constexpr (std::is_same_v<std::remove_const_t<Out>, Into>) {
    if (width == Vectors * lanes)
      return multiply<Rows, Vectors>(a.data, a.row, a.column, panel, panel_row, depth, out.c + row * out.stride + column,
                                     out.stride, out.add, out.bias ? out.bias + column : nullptr, out.relu);
  }
  alignas(64) float sums[Rows * Vectors * lanes];
  multiply<Rows, Vectors>(a.data, a.row, a.column, panel, panel_row, depth, sums, Vectors * lanes, false);
  for (size_t i = 0; i < Rows; ++i)
    for (size_t v = 0; v < Vectors; ++v)
      out(load(sums + (i * Vectors + v) * lanes), row + i, column + v * lanes, std::min(lanes, width - v * lanes));
}

// A tile of at most tile_rows rows and of `width` columns, by the code for just so many.
template <size_t Rows = tile_rows, class Out>
inline void tile_of(
    size_t rows, const Matrix& a, const float* panel, ptrdiff_t panel_row, size_t depth, size_t row, size_t column,
    size_t width, Out& out) {
  if (rows == Rows) {
    if (width > lanes)
      tile<Rows, 2>(a, panel, panel_row, depth, row, column, width, out);
    else
      tile<Rows, 1>(a, panel, panel_row, depth, row, column, width, out);
  } else if constexpr (Rows > 1) {
    tile_of<Rows - 1>(rows, a, panel, panel_row, depth, row, column, width, out);
  }
}

// Where a tile's numbers lie far apart, or rows 4 KB apart, which share one place of the L1 cache, they are copied beside
// one another first.
inline bool crowds_cache(Matrix a) { return a.column != 1 || a.row % 1024 == 0; }

// Copies rows of A in strips of tile_rows, [strip][depth][row], that are `pitch` apart.
inline void copy_strips(Matrix a, size_t rows, size_t depth, float* to, size_t pitch) {
  const size_t whole = rows / tile_rows;
  if (a.row == 1) {
    for (size_t k = 0; k < depth; ++k) {
      const float* const from = a.at(0, k);
      for (size_t s = 0; s < whole; ++s)
        std::memcpy(to + s * pitch + k * tile_rows, from + s * tile_rows, tile_rows * sizeof(float));
      for (size_t r = whole * tile_rows; r < rows; ++r) to[whole * pitch + k * tile_rows + r % tile_rows] = from[r];
    }
  } else {
    for (size_t r = 0; r < rows; ++r)
      for (size_t k = 0; k < depth; ++k) to[r / tile_rows * pitch + k * tile_rows + r % tile_rows] = *a.at(r, k);
  }
}

// At most group_rows rows of A beside one another: those that lie in one piece as they are, and others in strips.
class CopiedRows {
 public:
  static constexpr size_t group_rows = 8 * tile_rows;

  CopiedRows(Matrix a, size_t rows, size_t depth, float* memory) : in_pieces_(a.column == 1), copy_(memory) {
    if (!in_pieces_) copy_strips(a, rows, depth, copy_, strip_pitch);
    for (size_t r = 0; in_pieces_ && r < rows; ++r) std::memcpy(copy_ + r * pitch, a.at(r, 0), depth * sizeof(float));
  }
  static float* memory() {
    thread_local Scratch own;
    return own.floats(group_rows * pitch);
  }
  // The rows from r, a multiple of tile_rows, on.
  Matrix from(size_t r) const {
    if (in_pieces_) return {copy_ + r * pitch, pitch, 1};
    return {copy_ + r / tile_rows * strip_pitch, 1, static_cast<ptrdiff_t>(tile_rows)};
  }

 private:
  static constexpr size_t pitch = depth_block + 16;  // so that no two rows share a place of the cache
  static constexpr size_t strip_pitch = tile_rows * pitch;
  bool in_pieces_;
  float* copy_;
};

// B in panels of tile_columns that are `distance` apart, and whose rows are `row` apart: packed, or a B as it is.
struct Panels {
  const float* data;
  size_t distance;
  ptrdiff_t row = tile_columns;

  const float* at(size_t k, size_t panel) const { return data + static_cast<ptrdiff_t>(k) * row + panel * distance; }
};

// A B of `depth` rows as `pack` writes it.
inline Panels packed_panels(const float* data, size_t depth) { return {data, depth * tile_columns}; }

// The product of rows of A and the panels [first, end) of B from row k on. A strip, in the L1 cache, goes over panels_together,
// and a group of strips over the same while they are in the L2 cache.
template <class Out>
inline void product_of_block(Matrix a, size_t rows, size_t k, size_t depth, Panels b, size_t first, size_t end,
                             size_t columns, Out&& out) {
  const bool copies = crowds_cache(a) && (end - first > 1 || a.row == 1);
  float* const memory = copies ? CopiedRows::memory() : nullptr;
  for (size_t i = 0; i < rows; i += CopiedRows::group_rows) {
    const size_t taken = std::min(CopiedRows::group_rows, rows - i);
    const CopiedRows copy(a.from(i, 0), copies ? taken : 0, depth, memory);
    for (size_t begin = first; begin < end; begin += panels_together)
      for (size_t r = 0; r < taken; r += tile_rows) {
        const Matrix own = copies ? copy.from(r) : a.from(i + r, 0);
        for (size_t panel = begin; panel < std::min(end, begin + panels_together); ++panel) {
          const size_t column = panel * tile_columns, width = std::min(tile_columns, columns - column);
          tile_of(std::min(tile_rows, taken - r), own, b.at(k, panel), b.row, depth, i + r, column, width, out);
        }
      }
  }
}

// C (+)= A [rows, depth] B for the panels [first, end) of B [depth, columns], on the calling thread. C's rows are `stride`
// apart; `row` is what the epilogue is told of the first one.
template <class Epilogue = AsItIs>
inline void gemm_block(size_t rows, size_t columns, size_t depth, Matrix a, Panels b, size_t first, size_t end, float* c,
                       size_t stride, bool add, size_t row = 0, Epilogue epilogue = {}) {
  size_t k = 0;
  do {
    const size_t deep = part_of_depth(depth - k);
    const bool more = add || k > 0, last = k + deep == depth;
    const auto finish = [&](vfloat value, size_t i, size_t column, size_t count) {
      float* to = c + i * stride + column;
      if (more) value += load_some(to, count);
      store_some(to, epilogue(value, row + i, column, count), count);
    };
    const auto product = [&](auto&& out) {
      product_of_block(a.from(0, k), rows, k, deep, b, first, end, columns, out);
    };
    if (std::is_same_v<Epilogue, AsItIs> || !last)
      product(Into{c, stride, more});
    else if constexpr (std::is_same_v<Epilogue, Bias>)
      product(Into{c, stride, more, epilogue.bias, epilogue.relu});
    else
      product(finish);
    k += deep;
  } while (k < depth);
}

// C [rows, columns] (+)= A [rows, depth] B [depth, columns], with B packed.
template <class Epilogue = AsItIs>
void gemm_packed(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, const float* packed,
                 float* c, size_t stride, bool add = false, Epilogue epilogue = {}) {
  if (rows == 0 || columns == 0) return;
  // Blocks of 512 columns keep their part of B in the L2 cache. Rows are cut rather than columns, as A may be copied for each
  // block of columns; columns, too, where rows give fewer than four blocks.
  const size_t panels = divided_up(columns, tile_columns), strips = divided_up(rows, tile_rows);
  const double work = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth);
  const size_t wanted = work < 1e5 ? 1 : static_cast<size_t>(std::clamp(work / 2e6, 2., 16.));
  size_t across = divided_up(columns, 512);
  const size_t down = even_parts(std::min({std::max<size_t>(strips / 4, 2), strips, divided_up(wanted, across)}));
  if (down * across < std::min<size_t>(wanted, 4)) across = std::min(panels, divided_up(std::min<size_t>(wanted, 4), down));
  threads.run(across * down, [&](size_t part) {
    const size_t i = part / across, j = part % across;
    const size_t row = strips * i / down * tile_rows, end = std::min(rows, strips * (i + 1) / down * tile_rows);
    gemm_block(end - row, columns, depth, a.from(row, 0), packed_panels(packed, depth), panels * j / across,
               panels * (j + 1) / across, c + row * stride, stride, add, row, epilogue);
  });
}

// Rows [row, end) of C, and its columns of the panels [first, last), on the calling thread, with a B that is not there as a
// whole: make(k, deep, first, last, to) writes rows [k, k + deep) of these panels, as `pack_panel` does.
template <class Make, class Epilogue>
void part_of_made(size_t row, size_t end, size_t first, size_t last, size_t columns, size_t depth, Matrix a, Make&& make,
                  float* c, size_t stride, bool add, const Epilogue& epilogue) {
  thread_local Scratch memory;
  const size_t column = first * tile_columns, width = std::min(columns, last * tile_columns) - column;
  float* const made = memory.floats(std::min(depth, depth_block) * (last - first) * tile_columns);
  size_t k = 0;
  do {
    const size_t deep = part_of_depth(depth - k);
    make(k, deep, first, last, made);
    const auto product = [&](auto then) {
      gemm_block(end - row, width, deep, a.from(row, k), packed_panels(made, deep), 0, last - first,
                 c + row * stride + column, stride, add || k > 0, row, then);
    };
    if (k + deep < depth)
      product(AsItIs());
    else
      product(from_column(epilogue, column));
    k += deep;
  } while (k < depth);
}

// The same for all of C. A thread makes a few panels at a time, in memory that stays in the L2 cache. Panels are made again
// for each part of the rows, which are therefore cut only where columns give too few parts.
template <class Make, class Epilogue = AsItIs>
void gemm_of_made(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Make&& make, float* c,
                  size_t stride, bool add = false, Epilogue epilogue = {}) {
  if (rows == 0 || columns == 0) return;
  constexpr size_t least_columns = 256, most_columns = 512, least_rows = 96;
  const size_t panels = divided_up(columns, tile_columns), strips = divided_up(rows, tile_rows);
  const double work = static_cast<double>(rows) * static_cast<double>(columns) * static_cast<double>(depth);
  const size_t wanted = work < 1e5 ? 1 : static_cast<size_t>(std::clamp(work / 2e6, 2., 16.));
  size_t across = std::max(std::min(wanted, columns / least_columns), divided_up(columns, most_columns));
  const size_t down = even_parts(std::min(divided_up(wanted, across), rows / least_rows));
  // Gradients of weights of a narrow layer are long sums for few rows and columns: narrower parts are better than one.
  if (down * across < std::min<size_t>(wanted, 4)) across = std::min(panels, divided_up(std::min<size_t>(wanted, 4), down));
  threads.run(across * down, [&](size_t part) {
    const size_t i = part % down, j = part / down;
    part_of_made(strips * i / down * tile_rows, std::min(rows, strips * (i + 1) / down * tile_rows), panels * j / across,
                 panels * (j + 1) / across, columns, depth, a, make, c, stride, add, epilogue);
  });
}

// The same with B as it is, for rows of A that are many beside the rows of B, which are packed so many at a time, once.
template <class Epilogue>
void gemm_packing_once(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c,
                       size_t stride, bool add, Epilogue epilogue) {
  thread_local Scratch memory;
  constexpr size_t most_rows = 4 * depth_block, most_columns = 64 * tile_columns;
  for (size_t column = 0; column < columns; column += most_columns) {
    const size_t wide = std::min(most_columns, columns - column);
    float* const packed = memory.floats(packed_size(std::min(depth, most_rows), wide));
    for (size_t k = 0; k == 0 || k < depth; k += most_rows) {
      const size_t deep = std::min(most_rows, depth - k);
      const auto product = [&](auto then) {
        gemm_packed(threads, rows, wide, deep, a.from(0, k), packed, c + column, stride, add || k > 0, then);
      };
      pack(threads, b.from(k, column), deep, wide, packed);
      if (k + deep == depth)
        product(from_column(epilogue, column));
      else
        product(AsItIs());
    }
  }
}

// Makes panels of a B that is there.
struct Packing {
  Matrix b;
  size_t columns;

  void operator()(size_t k, size_t deep, size_t first, size_t last, float* to) const {
    for (size_t panel = first; panel < last; ++panel, to += deep * tile_columns)
      pack_panel(b.from(k, 0), deep, columns, panel, to);
  }
};

// The same, each part packing what it needs of B.
template <class Epilogue>
void gemm_packing_parts(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c,
                        size_t stride, bool add, Epilogue epilogue) {
  gemm_of_made(threads, rows, columns, depth, a, Packing{b, columns}, c, stride, add, epilogue);
}

// The same for a single strip of A: packing B would take longer than the product.
template <class Epilogue>
void gemm_of_strip(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c,
                   size_t stride, bool add, Epilogue epilogue) {
  const Panels panels{b.data, tile_columns, b.row};
  const size_t whole = columns / tile_columns, least = 1 + (size_t{1} << 17) / (tile_columns * std::max<size_t>(depth, 1));
  threads.ranges(whole, least, [&](size_t begin, size_t end) {
    gemm_block(rows, columns, depth, a, panels, begin, end, c, stride, add, 0, epilogue);
  });
  const size_t done = whole * tile_columns;
  gemm_packing_parts(Threads(), rows, columns - done, depth, a, b.from(0, done), c + done, stride, add,
                     from_column(epilogue, done));
}

// The same for few rows of A.
template <class Epilogue>
void gemm_of_few_rows(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c,
                      size_t stride, bool add, Epilogue epilogue) {
  if (rows <= tile_rows && b.column == 1)
    gemm_of_strip(threads, rows, columns, depth, a, b, c, stride, add, epilogue);
  else
    gemm_packing_parts(threads, rows, columns, depth, a, b, c, stride, add, epilogue);
}

// The same for long sums that give few numbers, such as gradients of weights: the sums are cut into pieces, each of which is
// one thread's, which then reads every number once, in order.
template <class Epilogue>
void gemm_of_pieces(const Threads& threads, size_t pieces, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b,
                    float* c, size_t stride, bool add, Epilogue epilogue) {
  thread_local Scratch memory;
  constexpr size_t most_panels = 512 / tile_columns;
  const size_t each = rows * columns, panels = divided_up(columns, tile_columns);
  float* const sums = memory.floats(each * pieces);
  threads.run(pieces, [&](size_t piece) {
    const size_t k = depth * piece / pieces, deep = depth * (piece + 1) / pieces - k;
    const Matrix left = a.from(0, k), right = b.from(k, 0);
    float* const to = sums + each * piece;
    if (rows <= tile_rows && b.column == 1)
      return gemm_of_strip(Threads(), rows, columns, deep, left, right, to, columns, false, AsItIs());
    for (size_t panel = 0; panel < panels; panel += most_panels)
      part_of_made(0, rows, panel, std::min(panels, panel + most_panels), columns, deep, left, Packing{right, columns}, to,
                   columns, false, AsItIs());
  });
  threads.ranges(rows, divided_up(size_t{1} << 14, columns * pieces), [&](size_t begin, size_t end) {
    for (size_t i = begin; i < end; ++i)
      for (size_t j = 0; j < columns; j += lanes) {
        const size_t count = std::min(lanes, columns - j);
        const float* const from = sums + i * columns + j;
        vfloat sum = load_some(from, count);
        for (size_t piece = 1; piece < pieces; ++piece) sum += load_some(from + each * piece, count);
        float* const to = c + i * stride + j;
        if (add) sum += load_some(to, count);
        store_some(to, epilogue(sum, i, j, count), count);
      }
  });
}

// The same with B as it is.
template <class Epilogue = AsItIs>
void gemm(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c, size_t stride,
          bool add = false, Epilogue epilogue = {}) {
  constexpr size_t few = size_t{1} << 16, long_sum = 1024, least_piece = 384;
  if (rows == 0 || columns == 0) return;
  if (depth >= long_sum && rows * columns <= few) {
    const size_t pieces = even_parts(std::min<size_t>(depth / least_piece, 8));
    gemm_of_pieces(threads, pieces, rows, columns, depth, a, b, c, stride, add, epilogue);
  } else if (rows < (a.column == 1 ? 384 : 128)) {
    gemm_of_few_rows(threads, rows, columns, depth, a, b, c, stride, add, epilogue);
  } else {
    gemm_packing_once(threads, rows, columns, depth, a, b, c, stride, add, epilogue);
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
