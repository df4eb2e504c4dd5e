// A chain of elementwise operations in one pass over memory: a small program that runs over one block after the other,
// whose intermediate results stay in the first-level cache.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/op.h"
#include "core/scratch.h"
#include "elementwise/program.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace elementwise {
namespace {

constexpr std::size_t none = ~std::size_t{0};
// Elements in a block at least and at most, and the floats of all that a block reads and writes.
constexpr std::size_t least_block = 256, most_block = 2048, cache = 8192;
// The work that is worth a thread of its own, in additions.
constexpr std::size_t least_work = 131072;

// Where a value's elements of a block lie: those of each place, or one number.
struct Place {
  const float* data;
  bool fixed;
};

// An input that has another number for each block.
struct Varying {
  std::size_t value;
  const float* data;
  Reading reading;
  std::size_t slot;  // where it is gathered; none if it has the output's shape
};

struct Step {
  const Instruction* instruction;
  const Loops* loops;
  float* output;  // the whole output that it writes in place; null if it writes its slot
};

struct Returned {
  std::size_t value;
  float* data;
};

// One run of a program: what depends on the shapes of the inputs.
class Run {
 public:
  Run(const Program& program, Context& context);
  void compute(const Threads& threads) const;

 private:
  void read(std::size_t input, const Tensor<const float>& tensor);
  void order(const Program& program);
  bool read_after_writing(const Returned& output, std::size_t writer) const;
  void choose_blocks();
  void block(std::size_t begin, std::size_t n, Place* places, float* memory) const;

