// What a run of an elementwise program does: which values are numbers, and how blocks are cut.
#include <algorithm>
#include <cstring>

#include "core/rows.h"
#include "elementwise/run.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {
namespace {

// Elements of a row of columns at most.
constexpr std::size_t most_columns_row = 16384;
// Sums over the first axes are added up in as many columns at least.
constexpr std::size_t least_sums = 512;
// Elements in a block at least and at most, and the floats of all that a block reads and writes.
constexpr std::size_t least_block = 256, most_block = 2048, cache = 12288;

}  // namespace

Run::Run(const Program& program, Context& context)
    : program_(program),
      slots_(program.slots()),
      places_(program.values() + 1 + program.bounds().size(), Place{nullptr, true}),
      numbers_(program.values()) {
  std::vector<Tensor<const float>> inputs(program.inputs());
  std::vector<const bool*> bools(program.inputs());
  for (std::size_t i = 0; i < program.inputs(); ++i) {
    if (program.is_bool(i)) {
      const Tensor<const bool> tensor = context.input<bool>(program.place(i));
      bools[i] = tensor.data, inputs[i].shape = tensor.shape;
    } else {
      inputs[i] = context.input<float>(i);
    }
    require(bools[i] || inputs[i].given(), "an input that the program has is left out");
  }
  shape_ = broadcast(inputs, program.columns());
  elements_ = count(shape_);
  require(std::max(program.last_axes(), program.first_axes()) <= shape_.size(), "fewer axes than the program reduces");
  require(program.first_axes() + program.columns().axis <= shape_.size(), "the axis of the row must be one that stays");
  if (program.last_axes()) reduced_ = count(shape_.end() - static_cast<std::ptrdiff_t>(program.last_axes()), shape_.end());
  if (program.first_axes())
    reduced_ = count(shape_.begin(), shape_.begin() + static_cast<std::ptrdiff_t>(program.first_axes()));
  const std::size_t outputs = context.outputs();
  require(outputs <= program.outputs().size(), "the program has fewer outputs than the node");
  for (std::size_t i = 0; i < outputs; ++i) {
    const Output& returned = program.outputs()[i];
    const auto output = context.output<float>(i, shape_of(returned));
    if (!output.data) continue;
    returned_.push_back({&returned, output.data, {}, {}});
    if (elements_ == 0) std::fill_n(output.data, output.size(), of_nothing(returned.reduction));
  }
  if (elements_ == 0 || returned_.empty()) {
    elements_ = 0;
    return;
  }
  if (const Columns& columns = program.columns(); columns.axis) {
    columns_row_ = count(shape_.end() - static_cast<std::ptrdiff_t>(columns.axis), shape_.end());
    require(columns_row_ <= most_columns_row, "a row of columns has too many elements");
    inner_ = static_cast<std::ptrdiff_t>(columns_row_ / columns.width);
  }
  for (std::size_t i = 0; i < program.inputs(); ++i) read(i, inputs[i], bools[i]);
  for (std::size_t i = 0; i < program.constants().size(); ++i) {
    float& number = numbers_[program.inputs() + i];
    number = program.constants()[i];
    places_[program.inputs() + i] = {&number, true};
  }
  for (std::size_t i = 0; i < program.bounds().size(); ++i) places_[program.values() + 1 + i].fixed = false;
  order();
  choose_blocks();
  for (Returned& output : returned_)
    if (output.is_reduced()) keep_apart(output);
  patterns_.resize(program.bounds().size());
  for (std::size_t i = 0; i < patterns_.size(); ++i) {
    bound(program.bounds()[i], patterns_[i]);
    places_[program.values() + 1 + i].data = patterns_[i].data();
  }
}

Shape Run::shape_of(const Output& output) const {
  Shape shape = shape_;
  const auto end = [&](std::size_t axes) { return shape.end() - static_cast<std::ptrdiff_t>(axes); };
  if (const Columns& columns = program_.columns(); columns.axis && output.columns != columns.width)
    *end(columns.axis) = static_cast<int64_t>(output.columns);
  if (output.reduction == Reduction::None) return shape;
  const std::size_t last = program_.last_axes(), first = program_.first_axes();
  const auto from = last ? end(last) : shape.begin(), to = last ? shape.end() : end(shape.size() - first);
  if (output.keeps_axes)
    std::fill(from, to, 1);
  else
    shape.erase(from, to);
  return shape;
}

void Run::read(std::size_t input, const Tensor<const float>& tensor, const bool* bools) {
  const int64_t offset = program_.offset(input);
  Reading how = reading(tensor.shape, shape_);
  if (bools) {
    require(tensor.shape == shape_, "a bool input must have the shape of the results");
    places_[input].fixed = false;
    varying_.push_back({input, nullptr, bools, std::move(how), {}, slots_++});
    return;
  }
  if (program_.columns().axis ? tensor.size() == 1 && offset == 0 : how.one_number()) {
    // Copied, as an output may lie there.
    numbers_[input] = *tensor.data;
    places_[input] = {&numbers_[input], true};
    return;
  }
  places_[input].fixed = false;
  std::optional<RowReading> rows;
  if (program_.columns().axis) rows.emplace(tensor.shape, shape_, program_.columns(), offset);
  const bool stays = (rows ? rows->in_place() : how.in_place()) && !program_.is_moved(input);
  varying_.push_back({input, tensor.data, nullptr, std::move(how), std::move(rows), stays ? none : slots_++});
}

