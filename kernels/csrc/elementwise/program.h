// A program of elementwise operations as the attributes of a node give it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "core/op.h"
#include "elementwise/operations.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {

struct Instruction {
  const Operation* operation;
  std::size_t operands[3];  // numbers of values; Program::values() where absent
  std::size_t result;
  std::size_t slot;  // the block buffer of the result
};

// Values are numbered: inputs, constants, and results of instructions, in this order.
class Program {
 public:
  static constexpr std::size_t most_inputs = 16, most_outputs = 8, most_constants = 256, most_instructions = 256;

  explicit Program(const Attributes& attributes);

  std::size_t inputs() const { return inputs_; }
  std::size_t values() const { return values_; }
  std::size_t slots() const { return slots_; }
  const std::vector<float>& constants() const { return constants_; }
  // The value that each output returns.
  const std::vector<std::size_t>& outputs() const { return outputs_; }
  // Those that an output depends on, some of them two in one.
  const std::vector<Instruction>& instructions() const { return instructions_; }

 private:
  void remove_unread();
  void join_pairs();
  void assign_slots();

  std::size_t inputs_ = 0, values_ = 0, slots_ = 0;
  std::vector<float> constants_;
  std::vector<std::size_t> outputs_;
  std::vector<Instruction> instructions_;
};

// What computes the powers of one exponent, as Pow does: faster where there is a formula.
const Operation& power_of(float exponent);

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

// The shape to which the shapes of tensors broadcast.
Shape broadcast(const std::vector<Tensor<const float>>& tensors);
Reading reading(const Shape& input, const Shape& output);

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
