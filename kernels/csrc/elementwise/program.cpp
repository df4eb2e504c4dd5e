#include "elementwise/program.h"

#include <algorithm>
#include <cstdlib>
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
  const std::vector<int64_t> bools = attributes.integers_if_given("bools");
  demand(bools.empty() || (bools.size() == 1 && bools[0] >= 0 && bools[0] < inputs && bools[0] <= int64_t{most_bools}),
         "bools must be how many inputs are bool, at most 4, and fewer than all");
  bools_ = bools.empty() ? 0 : static_cast<std::size_t>(bools[0]);
  for (const int64_t number : attributes.integers_if_given("constants")) {
    demand(constants_.size() < most_constants, "there may be at most 256 constants");
    // As an unsigned number or a signed one.
    demand(number >= INT32_MIN && number <= int64_t{UINT32_MAX}, "constants must have 32 bits");
    const auto bits = static_cast<uint32_t>(number);
    std::memcpy(&constants_.emplace_back(), &bits, sizeof bits);
  }
  read_columns(attributes);
  read_instructions(attributes.integers_if_given("program"));
  read_outputs(attributes);
  remove_unread();
  join_pairs();
  find_moved();
  assign_slots();
}

void Program::read_columns(const Attributes& attributes) {
  const std::vector<int64_t> row = attributes.integers_if_given("row");
  offsets_ = attributes.integers_if_given("offsets");
  demand(row.empty() || row.size() == 2, "row must be an axis and a width");
  demand(!row.empty() || offsets_.empty(), "offsets need a row");
  if (row.empty()) return;
  demand(row[0] >= 1 && row[0] <= 64, "the axis of the row must be between 1 and 64");
  demand(row[1] >= 1 && row[1] <= int64_t{most_columns}, "the width of the row must be between 1 and 4096");
  demand(bools_ == 0, "a program with a row may read no bool inputs");
  columns_ = {static_cast<std::size_t>(row[0]), static_cast<std::size_t>(row[1])};
  demand(offsets_.empty() || offsets_.size() == inputs_, "there must be an offset for each input");
  for (const int64_t offset : offsets_)
    demand(offset >= INT32_MIN && offset <= INT32_MAX, "offsets must have 32 bits");
}

void Program::read_instructions(const std::vector<int64_t>& code) {
  demand(code.size() % 4 == 0, "program must have four numbers per instruction");
  const std::size_t instructions = code.size() / 4;
  demand(instructions <= most_instructions, "program may have at most 256 instructions");
  values_ = inputs_ + constants_.size() + instructions;
  kinds_.assign(inputs_ + constants_.size(), Kind::Number);
  for (std::size_t value = 0; value < kinds_.size(); ++value) places_.push_back({value, 0});
  for (std::size_t i = 0; i < instructions; ++i) {
    const int64_t* const four = code.data() + 4 * i;
    const std::string where = "instruction " + std::to_string(i) + ": ";
    demand(four[0] >= 0 && four[0] < int64_t{operation_count},
           where + "there is no operation " + std::to_string(four[0]));
    if (four[0] == static_cast<int64_t>(Code::Window)) {
      add_window(four, where);
      continue;
    }
    Instruction instruction{&table[four[0]], {}, kinds_.size(), 0};
    for (std::size_t j = 0; j < 3; ++j) {
      const int64_t value = four[j + 1];
      const Kind kind = instruction.operation->operands[j];
      if (kind == Kind::None) {
        demand(value == -1, where + instruction.operation->name + " has fewer operands: the others must be -1");
        instruction.operands[j] = {values_, 0};
        continue;
      }
      demand(value >= 0 && value < static_cast<int64_t>(kinds_.size()),
             where + "operand " + std::to_string(value) + " is no earlier value");
      demand(kinds_[static_cast<std::size_t>(value)] == kind,
             where + "operand " + std::to_string(value) + " of " + instruction.operation->name + " must be a " +
                 (kind == Kind::Mask ? "mask" : "number"));
      instruction.operands[j] = places_[static_cast<std::size_t>(value)];
    }
    places_.push_back({instruction.result, 0});
    kinds_.push_back(instruction.operation->result);
    instructions_.push_back(instruction);
  }
}

