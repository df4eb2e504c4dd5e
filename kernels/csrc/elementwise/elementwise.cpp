// A chain of elementwise operations in one pass over memory: a small program that runs over one block after the other,
// whose intermediate results stay in the first-level cache.
#include <algorithm>
#include <cstring>
#include <optional>
#include <vector>

#include "core/op.h"
#include "core/rows.h"
#include "core/scratch.h"
#include "elementwise/program.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace elementwise {
namespace {

constexpr std::size_t none = ~std::size_t{0};
// Elements of a row of columns at most.
constexpr std::size_t most_columns_row = 16384;
// Sums over the first axes are added up in as many columns at least.
constexpr std::size_t least_sums = 512;
// Elements in a block at least and at most, and the floats of all that a block reads and writes.
constexpr std::size_t least_block = 256, most_block = 2048, cache = 12288;
// The work that is worth a thread of its own, in additions.
constexpr std::size_t least_work = 131072;

// Where a value's elements of a block lie: those of each place, or one number.
struct Place {
  const float* data;
  bool fixed;
};

// Of two halves, each of twice `half` lanes, and so on: the order is fixed.
template <int half = lanes / 2>
float sum_of_lanes(vfloat v) {
  v += shuffle(v, v, indices([](int i) { return (i + half) % static_cast<int>(lanes); }));
  if constexpr (half > 1) {
    return sum_of_lanes<half / 2>(v);
  } else {
    return v[0];
  }
}

// Sum of at most a block, in float: in lanes, then by halves.
double sum_of(const Place& place, std::size_t n) {
  if (place.fixed) return static_cast<double>(*place.data) * static_cast<double>(n);
  vfloat parts[4]{};
  std::size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (std::size_t part = 0; part < 4; ++part) parts[part] += load(place.data + i + part * lanes);
  for (; i + lanes <= n; i += lanes) parts[0] += load(place.data + i);
  if (i < n) parts[1] += load(place.data + i, n - i);
  return sum_of_lanes((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

// Sums of rows of at most a vector.
void sum_rows(const float* from, std::size_t row, std::size_t rows, float* to) {
  for (std::size_t i = 0; i < rows; ++i) to[i] = sum_of_lanes(load(from + i * row, row));
}

void add_to(float* sums, const Place& place, std::size_t n) {
  vectors(n, [=](std::size_t i, auto extent) {
    store(sums + i, load(sums + i, extent) + (place.fixed ? splat(*place.data) : load(place.data + i, extent)), extent);
  });
}

// An input that has another number for each block.
struct Varying {
  std::size_t value;
  const float* data;
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
  void read(std::size_t input, const Tensor<const float>& tensor);
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

Run::Run(const Program& program, Context& context)
    : program_(program),
      slots_(program.slots()),
      places_(program.values() + 1 + program.bounds().size(), Place{nullptr, true}),
      numbers_(program.values()) {
  std::vector<Tensor<const float>> inputs;
  inputs.reserve(program.inputs());
  for (std::size_t i = 0; i < program.inputs(); ++i) {
    inputs.push_back(context.input<float>(i));
    require(inputs.back().given(), "an input that the program has is left out");
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
    if (elements_ == 0)  // The mean of nothing is NaN.
      std::fill_n(output.data, output.size(), returned.reduction == Reduction::Mean ? __builtin_nanf("") : 0.f);
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
  for (std::size_t i = 0; i < program.inputs(); ++i) read(i, inputs[i]);
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

void Run::read(std::size_t input, const Tensor<const float>& tensor) {
  const int64_t offset = program_.offset(input);
  Reading how = reading(tensor.shape, shape_);
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
  varying_.push_back({input, tensor.data, std::move(how), std::move(rows), stays ? none : slots_++});
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

void Run::compute(const Threads& threads) {
  if (elements_ == 0) return;
  if (program_.first_axes()) return add_columns(threads);
  const std::size_t blocks = elements_ / row_ * pieces_;
  threads.ranges(blocks, 1 + least_work / (block_ * (cost_ + 1)), [&](std::size_t index, std::size_t end) {
    thread_local Scratch scratch;
    float* const memory = scratch.floats(slots_ * stride_);
    std::vector<Place> places = places_;
    for (; index < end; ++index) {
      const std::size_t begin = index % pieces_ * block_;
      block(index / pieces_ * row_ + begin, std::min(block_, row_ - begin), places.data(), memory, nullptr);
    }
  });
  finish_rows();
}

// Blocks of the same columns are added by one task after the other, for some of the rows.
void Run::add_columns(const Threads& threads) {
  const std::size_t rows = (elements_ + row_ - 1) / row_, work = elements_ * (cost_ + 1) / least_work / pieces_;
  const std::size_t parts = std::clamp<std::size_t>(std::min(work, most_parts / pieces_), 1, rows);
  std::size_t reduced = 0;
  for (const Returned& output : returned_) reduced += output.is_reduced();
  std::vector<std::vector<ColumnSums>> sums(pieces_ * parts);
  threads.ranges(sums.size(), 1, [&](std::size_t index, std::size_t end) {
    thread_local Scratch scratch;
    float* const memory = scratch.floats(slots_ * stride_);
    std::vector<Place> places = places_;
    for (; index < end; ++index) {
      const std::size_t within = index / parts * block_, part = index % parts;
      sums[index].assign(reduced, ColumnSums(block_));
      for (std::size_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
        const std::size_t begin = row * row_ + within;
        if (begin >= elements_) break;
        block(begin, std::min({block_, row_ - within, elements_ - begin}), places.data(), memory, sums[index].data());
        for (ColumnSums& output : sums[index]) output.row_done();
      }
      for (ColumnSums& output : sums[index]) output.flush();
    }
  });
  std::size_t place = 0;
  for (Returned& output : returned_)
    if (output.is_reduced()) finish_columns(output, place++, sums);
}

void Run::finish_columns(Returned& returned, std::size_t place, const std::vector<std::vector<ColumnSums>>& sums) const {
  const std::size_t columns = elements_ / reduced_, parts = sums.size() / pieces_;
  std::vector<double> totals(columns);
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::size_t begin = i / parts * block_, n = std::min(block_, row_ - begin);
    const double* const from = sums[i][place].total().data();
    std::size_t column = begin % columns;
    for (std::size_t j = 0; j < n; ++j, ++column) {
      if (column == columns) column = 0;
      totals[column] += from[j];
    }
  }
  const double divisor = returned.output->reduction == Reduction::Mean ? static_cast<double>(reduced_) : 1;
  const std::size_t kept = columns_row_ == 1 ? 1 : returned.output->columns * static_cast<std::size_t>(inner_);
  float* to = returned.data;
  for (std::size_t row = 0; row < columns; row += columns_row_)
    for (std::size_t j = 0; j < kept; ++j) *to++ = static_cast<float>(totals[row + j] / divisor);
}

void Run::finish_rows() {
  for (Returned& returned : returned_) {
    const double divisor = returned.output->reduction == Reduction::Mean ? static_cast<double>(reduced_) : 1;
    for (std::size_t i = 0; i < returned.partial.size() / pieces_; ++i) {
      double total = 0;
      for (std::size_t piece = 0; piece < pieces_; ++piece) total += returned.partial[i * pieces_ + piece];
      returned.data[i] = static_cast<float>(total / divisor);
    }
    if (returned.partial.empty() && !returned.apart.empty())
      std::memcpy(returned.data, returned.apart.data(), returned.apart.size() * sizeof(float));
  }
}

void Run::gather(std::size_t begin, std::size_t n, Place* places, float* memory) const {
  for (const Varying& input : varying_) {
    Place& place = places[input.value];
    if (input.slot == none) {
      place = {input.data + begin, false};
      continue;
    }
    float* const to = slot(memory, input.slot);
    if (input.rows) {
      input.rows->gather(input.data, begin / columns_row_, n / columns_row_, to);
      place = {to, false};
      continue;
    }
    const std::size_t run = input.reading.run(), within = begin % run;
    if (within + n <= run) {
      const float* const first = input.data + input.reading.place(begin / run);
      const bool moves = input.reading.axes[0].moves;
      place = {moves ? first + within : first, !moves};
      continue;
    }
    input.reading.gather(input.data, begin, n, to);
    place = {to, false};
  }
}

void Run::block(std::size_t begin, std::size_t n, Place* places, float* memory, ColumnSums* sums) {
  gather(begin, n, places, memory);
  for (const Step& step : steps_) {
    const Instruction& instruction = *step.instruction;
    const Place a = at(places, instruction.operands[0]), b = at(places, instruction.operands[1]),
                c = at(places, instruction.operands[2]);
    const unsigned fixed = a.fixed | b.fixed << 1 | c.fixed << 2;
    const bool one = fixed == 7;
    float* const to = step.output && !one ? step.output + begin : slot(memory, instruction.slot);
    (*step.loops)[fixed](one ? 1 : n, a.data, b.data, c.data, to);
    places[instruction.result] = {to, one};
  }
  if (sums)
    for (const Returned& returned : returned_)
      if (returned.is_reduced()) add_to(sums++->block(), at(places, returned.output->from), n);
  // The first output last: it may lie in the memory of an input that another one returns.
  for (std::size_t i = returned_.size(); i-- > 0;)
    if (!(sums && returned_[i].is_reduced())) give(returned_[i], begin, n, at(places, returned_[i].output->from));
}

// Writes a block of an output, or its sums over the last axes.
void Run::give(Returned& returned, std::size_t begin, std::size_t n, Place place) const {
  const Output& output = *returned.output;
  if (!returned.partial.empty()) {
    returned.partial[begin / row_ * pieces_ + begin % row_ / block_] = sum_of(place, n);
  } else if (returned.is_reduced()) {
    const double divisor = output.reduction == Reduction::Mean ? static_cast<double>(reduced_) : 1;
    float* const to = returned.target() + begin / reduced_;
    if (reduced_ <= lanes && !place.fixed && divisor == 1) return sum_rows(place.data, reduced_, n / reduced_, to);
    for (std::size_t i = 0; i < n / reduced_; ++i) {
      to[i] = static_cast<float>(sum_of(place, reduced_) / divisor);
      if (!place.fixed) place.data += reduced_;
    }
  } else {
    const std::size_t kept = output.columns * static_cast<std::size_t>(inner_), rows = n / columns_row_;
    const bool all = output.columns == program_.columns().width;
    float* const to = returned.data + (all ? begin : begin / columns_row_ * kept);
    if (place.fixed)
      std::fill_n(to, all ? n : rows * kept, *place.data);
    else if (!all)
      write_rows(place.data, columns_row_, kept, rows, to);
    else if (place.data != to)
      std::memcpy(to, place.data, n * sizeof *to);
  }
}

struct Elementwise {
  static constexpr const char* name = "Elementwise#_float";
  static constexpr Floats<Program::most_inputs> inputs{};
  static constexpr Floats<Program::most_outputs> outputs{};
  static constexpr std::size_t optional_from = 1;
  static constexpr int in_place[] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

  explicit Elementwise(const Attributes& attributes) : program_(attributes) {}

  void compute(Context& context) const { Run(program_, context).compute(context.threads()); }

 private:
  Program program_;
};

}  // namespace
}  // namespace elementwise

void add_elementwise(Domain& domain) { domain.add_numbered<elementwise::Elementwise>(64); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
