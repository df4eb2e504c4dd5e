// Rows of a table that are read or written at one index each.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "core/op.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// How many numbers are worth a thread.
constexpr std::size_t least_of_thread = 1 << 15;

// Tables of `rows` rows of `width` numbers, and `reads` indices for each, or the same ones for all.
struct RowShape {
  std::size_t tables, rows, width, reads;
  bool shared;  // by all tables

  std::size_t numbers() const { return tables * rows * width; }
  std::size_t numbers_read() const { return tables * reads * width; }
};

// Indices that count from the end where they are negative.
class RowIndices {
 public:
  // Throws if an index is not one of the rows: nothing is read or written outside of the table.
  RowIndices(const int64_t* indices, std::size_t count, std::size_t rows)
      : indices_(indices), rows_(static_cast<int64_t>(rows)) {
    const uint64_t size = rows;
    bool outside = false;
    for (std::size_t i = 0; i < count; ++i) outside |= static_cast<uint64_t>(indices[i]) + size >= 2 * size;
    require(!outside, "an index is not one of the rows");
  }

  std::size_t operator[](std::size_t i) const {
    const int64_t index = indices_[i];
    return static_cast<std::size_t>(index + (index < 0 ? rows_ : 0));
  }
  RowIndices from(std::size_t first) const { return RowIndices(indices_ + first, rows_); }

 private:
  RowIndices(const int64_t* indices, int64_t rows) : indices_(indices), rows_(rows) {}

  const int64_t* indices_;
  int64_t rows_;
};

// A width that the compiler knows, for which loops over a row become a few instructions.
template <std::size_t value>
struct Fixed {
  constexpr operator std::size_t() const { return value; }
};

// Calls task(width) with the width as a constant where it is a usual small one.
template <class Task>
void with_width(std::size_t width, Task&& task) {
  switch (width) {
    case 1: return task(Fixed<1>());
    case 2: return task(Fixed<2>());
    case 3: return task(Fixed<3>());
    case 4: return task(Fixed<4>());
    case 8: return task(Fixed<8>());
    case 16: return task(Fixed<16>());
    case 32: return task(Fixed<32>());
    case 64: return task(Fixed<64>());
    default: return task(width);
  }
}

// How far ahead rows are fetched: those of a large table come from memory.
constexpr std::size_t rows_ahead = 12;

inline float select(bool where, float yes, float no) { return where ? yes : no; }

struct Assign {
  template <class V>
  V operator()(V, V update) const { return update; }
};
struct Sum {
  template <class V>
  V operator()(V old, V update) const { return old + update; }
};
// NaN is larger and smaller than all else, as in NumPy and PyTorch.
struct Largest {
  template <class V>
  V operator()(V old, V update) const { return select((old < update) | (update != update), update, old); }
};
struct Smallest {
  template <class V>
  V operator()(V old, V update) const { return select((update < old) | (update != update), update, old); }
};

// Reduces columns [begin, end) of updates into a table, in the order in which `order(i)` gives their numbers.
template <class Reduce, class Width, class Columns, class Order>
void reduce_rows(float* table, const float* updates, const RowIndices& indices, std::size_t count, Width width,
                 Order&& order, Reduce reduce, std::size_t begin, Columns columns) {
  for (std::size_t place = 0; place < count; ++place) {
    if (place + rows_ahead < count) {
      const char* next = reinterpret_cast<const char*>(table + indices[order(place + rows_ahead)] * width + begin);
      __builtin_prefetch(next, 1);
      if (columns * sizeof(float) > 64) __builtin_prefetch(next + 64, 1);
    }
    const std::size_t i = order(place);
    float* to = table + indices[i] * width + begin;
    const float* from = updates + i * width + begin;
    if constexpr (std::is_same_v<Columns, Fixed<1>>)
      *to = reduce(*to, *from);
    else
      vectors(columns, [&](std::size_t column, auto extent) {
        store(to + column, reduce(load(to + column, extent), load(from + column, extent)), extent);
      });
  }
}

// The numbers of the updates, sorted by ranges of 2 to the power of `shift` rows; each range in the given order.
struct SortedUpdates {
  std::vector<std::size_t> ends;
  std::vector<uint32_t> numbers;