// Columns of a value: those from `offset` on, or the columns in [0, size) with zeros around them.
void Program::add_window(const int64_t* four, const std::string& where) {
  const int64_t value = four[1], offset = four[2], size = four[3];
  const auto width = static_cast<int64_t>(columns_.width);
  demand(width > 0, where + "windows need a row");
  demand(value >= 0 && value < static_cast<int64_t>(kinds_.size()),
         where + "operand " + std::to_string(value) + " is no earlier value");
  demand(kinds_[static_cast<std::size_t>(value)] == Kind::Number, where + "a window must be of a number");
  demand(size >= -1 && size <= width, where + "the size of a window must be at most the width of the row");
  demand(offset >= (size < 0 ? 0 : -width) && offset <= width, where + "the offset of a window is outside of the row");
  Read read = places_[static_cast<std::size_t>(value)];
  read.shift += offset;
  demand(read.shift <= width, where + "windows of windows are outside of the row");
  const std::size_t result = kinds_.size();
  kinds_.push_back(Kind::Number);
  if (size < 0) {
    places_.push_back(read);
    return;
  }
  std::size_t place = 0;
  while (place < bounds_.size() && (bounds_[place].offset != offset || bounds_[place].size != size)) ++place;
  if (place == bounds_.size()) bounds_.push_back({offset, size});
  places_.push_back({result, 0});
  instructions_.push_back({&operation(Code::Window), {read, {values_ + 1 + place, 0}, {values_, 0}}, result, 0});
}

void Program::read_outputs(const Attributes& attributes) {
  for (const int64_t value : attributes.integers("outputs")) {
    demand(outputs_.size() < most_outputs, "there may be at most 8 outputs");
    demand(value >= 0 && value < static_cast<int64_t>(values_), "output " + std::to_string(value) + " is no value");
    const auto place = static_cast<std::size_t>(value);
    demand(kinds_[place] == Kind::Number, "output " + std::to_string(value) + " must be a number, and is a mask");
    outputs_.push_back({places_[place], columns_.width, Reduction::None, true});
  }
  demand(!outputs_.empty(), "there must be an output");
  const std::vector<int64_t> columns = attributes.integers_if_given("columns");
  demand(columns.empty() || (columns_.width && columns.size() == outputs_.size()),
         "columns need a row, and there must be a number for each output");
  for (std::size_t i = 0; i < columns.size(); ++i) {
    demand(columns[i] >= 1 && columns[i] <= static_cast<int64_t>(columns_.width),
           "an output must have between 1 and as many columns as the row");
    outputs_[i].columns = static_cast<std::size_t>(columns[i]);
  }
  read_reductions(attributes.integers_if_given("reductions"));
}

// Three numbers for each output: its reduction, how many of the last axes it is over (of the first ones, if negative), and
// whether these axes stay.
void Program::read_reductions(const std::vector<int64_t>& numbers) {
  demand(numbers.empty() || numbers.size() == 3 * outputs_.size(), "reductions must have three numbers per output");
  for (std::size_t i = 0; i < numbers.size() / 3; ++i) {
    const int64_t reduction = numbers[3 * i], axes = numbers[3 * i + 1], keeps = numbers[3 * i + 2];
    demand(reduction >= 0 && reduction <= static_cast<int64_t>(Reduction::Min), "there is no such reduction");
    outputs_[i].reduction = static_cast<Reduction>(reduction);
    outputs_[i].keeps_axes = keeps != 0;
    if (outputs_[i].reduction == Reduction::None) continue;
    demand(axes != 0 && axes >= -64 && axes <= 64, "a reduction must be over between 1 and 64 axes");
    std::size_t& all = axes > 0 ? last_axes_ : first_axes_;
    demand(all == 0 || all == static_cast<std::size_t>(std::abs(axes)), "all reductions must be over the same axes");
    all = static_cast<std::size_t>(std::abs(axes));
    demand(axes < 0 || outputs_[i].columns == columns_.width, "an output that is summed over its columns has all of them");
  }
  demand(last_axes_ == 0 || first_axes_ == 0, "all reductions must be over the same axes");
  demand(last_axes_ == 0 || last_axes_ >= columns_.axis, "the axis of the row must be one that is reduced");
}

