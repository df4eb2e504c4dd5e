#include "product/pairs.h"

#include <algorithm>
#include <stdexcept>

#if defined(HAS_PAIRS)
#include "core/transpose.h"
#include "processor.h"
#endif

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

// Rows that lie in one piece are a cache line further apart than they need to be, lest they share places in the cache.
size_t row_words(size_t depth) { return divided_up(pairs_of(depth), 16) * 16 + 16; }
size_t strip_words(size_t depth) { return pairs_of(depth) * tile_rows + 16; }

}  // namespace

PairRows PairRows::of(Matrix a, size_t depth, uint32_t* data) {
  if (a.column == 1) return {data, row_words(depth) * tile_rows, row_words(depth), 1};
  return {data, strip_words(depth), 1, tile_rows};
}

size_t PairRows::words(size_t rows, size_t depth) {
  return divided_up(rows, tile_rows) * std::max(row_words(depth) * tile_rows, strip_words(depth));
}

#if defined(HAS_PAIRS)

namespace {

inline size_t beyond(size_t end, size_t begin) { return end > begin ? end - begin : 0; }

// Rows that are read in turn often lie pages apart, where the processor foresees nothing: this many ahead are asked for.
constexpr ptrdiff_t rows_ahead = 4;

// Asks for what lies as far behind two rows as the next but one pair of them.
inline void foresee(const float* even, ptrdiff_t row) {
  _mm_prefetch(reinterpret_cast<const char*>(even + rows_ahead * row), _MM_HINT_T0);
  _mm_prefetch(reinterpret_cast<const char*>(even + (rows_ahead + 1) * row), _MM_HINT_T0);
}

// Copies columns that lie apart in every direction; seldom needed.
Matrix gathered(Matrix from, size_t rows, size_t columns, float* to) {
  for (size_t i = 0; i < rows; ++i)
    for (size_t j = 0; j < columns; ++j) to[i * columns + j] = *from.at(i, j);
  return rows_of(to, columns);
}

WITH_PAIRS void pack_rows_along(Matrix a, size_t begin, size_t end, size_t depth, const PairRows& to) {
  for (size_t i = begin; i < end; ++i) {
    uint32_t* const at = to.data + i / tile_rows * to.strip + i % tile_rows * to.row;
    for (size_t k = 0; k < depth; k += 32) _mm512_storeu_si512(at + k / 2, along(a.at(i, k), depth - k));
  }
}

// Rows that are columns in memory: sixteen at once, which are four times a third of a strip.
WITH_PAIRS void pack_rows_across(Matrix a, size_t begin, size_t end, size_t depth, const PairRows& to) {
  static_assert(tile_rows % 4 == 0, "four rows lie in one strip");
  for (size_t k = 0; k < depth; k += 2) {
    const float *even = a.at(0, k), *odd = k + 1 < depth ? a.at(0, k + 1) : nullptr;
    for (size_t i = begin; i < end; i += 16) {
      if (k + static_cast<size_t>(rows_ahead) + 1 < depth) foresee(even + i, a.column);
      const __m512i words = across(even + i, odd ? odd + i : nullptr, end - i);
      // With masks, as GCC 12 warns of the plain ones.
      const __m128i parts[] = {
          _mm512_maskz_extracti32x4_epi32(15, words, 0), _mm512_maskz_extracti32x4_epi32(15, words, 1),
          _mm512_maskz_extracti32x4_epi32(15, words, 2), _mm512_maskz_extracti32x4_epi32(15, words, 3)};
#pragma GCC unroll 4
      for (size_t part = 0; part < 4; ++part) {
        const size_t row = i + 4 * part;
        uint32_t* const at = to.data + row / tile_rows * to.strip + k / 2 * to.step + row % tile_rows;
        if (row < end) _mm_storeu_si128(reinterpret_cast<__m128i*>(at), parts[part]);
      }
    }
  }
}

// A panel whose columns are rows in memory: 16 of them by 32 numbers at once.
WITH_PAIRS void pack_panel_along(Matrix b, size_t depth, size_t columns, uint32_t* to) {
  for (size_t j = 0; j < tile_columns; j += lanes)
    for (size_t k = 0; k < depth; k += 32) {
      vfloat words[lanes];
#pragma GCC unroll 16
      for (size_t c = 0; c < lanes; ++c)
        words[c] = j + c < columns ? (vfloat)along(b.at(k, j + c), depth - k) : vfloat{};
      detail::turn(words);
      const size_t count = std::min(lanes, pairs_of(depth - k));
      for (size_t p = 0; p < count; ++p)
        store(reinterpret_cast<float*>(to + (k / 2 + p) * tile_columns + j), words[p]);
    }
}

// A group of panels whose rows are rows in memory, which are read in one piece.
WITH_PAIRS void pack_panels_across(Matrix b, size_t depth, size_t columns, uint32_t* to) {
  const size_t panel = pairs_of(depth) * tile_columns, width = divided_up(columns, tile_columns) * tile_columns;
  for (size_t k = 0; k < depth; k += 2) {
    const float *even = b.at(k, 0), *odd = k + 1 < depth ? b.at(k + 1, 0) : nullptr;
    for (size_t j = 0; j < width; j += lanes) {
      if (k + static_cast<size_t>(rows_ahead) + 1 < depth && j < columns) foresee(even + j, b.row);
      _mm512_storeu_si512(to + j / tile_columns * panel + k / 2 * tile_columns + j % tile_columns,
                          across(even + j, odd ? odd + j : nullptr, beyond(columns, j)));
    }
  }
}

// A function of its own, so that nothing else takes its registers: one pointer serves four rows.
template <size_t Rows, size_t Vectors>
WITH_PAIRS __attribute__((noinline)) void multiply_tile(const uint32_t* a, size_t row, size_t step, const uint32_t* panel,
                                                       size_t pairs, float* sums) {
  constexpr size_t pointers = divided_up(Rows, 4);
  __m512 sum[Rows][Vectors];
  const uint32_t* from[pointers];
  const size_t place[] = {0, row, 2 * row, 3 * row};
#pragma GCC unroll 4
  for (size_t p = 0; p < pointers; ++p) from[p] = a + 4 * p * row;
#pragma GCC unroll 16
  for (size_t i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (size_t v = 0; v < Vectors; ++v) sum[i][v] = _mm512_setzero_ps();
  for (size_t k = 0; k < pairs; ++k, panel += tile_columns) {
    __m512i b[Vectors];
#pragma GCC unroll 4
    for (size_t v = 0; v < Vectors; ++v) b[v] = _mm512_loadu_si512(panel + v * lanes);
#pragma GCC unroll 16
    for (size_t i = 0; i < Rows; ++i) {
      const __m512i x = _mm512_set1_epi32(static_cast<int>(from[i / 4][place[i % 4]]));
#pragma GCC unroll 4
      for (size_t v = 0; v < Vectors; ++v) sum[i][v] = _mm512_dpbf16_ps(sum[i][v], (__m512bh)x, (__m512bh)b[v]);
    }
#pragma GCC unroll 4
    for (size_t p = 0; p < pointers; ++p) from[p] += step;
  }
#pragma GCC unroll 16
  for (size_t i = 0; i < Rows; ++i)
#pragma GCC unroll 4
    for (size_t v = 0; v < Vectors; ++v) _mm512_storeu_ps(sums + (i * Vectors + v) * lanes, sum[i][v]);
}

template <size_t Rows = tile_rows, class... Arguments>
void multiply_rows(size_t rows, size_t vectors, Arguments... arguments) {
  if (rows == Rows) {
    if (vectors > 1)
      multiply_tile<Rows, 2>(arguments...);
    else
      multiply_tile<Rows, 1>(arguments...);
  } else if constexpr (Rows > 1) {
    multiply_rows<Rows - 1>(rows, vectors, arguments...);
  }
}

}  // namespace

bool pairs_supported() {
  static const bool supported = has_avx512_bf16();
  return supported;
}

void pack_pair_rows(Matrix a, size_t rows, size_t depth, size_t first, size_t end, const PairRows& to) {
  const size_t begin = first * tile_rows, last = std::min(rows, end * tile_rows);
  if (a.column == 1) return pack_rows_along(a, begin, last, depth, to);
  if (a.row == 1) return pack_rows_across(a, begin, last, depth, to);
  const Buffer copy((last - begin) * depth);
  const Matrix turned = gathered(a.from(begin, 0).transposed(), depth, last - begin, copy.data()).transposed();
  PairRows part = to;
  part.data += first * to.strip;
  pack_rows_across(turned, 0, last - begin, depth, part);
}

void pack_pair_panels(Matrix b, size_t depth, size_t columns, uint32_t* to) {
  if (b.column == 1) return pack_panels_across(b, depth, columns, to);
  if (b.row == 1) {
    for (size_t j = 0; j < columns; j += tile_columns)
      pack_panel_along(b.from(0, j), depth, columns - j, to + j * pairs_of(depth));
    return;
  }
  const Buffer copy(depth * columns);
  pack_panels_across(gathered(b, depth, columns, copy.data()), depth, columns, to);
}

void multiply_pairs(size_t rows, size_t vectors, const PairRows& a, size_t strip, const uint32_t* panel, size_t pairs,
                    float* sums) {
  multiply_rows(rows, vectors, a.data + strip * a.strip, a.row, a.step, panel, pairs, sums);
}

#else

namespace {
[[noreturn]] void refuse() { throw std::logic_error("this processor has no products of bfloat16"); }
}  // namespace

bool pairs_supported() { return false; }
void pack_pair_rows(Matrix, size_t, size_t, size_t, size_t, const PairRows&) { refuse(); }
void pack_pair_panels(Matrix, size_t, size_t, uint32_t*) { refuse(); }
void multiply_pairs(size_t, size_t, const PairRows&, size_t, const uint32_t*, size_t, float*) { refuse(); }

#endif

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
