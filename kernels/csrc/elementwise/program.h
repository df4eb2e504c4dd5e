// A program of elementwise operations as the attributes of a node give it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/op.h"
#include "elementwise/operations.h"
#include "elementwise/reading.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {

// A value that is read, or another one's columns to the right of it.
struct Read {
  std::size_t value;
  std::ptrdiff_t shift;
};

struct Instruction {
  const Operation* operation;
  Read operands[3];  // numbers of values; Program::values() where absent, windows behind it
  std::size_t result;
  std::size_t slot;  // the block buffer of the result
};

// The columns of a value that a bounded window reads; it is 0 elsewhere.
struct Bounds {
  int64_t offset, size;
};

// Max and Min are NaN if one of the numbers is, and never -0.
enum class Reduction : uint8_t { None, Sum, Mean, Max, Min };
inline bool is_sum(Reduction of) { return of == Reduction::Sum || of == Reduction::Mean; }
// The reduction of no numbers.
inline float of_nothing(Reduction of) {
  constexpr float infinite = __builtin_inff();
  return of == Reduction::Mean ? __builtin_nanf("") : of == Reduction::Max ? -infinite : of == Reduction::Min ? infinite : 0.f;
}

struct Output {
  Read from;
  std::size_t columns;  // its size along the axis of columns
  Reduction reduction;
  bool keeps_axes;
};

// Values are numbered: inputs, constants, and results of instructions, in this order. The last inputs may be bool tensors
// of the results' shape, whose elements the program reads as 1 and 0.
class Program {
 public:
  static constexpr std::size_t most_inputs = 16, most_bools = 4, most_outputs = 8, most_constants = 256,
                               most_instructions = 256;
  static constexpr std::size_t most_columns = 4096;

  explicit Program(const Attributes& attributes);

  std::size_t inputs() const { return inputs_; }
  bool is_bool(std::size_t input) const { return input >= inputs_ - bools_; }
  // Which input of the node it is.
  std::size_t place(std::size_t input) const { return is_bool(input) ? most_inputs + input - (inputs_ - bools_) : input; }
  std::size_t values() const { return values_; }
  std::size_t slots() const { return slots_; }
  const std::vector<float>& constants() const { return constants_; }
  const std::vector<Output>& outputs() const { return outputs_; }
  const Columns& columns() const { return columns_; }
  // By how many columns an input is moved to the left.
  int64_t offset(std::size_t input) const { return offsets_.empty() ? 0 : offsets_[input]; }
  const std::vector<Bounds>& bounds() const { return bounds_; }
  // How many columns in front of a block and behind it are read.
  std::size_t columns_before() const { return before_; }
  std::size_t columns_behind() const { return behind_; }
  // Whether an instruction or an output reads other columns of a value.
  bool is_moved(std::size_t value) const { return moved_[value]; }
  // The axes that are reduced: so many of the last ones, or of the first ones.
  std::size_t last_axes() const { return last_axes_; }
  std::size_t first_axes() const { return first_axes_; }
  // Those that an output depends on, some of them two in one.
  const std::vector<Instruction>& instructions() const { return instructions_; }

 private:
  void read_columns(const Attributes& attributes);
  void read_instructions(const std::vector<int64_t>& code);
  void add_window(const int64_t* four, const std::string& where);
  void read_outputs(const Attributes& attributes);
  void read_reductions(const std::vector<int64_t>& numbers);
  void remove_unread();
  void join_pairs();
  void find_moved();
  void assign_slots();

  std::size_t inputs_ = 0, bools_ = 0, values_ = 0, slots_ = 0;
  Columns columns_;
  std::vector<int64_t> offsets_;
  std::vector<Bounds> bounds_;
  std::size_t before_ = 0, behind_ = 0, last_axes_ = 0, first_axes_ = 0;
  std::vector<bool> moved_;
  std::vector<float> constants_;
  std::vector<Kind> kinds_;   // of each value
  std::vector<Read> places_;  // where each value lies: its own, or that of which it is columns
  std::vector<Output> outputs_;
  std::vector<Instruction> instructions_;
};

// What computes the powers of one exponent, as Pow does: faster where there is a formula.
const Operation& power_of(float exponent);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
