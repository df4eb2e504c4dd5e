// How inputs are read, and outputs are written, by programs whose values have the shape to which the inputs broadcast.
#pragma once

#include <cstdint>
#include <vector>

#include "core/op.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {

// An input as the output's elements read it, in row-major order: axes from the last one, along which the input moves on or
// stays. Axes of size 1 are left out, and no two neighbours are of the same kind.
struct Reading {
  struct Axis {
    std::size_t size;
    bool moves;
  };
  std::vector<Axis> axes;

  bool one_number() const { return axes.empty() || (axes.size() == 1 && !axes[0].moves); }
  bool in_place() const { return axes.size() == 1 && axes[0].moves; }
  // How many elements lie side by side in the input, or are the same number.
  std::size_t run() const { return axes.empty() ? 1 : axes[0].size; }
  // The place in the input of the first element of a run.
  std::size_t place(std::size_t run) const;
  // Writes elements [begin, begin + n) of the output's shape. Up to a vector behind them may be written, too.
  void gather(const float* from, std::size_t begin, std::size_t n, float* to) const;
};

Reading reading(const Shape& input, const Shape& output);

// The axis along which sizes differ, counted from the end: 1 is the last one. Values have `width` columns along it, of
// which inputs and outputs may have fewer. 0 if there is no such axis.
struct Columns {
  std::size_t axis = 0, width = 0;
};

// The shape to which the shapes of tensors broadcast; along the axis of columns its size is their width.
Shape broadcast(const std::vector<Tensor<const float>>& tensors, const Columns& columns);

// An input whose size along the axis of columns is its own, as rows of all columns. Column j is the input's column
// j + offset, and 0 where there is none.
class RowReading {
 public:
  RowReading(const Shape& input, const Shape& output, const Columns& columns, int64_t offset);

  // Whether the input has the elements of the output's shape.
  bool in_place() const { return kind_ == Kind::Copy && length_ == row_ && stride_ == row_ && outer_.in_place(); }
  // Whether each of the output's rows reads its own.
  bool has_each_row() const { return outer_.in_place(); }
  // Writes `count` rows from `first` on. Up to a vector behind them may be written, too.
  void gather(const float* from, std::size_t first, std::size_t count, float* to) const;

 private:
  enum class Kind { Fill, Copy, Table };

  // The input's element at a place of a row, -1 for 0.
  static int64_t source(std::size_t place, const Shape& own, const Shape& output, std::size_t moving, int64_t offset);
  void write(const float* from, float* to) const;

  Reading outer_;
  Kind kind_ = Kind::Copy;
  std::size_t row_;         // elements of a row
  std::size_t stride_ = 1;  // the input's elements per row
  // Of a copy: the zeros in front, and the elements from `start_` on.
  std::size_t lead_ = 0, start_ = 0, length_ = 0;
  std::vector<int64_t> table_;  // the element at each place
};

// Writes the first `kept` elements of each of `count` rows. A vector behind the rows may be read.
void write_rows(const float* from, std::size_t row, std::size_t kept, std::size_t count, float* to);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