void Program::remove_unread() {
  std::vector<bool> read(values_ + 1 + bounds_.size());
  for (const Output& output : outputs_) read[output.from.value] = true;
  std::vector<Instruction> kept;
  for (auto instruction = instructions_.rbegin(); instruction != instructions_.rend(); ++instruction) {
    if (!read[instruction->result]) continue;
    for (const Read& operand : instruction->operands) read[operand.value] = true;
    kept.push_back(*instruction);
  }
  instructions_.assign(kept.rbegin(), kept.rend());
}

// Joins an instruction with the only one that reads its result.
void Program::join_pairs() {
  const std::size_t values = values_ + 1 + bounds_.size();
  std::vector<std::size_t> reads(values), writer(values, never);
  for (const Output& output : outputs_) ++reads[output.from.value];
  for (std::size_t i = 0; i < instructions_.size(); ++i) {
    for (const Read& operand : instructions_[i].operands) ++reads[operand.value];
    writer[instructions_[i].result] = i;
  }
  std::vector<bool> joined(instructions_.size());
  for (Instruction& second : instructions_) {
    const std::size_t place = paired_place(second.operation);
    if (place == std::size(paired)) continue;
    for (std::size_t side = 0; side < 2; ++side) {
      const auto [inner, shift] = second.operands[side];
      if (writer[inner] == never || reads[inner] != 1 || shift != 0) continue;
      const Instruction& first = instructions_[writer[inner]];
      const std::size_t which = paired_place(first.operation);
      if (which == std::size(paired)) continue;
      joined[writer[inner]] = true;
      const Read other = second.operands[1 - side];
      second = {&pairs[which][place][side], {first.operands[0], first.operands[1], other}, second.result, 0};
      break;
    }
  }
  std::vector<Instruction> kept;
  for (std::size_t i = 0; i < instructions_.size(); ++i)
    if (!joined[i]) kept.push_back(instructions_[i]);
  instructions_ = std::move(kept);
}

void Program::find_moved() {
  moved_.resize(values_ + 1 + bounds_.size());
  const auto note = [&](const Read& read) {
    if (read.shift == 0) return;
    moved_[read.value] = true;
    behind_ = std::max(behind_, static_cast<std::size_t>(std::max<std::ptrdiff_t>(read.shift, 0)));
    before_ = std::max(before_, static_cast<std::size_t>(std::max<std::ptrdiff_t>(-read.shift, 0)));
  };
  for (const Output& output : outputs_) note(output.from);
  for (const Instruction& instruction : instructions_)
    for (const Read& operand : instruction.operands) note(operand);
}

// A slot is free again when the last instruction has read it, which may write its own result there, unless it reads what
// lies in front. What an output returns stays until the block ends.
void Program::assign_slots() {
  const std::size_t values = values_ + 1 + bounds_.size();
  std::vector<std::size_t> last_read(values), slot(values, never), free;
  for (std::size_t i = 0; i < instructions_.size(); ++i)
    for (const Read& operand : instructions_[i].operands) last_read[operand.value] = i;
  for (const Output& output : outputs_) last_read[output.from.value] = never;
  for (std::size_t i = 0; i < instructions_.size(); ++i) {
    Instruction& instruction = instructions_[i];
    std::size_t taken = never;
    const auto take = [&] {
      if (free.empty()) free.push_back(slots_++);
      taken = free.back();
      free.pop_back();
    };
    if (instruction.operands[0].shift < 0) take();
    for (const Read& operand : instruction.operands)
      if (last_read[operand.value] == i && slot[operand.value] != never) {
        free.push_back(slot[operand.value]);
        slot[operand.value] = never;
      }
    if (taken == never) take();
    instruction.slot = slot[instruction.result] = taken;
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
