#include "elementwise/program.h"

#include <algorithm>
#include <cstring>

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {
namespace {

constexpr std::size_t operation_count = std::size(table), never = ~std::size_t{0};

// What a program must satisfy.
void demand(bool holds, const std::string& message) {
  if (!holds) throw std::invalid_argument(message);
}

// Two operations in one loop, which loads and stores less: (a first b) second c, or c second (a first b).
template <class First, class Second, bool swapped>
struct Pair {
  static constexpr std::size_t operands = 3;
  static vfloat apply(vfloat a, vfloat b, vfloat c) {
    const vfloat inner = rounded(First::apply(a, b, vfloat{}));
    return swapped ? Second::apply(c, inner, vfloat{}) : Second::apply(inner, c, vfloat{});
  }
};
template <class First, class Second, bool swapped>
constexpr Operation pair() {
  constexpr Kind number = Kind::Number;
  return Operation::of<Pair<First, Second, swapped>>("pair", 2, number, {number, number, number});
}
// By the first operation, the second one, and on which side of it the first one is.
constexpr Code paired[] = {Code::Add, Code::Sub, Code::Mul};
template <class First>
struct Pairs {
  static constexpr Operation all[3][2] = {
      {pair<First, operations::Add, false>(), pair<First, operations::Add, false>()},
      {pair<First, operations::Sub, false>(), pair<First, operations::Sub, true>()},
      {pair<First, operations::Mul, false>(), pair<First, operations::Mul, false>()},
  };
};
constexpr const Operation (*pairs[])[2] = {
    Pairs<operations::Add>::all, Pairs<operations::Sub>::all, Pairs<operations::Mul>::all};

// The place in `paired`, or one behind them.
std::size_t paired_place(const Operation* of) {
  std::size_t place = 0;
  while (place < std::size(paired) && &operation(paired[place]) != of) ++place;
  return place;
}

#define ONNXTRAIN_POWER(Name, formula)                                \
  struct Name {                                                       \
    static constexpr std::size_t operands = 1;                        \
    static vfloat apply(vfloat a, vfloat, vfloat) { return formula; } \
  };
ONNXTRAIN_POWER(Square, square(a))
ONNXTRAIN_POWER(Cube, cube(a))
ONNXTRAIN_POWER(Itself, a)
ONNXTRAIN_POWER(SquareRoot, square_root(a))
#undef ONNXTRAIN_POWER
template <class Formula>
constexpr Operation power_operation =
    Operation::of<Formula>("power", 2, Kind::Number, {Kind::Number, Kind::Number, Kind::None});

}  // namespace

const Operation& power_of(float exponent) {
  if (exponent == 2.f) return power_operation<Square>;
  if (exponent == 3.f) return power_operation<Cube>;
  if (exponent == 1.f) return power_operation<Itself>;
  if (exponent == 0.5f) return power_operation<SquareRoot>;
  if (exponent == -1.f) return operation(Code::Reciprocal);
  return operation(Code::Pow);
}

Program::Program(const Attributes& attributes) {
  const int64_t inputs = attributes.integer("inputs");
  demand(inputs >= 1 && inputs <= int64_t{most_inputs},
         "inputs must be between 1 and 16, and is " + std::to_string(inputs));
  inputs_ = static_cast<std::size_t>(inputs);

  for (const int64_t number : attributes.integers_if_given("constants")) {
    demand(constants_.size() < most_constants, "there may be at most 256 constants");
    // As an unsigned number or a signed one.
    demand(number >= INT32_MIN && number <= int64_t{UINT32_MAX}, "constants must have 32 bits");
    const auto bits = static_cast<uint32_t>(number);
    std::memcpy(&constants_.emplace_back(), &bits, sizeof bits);
  }

  const std::vector<int64_t> code = attributes.integers_if_given("program");
  demand(code.size() % 4 == 0, "program must have four numbers per instruction");
  const std::size_t instructions = code.size() / 4;
  demand(instructions <= most_instructions, "program may have at most 256 instructions");
  values_ = inputs_ + constants_.size() + instructions;
  std::vector<Kind> kinds(inputs_ + constants_.size(), Kind::Number);
  for (std::size_t i = 0; i < instructions; ++i) {
    const int64_t* const four = code.data() + 4 * i;
    const std::string where = "instruction " + std::to_string(i) + ": ";
    demand(four[0] >= 0 && four[0] < int64_t{operation_count},
           where + "there is no operation " + std::to_string(four[0]));
    Instruction instruction{&table[four[0]], {}, kinds.size(), 0};
    for (std::size_t j = 0; j < 3; ++j) {
      const int64_t value = four[j + 1];
      const Kind kind = instruction.operation->operands[j];
      if (kind == Kind::None) {
        demand(value == -1, where + instruction.operation->name + " has fewer operands: the others must be -1");
        instruction.operands[j] = values_;
        continue;
      }
      demand(value >= 0 && value < static_cast<int64_t>(kinds.size()),
             where + "operand " + std::to_string(value) + " is no earlier value");
      instruction.operands[j] = static_cast<std::size_t>(value);
      demand(kinds[instruction.operands[j]] == kind,
             where + "operand " + std::to_string(value) + " of " + instruction.operation->name + " must be a " +
                 (kind == Kind::Mask ? "mask" : "number"));
    }
    instructions_.push_back(instruction);
    kinds.push_back(instruction.operation->result);
  }

  for (const int64_t value : attributes.integers("outputs")) {
    demand(outputs_.size() < most_outputs, "there may be at most 8 outputs");
    demand(value >= 0 && value < static_cast<int64_t>(values_), "output " + std::to_string(value) + " is no value");
    outputs_.push_back(static_cast<std::size_t>(value));
    demand(kinds[outputs_.back()] == Kind::Number,
           "output " + std::to_string(value) + " must be a number, and is a mask");
  }
  demand(!outputs_.empty(), "there must be an output");
  remove_unread();
  join_pairs();
  assign_slots();
}

void Program::remove_unread() {
  std::vector<bool> read(values_ + 1);
  for (const std::size_t value : outputs_) read[value] = true;
  std::vector<Instruction> kept;
  for (auto instruction = instructions_.rbegin(); instruction != instructions_.rend(); ++instruction) {
    if (!read[instruction->result]) continue;
    for (const std::size_t value : instruction->operands) read[value] = true;
    kept.push_back(*instruction);
  }
  instructions_.assign(kept.rbegin(), kept.rend());
}

// Joins an instruction with the only one that reads its result.
void Program::join_pairs() {
  std::vector<std::size_t> reads(values_ + 1), writer(values_ + 1, never);
  for (const std::size_t value : outputs_) ++reads[value];
  for (std::size_t i = 0; i < instructions_.size(); ++i) {
    for (const std::size_t value : instructions_[i].operands) ++reads[value];
    writer[instructions_[i].result] = i;
  }
  std::vector<bool> joined(instructions_.size());
  for (Instruction& second : instructions_) {
    const std::size_t place = paired_place(second.operation);
    if (place == std::size(paired)) continue;
    for (std::size_t side = 0; side < 2; ++side) {
      const std::size_t inner = second.operands[side];
      if (writer[inner] == never || reads[inner] != 1) continue;
      const Instruction& first = instructions_[writer[inner]];
      const std::size_t which = paired_place(first.operation);
      if (which == std::size(paired)) continue;
      joined[writer[inner]] = true;
      const std::size_t other = second.operands[1 - side];
      second = {&pairs[which][place][side], {first.operands[0], first.operands[1], other}, second.result, 0};
      break;
    }
  }
  std::vector<Instruction> kept;
  for (std::size_t i = 0; i < instructions_.size(); ++i)
    if (!joined[i]) kept.push_back(instructions_[i]);
  instructions_ = std::move(kept);
}

// A slot is free again when the last instruction has read it, which may write its own result there. What an output
// returns stays until the block ends.
void Program::assign_slots() {
  std::vector<std::size_t> last_read(values_ + 1), slot(values_ + 1, never), free;
  for (std::size_t i = 0; i < instructions_.size(); ++i)
    for (const std::size_t value : instructions_[i].operands) last_read[value] = i;
  for (const std::size_t value : outputs_) last_read[value] = never;
  for (std::size_t i = 0; i < instructions_.size(); ++i) {
    for (const std::size_t value : instructions_[i].operands)
      if (last_read[value] == i && slot[value] != never) {
        free.push_back(slot[value]);
        slot[value] = never;
      }
    if (free.empty()) free.push_back(slots_++);
    instructions_[i].slot = slot[instructions_[i].result] = free.back();
    free.pop_back();
  }
}

Shape broadcast(const std::vector<Tensor<const float>>& tensors) {
  std::size_t rank = 0;
  for (const auto& tensor : tensors) rank = std::max(rank, tensor.shape.size());
  Shape all(rank, 1);
  for (const auto& [data, shape] : tensors)
    for (std::size_t i = 0; i < shape.size(); ++i) {
      int64_t& size = all[rank - shape.size() + i];
      require(shape[i] == size || shape[i] == 1 || size == 1, "the shapes of the inputs must broadcast");
      if (size == 1) size = shape[i];
    }
  if (std::find(all.begin(), all.end(), 0) != all.end()) return all;
  int64_t elements = 1;
  for (const int64_t size : all) {
    require(size <= (int64_t{1} << 60) / elements, "the shapes of the inputs broadcast to too many elements");
    elements *= size;
  }
  return all;
}

Reading reading(const Shape& input, const Shape& output) {
  Reading all;
  for (std::size_t i = 0; i < output.size(); ++i) {  // from the last axis
    const auto size = static_cast<std::size_t>(output[output.size() - 1 - i]);
    if (size == 1) continue;
    const bool moves = i < input.size() && input[input.size() - 1 - i] != 1;
    if (!all.axes.empty() && all.axes.back().moves == moves)
      all.axes.back().size *= size;
    else
      all.axes.push_back({size, moves});
  }
  return all;
}

std::size_t Reading::place(std::size_t run) const {
  std::size_t at = 0, stride = axes[0].moves ? axes[0].size : 1;
  for (std::size_t i = 1; i < axes.size() && run; ++i) {
    if (axes[i].moves) {
      at += run % axes[i].size * stride;
      stride *= axes[i].size;
    }
    run /= axes[i].size;
  }
  return at;
}

void Reading::gather(const float* from, std::size_t begin, std::size_t n, float* to) const {
  const std::size_t size = axes[0].size, repeats = axes.size() > 1 ? axes[1].size : 1;
  std::size_t run = begin / size, within = begin % size;
  float* const end = to + n;
  while (to < end) {
    // What axes 0 and 1 have in common until axis 1 ends: a row that is repeated, or numbers that are.
    const std::size_t rest = repeats - run % repeats, room = static_cast<std::size_t>(end - to);
    const std::size_t elements = std::min(room, rest * size - within);
    const float* const row = from + place(run);
    if (axes[0].moves) {
      // One period, then what is there already.
      const std::size_t first = std::min(size - within, elements), second = std::min(within, elements - first);
      std::memcpy(to, row + within, first * sizeof *to);
      std::memcpy(to + first, row, second * sizeof *to);
      std::size_t done = first + second;
      while (done < elements) {
        const std::size_t more = std::min(done / size * size, elements - done);
        std::memcpy(to + done, to, more * sizeof *to);
        done += more;
      }
    } else {
      std::size_t number = 0, first = size - within;
      for (std::size_t done = 0; done < elements; ++number) {
        const std::size_t same = std::min(first, elements - done);
        const vfloat value = splat(row[number]);
        for (std::size_t i = 0; i < same; i += lanes) store(to + done + i, value);
        done += same;
        first = size;
      }
    }
    to += elements;
    run += (within + elements) / size;
    within = (within + elements) % size;
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
