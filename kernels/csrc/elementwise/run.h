// One run of an elementwise program.
#pragma once

#include <optional>
#include <vector>

#include "core/op.h"
#include "core/rows.h"
#include "elementwise/program.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {

constexpr std::size_t none = ~std::size_t{0};

// Where a value's elements of a block lie: those of each place, or one number.
struct Place {
  const float* data;
  bool fixed;
};

// An input that has another number for each block.
struct Varying {
  std::size_t value;
  const float* data;
  const bool* bools;  // instead
  Reading reading;
  std::optional<RowReading> rows;  // instead, if there are columns
  std::size_t slot;                // where it is gathered; none if it has the output's shape
};

struct Step {
  const Instruction* instruction;
  const Loops* loops;
  float* output;  // the whole output that it writes in place; null if it writes its slot
};

struct Returned {
  const Output* output;
  float* data;
  std::vector<float> apart;      // the data of a reduced output that lies in the memory of an input
  std::vector<double> partial;  // sums of the blocks of a long row

  bool is_reduced() const { return output->reduction != Reduction::None; }
  float* target() { return apart.empty() ? data : apart.data(); }
};

// One run of a program: what depends on the shapes of the inputs.
class Run {
 public:
  Run(const Program& program, Context& context);
  void compute(const Threads& threads);

 private:
  Shape shape_of(const Output& output) const;
  void read(std::size_t input, const Tensor<const float>& tensor, const bool* bools);
  void bound(const Bounds& bounds, std::vector<float>& pattern) const;
  void order();
  bool is_written_directly(const Returned& output, std::size_t writer) const;
  bool read_after_writing(const Returned& output, std::size_t writer) const;
  void keep_apart(Returned& output);
  void choose_blocks();
  void add_columns(const Threads& threads);
  void finish_rows();
  void finish_columns(Returned& returned, std::size_t place, const std::vector<std::vector<ColumnSums>>& sums) const;

  Place at(const Place* places, const Read& read) const {
    const Place place = places[read.value];
    return place.fixed ? place : Place{place.data + read.shift * inner_, false};
  }
  float* slot(float* memory, std::size_t slot) const { return memory + slot * stride_ + front_; }
  void block(std::size_t begin, std::size_t n, Place* places, float* memory, ColumnSums* sums);
  void gather(std::size_t begin, std::size_t n, Place* places, float* memory) const;
  void give(Returned& returned, std::size_t begin, std::size_t n, Place place) const;

  const Program& program_;
  Shape shape_;
  std::size_t elements_ = 0;
  std::ptrdiff_t inner_ = 0;    // elements per column
  std::size_t columns_row_ = 1;  // elements of a row of all columns
  std::size_t reduced_ = 1;     // elements that are reduced to one
  std::size_t slots_ = 0, cost_ = 0;
  std::size_t row_ = 0, block_ = 0, pieces_ = 0;  // blocks are pieces of rows
  std::size_t front_ = 0, stride_ = 0;            // of the memory of a slot
  std::vector<Place> places_;                     // of all values; fixed ones are there before blocks are
  std::vector<float> numbers_;
  std::vector<std::vector<float>> patterns_;  // masks of a block, of each of the bounds
  std::vector<Varying> varying_;
  std::vector<Step> steps_;
  std::vector<Returned> returned_;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