// A number for each element of a block: all bits where the window reads, none where it is 0.
void Run::bound(const Bounds& bounds, std::vector<float>& pattern) const {
  const uint32_t all = ~uint32_t{0};
  pattern.assign(block_ + lanes, 0.f);
  for (std::size_t i = 0; i < block_; ++i) {
    const int64_t column = static_cast<int64_t>(i % columns_row_) / inner_ + bounds.offset;
    if (column >= 0 && column < bounds.size) std::memcpy(&pattern[i], &all, sizeof all);
  }
}

// Computes what is the same for all elements; the other instructions become steps.
void Run::order() {
  for (const Instruction& instruction : program_.instructions()) {
    const auto& [a, b, c] = instruction.operands;
    const Operation& operation = instruction.operation == &elementwise::operation(Code::Pow) && places_[b.value].fixed
                                     ? power_of(*places_[b.value].data)
                                     : *instruction.operation;
    if (places_[a.value].fixed && places_[b.value].fixed && places_[c.value].fixed) {
      float& number = numbers_[instruction.result];
      operation.loops[7](1, places_[a.value].data, places_[b.value].data, places_[c.value].data, &number);
      places_[instruction.result] = {&number, true};
      continue;
    }
    places_[instruction.result].fixed = false;
    cost_ += operation.cost;
    steps_.push_back({&instruction, &operation.loops, nullptr});
  }
  // The first output of a value takes its elements, unless it lies in the memory of an input that is read later.
  for (std::size_t i = 0; i < steps_.size(); ++i)
    for (const Returned& output : returned_)
      if (is_written_directly(output, i)) {
        steps_[i].output = output.data;
        break;
      }
}

bool Run::is_written_directly(const Returned& output, std::size_t writer) const {
  const auto& [value, shift] = output.output->from;
  // Other columns are read behind the block, where an output is not this block's.
  return value == steps_[writer].instruction->result && !output.is_reduced() && !program_.is_moved(value) && shift == 0 &&
         output.output->columns == program_.columns().width && !read_after_writing(output, writer);
}

bool Run::read_after_writing(const Returned& output, std::size_t writer) const {
  for (const Varying& input : varying_) {
    if (input.data != output.data) continue;
    if (input.slot != none) {
      require(input.rows && input.rows->has_each_row(), "an output may not lie in the memory of an input of another shape");
      continue;
    }
    for (const Returned& other : returned_)
      if (other.output->from.value == input.value) return true;
    for (std::size_t i = writer + 1; i < steps_.size(); ++i)
      for (const Read& operand : steps_[i].instruction->operands)
        if (operand.value == input.value) return true;
  }
  return false;
}

// Reduced outputs are written while other blocks still read the inputs.
void Run::keep_apart(Returned& output) {
  const std::size_t results = count(shape_of(*output.output));
  for (const Varying& input : varying_)
    if (input.data == output.data) output.apart.resize(results);
  if (program_.last_axes() && row_ == reduced_) output.partial.resize(elements_ / row_ * pieces_);
}

// Rows are what lies side by side in all inputs but those with short runs, which are gathered. Blocks consist of whole rows
// of columns. Of a sum over the last axes blocks have whole rows, too, or are pieces of a long row. Over the first axes,
// blocks are those columns whose sums fit the cache.
void Run::choose_blocks() {
  row_ = elements_;
  std::size_t streams = slots_ + returned_.size() + program_.bounds().size(), unit = columns_row_;
  for (const Varying& input : varying_) {
    if (input.reading.run() >= least_block && reduced_ == 1 && columns_row_ == 1) row_ = std::min(row_, input.reading.run());
    streams += input.slot == none;
  }
  if (program_.first_axes()) {
    const std::size_t columns = elements_ / reduced_;
    row_ = std::min(elements_, columns * ((least_sums + columns - 1) / columns));
  } else if (program_.last_axes()) {
    if (reduced_ <= most_block)
      unit = reduced_;
    else
      row_ = reduced_;
  }
  block_ = std::clamp(cache / streams, least_block, most_block);
  block_ = std::max(block_ / unit, std::size_t{1}) * unit;
  pieces_ = (row_ + block_ - 1) / block_;
  const std::size_t piece = (row_ + pieces_ - 1) / pieces_, whole = unit == 1 ? lanes : unit;
  block_ = (piece + whole - 1) / whole * whole;
  pieces_ = (row_ + block_ - 1) / block_;
  const auto round = [](std::size_t n) { return (n + lanes - 1) / lanes * lanes; };
  front_ = round(program_.columns_before() * static_cast<std::size_t>(inner_));
  stride_ = front_ + round(block_ + program_.columns_behind() * static_cast<std::size_t>(inner_)) + lanes;
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