  SortedUpdates(const RowIndices& indices, std::size_t count, std::size_t parts, unsigned shift)
      : ends(parts + 1), numbers(count) {
    for (std::size_t i = 0; i < count; ++i) ++ends[(indices[i] >> shift) + 1];
    for (std::size_t part = 0; part < parts; ++part) ends[part + 1] += ends[part];
    // `ends` are first where each part begins, and in the end where it ends.
    for (std::size_t i = 0; i < count; ++i) numbers[ends[indices[i] >> shift]++] = static_cast<uint32_t>(i);
  }
  std::size_t begin(std::size_t part) const { return part ? ends[part - 1] : 0; }
};

// Reduces rows of updates into tables. Every number is reduced in the order of the indices, whatever the threads: each
// part of the work owns tables, columns or a range of rows.
template <class Reduce>
void scatter_rows(const Threads& threads, const RowShape& shape, float* tables, const float* updates,
                  const RowIndices& indices, Reduce reduce) {
  const std::size_t size = shape.rows * shape.width, read = shape.reads * shape.width;
  const auto in_order = [](std::size_t i) { return i; };
  const auto at = [&](std::size_t table) { return shape.shared ? indices : indices.from(table * shape.reads); };
  const std::size_t parts = std::min<std::size_t>(shape.numbers_read() / least_of_thread, most_parts);
  // Blocks of columns, where there are few rows.
  const std::size_t blocks = shape.rows < 4 * parts ? std::min(parts, shape.width / 512) : 0;
  if (parts <= 1 || shape.tables >= 8 || (blocks <= 1 && (shape.width < 32 || shape.reads > UINT32_MAX))) {
    const std::size_t least = 1 + least_of_thread / std::max<std::size_t>(read, 1);
    threads.ranges(shape.tables, least, [&](std::size_t first, std::size_t last) {
      for (std::size_t table = first; table < last; ++table) {
        float* to = tables + table * size;
        with_width(shape.width, [&](auto width) {
          reduce_rows(to, updates + table * read, at(table), shape.reads, width, in_order, reduce, 0, width);
        });
      }
    });
  } else if (blocks > 1) {
    threads.run(shape.tables * blocks, [&](std::size_t part) {
      const std::size_t table = part / blocks, block = part % blocks;
      const std::size_t begin = shape.width * block / blocks / 16 * 16;
      const std::size_t end = block + 1 == blocks ? shape.width : shape.width * (block + 1) / blocks / 16 * 16;
      reduce_rows(tables + table * size, updates + table * read, at(table), shape.reads, shape.width, in_order, reduce,
                  begin, end - begin);
    });
  } else {
    unsigned shift = 0;
    while ((shape.rows >> shift) + 1 > parts) ++shift;
    const std::size_t ranges = (shape.rows >> shift) + 1;  // of which the last may have no rows
    for (std::size_t table = 0; table < shape.tables; ++table) {
      const SortedUpdates sorted(at(table), shape.reads, ranges, shift);
      threads.run(ranges, [&](std::size_t range) {
        const std::size_t begin = sorted.begin(range), own = sorted.ends[range] - begin;
        const auto order = [&](std::size_t place) { return std::size_t{sorted.numbers[begin + place]}; };
        float* to = tables + table * size;
        with_width(shape.width, [&](auto width) {
          reduce_rows(to, updates + table * read, at(table), own, width, order, reduce, 0, width);
        });
      });
    }
  }
}

// Copies the rows at the indices.
inline void gather_rows(const Threads& threads, const RowShape& shape, float* to, const float* tables,
                        const RowIndices& indices) {
  const std::size_t size = shape.rows * shape.width;
  const std::size_t least = 1 + least_of_thread / std::max<std::size_t>(shape.width, 1);
  threads.ranges(shape.tables * shape.reads, least, [&](std::size_t first, std::size_t last) {
    while (first < last) {
      const std::size_t table = first / shape.reads, begin = first % shape.reads;
      const std::size_t end = std::min(shape.reads, begin + last - first);
      const RowIndices own = shape.shared ? indices : indices.from(table * shape.reads);
      const float* from = tables + table * size;
      with_width(shape.width, [&](auto width) {
        for (std::size_t i = begin; i < end; ++i) {
          if (i + rows_ahead < end) __builtin_prefetch(from + own[i + rows_ahead] * width);
          std::memcpy(to + (first - begin + i) * width, from + own[i] * width, width * sizeof(float));
        }
      });
      first += end - begin;
    }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