  Shape shape_;
  std::size_t elements_ = 0;
  std::size_t slots_ = 0, cost_ = 0;
  std::size_t row_ = 0, block_ = 0, pieces_ = 0, stride_ = 0;  // blocks are pieces of rows
  std::vector<Place> places_;                                  // of all values; fixed ones are there before blocks are
  std::vector<float> numbers_;
  std::vector<Varying> varying_;
  std::vector<Step> steps_;
  std::vector<Returned> returned_;
};

Run::Run(const Program& program, Context& context)
    : slots_(program.slots()), places_(program.values() + 1, Place{nullptr, true}), numbers_(program.values()) {
  std::vector<Tensor<const float>> inputs;
  inputs.reserve(program.inputs());
  for (std::size_t i = 0; i < program.inputs(); ++i) {
    inputs.push_back(context.input<float>(i));
    require(inputs.back().given(), "an input that the program has is left out");
  }
  shape_ = broadcast(inputs);
  elements_ = count(shape_);
  const std::size_t outputs = context.outputs();
  require(outputs <= program.outputs().size(), "the program has fewer outputs than the node");
  for (std::size_t i = 0; i < outputs; ++i) {
    const auto output = context.output<float>(i, shape_);
    if (output.data) returned_.push_back({program.outputs()[i], output.data});
  }
  if (elements_ == 0 || returned_.empty()) {
    elements_ = 0;
    return;
  }
  for (std::size_t i = 0; i < program.inputs(); ++i) read(i, inputs[i]);
  for (std::size_t i = 0; i < program.constants().size(); ++i) {
    float& number = numbers_[program.inputs() + i];
    number = program.constants()[i];
    places_[program.inputs() + i] = {&number, true};
  }
  order(program);
  choose_blocks();
}

void Run::read(std::size_t input, const Tensor<const float>& tensor) {
  const Reading how = reading(tensor.shape, shape_);
  if (how.one_number()) {
    // Copied, as an output may lie there.
    numbers_[input] = *tensor.data;
    places_[input] = {&numbers_[input], true};
    return;
  }
  places_[input].fixed = false;
  varying_.push_back({input, tensor.data, how, how.in_place() ? none : slots_++});
}

// Computes what is the same for all elements; the other instructions become steps.
void Run::order(const Program& program) {
  for (const Instruction& instruction : program.instructions()) {
    const auto& [a, b, c] = instruction.operands;
    const Operation& operation = instruction.operation == &elementwise::operation(Code::Pow) && places_[b].fixed
                                     ? power_of(*places_[b].data)
                                     : *instruction.operation;
    if (places_[a].fixed && places_[b].fixed && places_[c].fixed) {
      float& number = numbers_[instruction.result];
      operation.loops[7](1, places_[a].data, places_[b].data, places_[c].data, &number);
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
      if (output.value == steps_[i].instruction->result && !read_after_writing(output, i)) {
        steps_[i].output = output.data;
        break;
      }
}

bool Run::read_after_writing(const Returned& output, std::size_t writer) const {
  for (const Varying& input : varying_) {
    if (input.data != output.data) continue;
    require(input.slot == none, "an output may not lie in the memory of an input of another shape");
    for (const Returned& other : returned_)
      if (other.value == input.value) return true;
    for (std::size_t i = writer + 1; i < steps_.size(); ++i)
      for (const std::size_t operand : steps_[i].instruction->operands)
        if (operand == input.value) return true;
  }
  return false;
}

// Rows are what lies side by side in all inputs but those with short runs, which are gathered.
void Run::choose_blocks() {
  row_ = elements_;
  std::size_t streams = slots_ + returned_.size();
  for (const Varying& input : varying_) {
    if (input.reading.run() >= least_block) row_ = std::min(row_, input.reading.run());
    streams += input.slot == none;
  }
  block_ = std::clamp(cache / streams, least_block, most_block);
  pieces_ = (row_ + block_ - 1) / block_;
  const std::size_t piece = (row_ + pieces_ - 1) / pieces_;
  block_ = (piece + lanes - 1) / lanes * lanes;
  pieces_ = (row_ + block_ - 1) / block_;
  stride_ = block_ + lanes;
}

void Run::compute(const Threads& threads) const {
  if (elements_ == 0) return;
  const std::size_t blocks = elements_ / row_ * pieces_;
  threads.ranges(blocks, 1 + least_work / (block_ * (cost_ + 1)), [&](std::size_t index, std::size_t end) {
    thread_local Scratch scratch;
    float* const memory = scratch.floats(slots_ * stride_);
    std::vector<Place> places = places_;
    for (; index < end; ++index) {
      const std::size_t begin = index % pieces_ * block_;
      block(index / pieces_ * row_ + begin, std::min(block_, row_ - begin), places.data(), memory);
    }
  });
}

void Run::block(std::size_t begin, std::size_t n, Place* places, float* memory) const {
  for (const Varying& input : varying_) {
    Place& place = places[input.value];
    if (input.slot == none) {
      place = {input.data + begin, false};
      continue;
    }
    const std::size_t run = input.reading.run(), within = begin % run;
    if (within + n <= run) {
      const float* const first = input.data + input.reading.place(begin / run);
      const bool moves = input.reading.axes[0].moves;
      place = {moves ? first + within : first, !moves};
      continue;
    }
    float* const slot = memory + input.slot * stride_;
    input.reading.gather(input.data, begin, n, slot);
    place = {slot, false};
  }
  for (const Step& step : steps_) {
    const Instruction& instruction = *step.instruction;
    const Place a = places[instruction.operands[0]], b = places[instruction.operands[1]],
                c = places[instruction.operands[2]];
    const unsigned fixed = a.fixed | b.fixed << 1 | c.fixed << 2;
    const bool one = fixed == 7;
    float* const to = step.output && !one ? step.output + begin : memory + instruction.slot * stride_;
    (*step.loops)[fixed](one ? 1 : n, a.data, b.data, c.data, to);
    places[instruction.result] = {to, one};
  }
  // The first output last: it may lie in the memory of an input that another one returns.
  for (std::size_t i = returned_.size(); i-- > 0;) {
    const Place place = places[returned_[i].value];
    float* const to = returned_[i].data + begin;
    if (place.fixed)
      std::fill_n(to, n, *place.data);
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
