// A chain of elementwise operations in one pass over memory: a small program that runs over one block after the other,
// whose intermediate results stay in the first-level cache.
#include <algorithm>
#include <cstring>
#include <vector>

#include "core/op.h"
#include "core/rows.h"
#include "core/scratch.h"
#include "elementwise/run.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace elementwise {
namespace {

// Numbers that are added up in float at most.
constexpr std::size_t most_short_sum = 512;
// The work that is worth a thread of its own, in additions.
constexpr std::size_t least_work = 131072;

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

float short_sum(const float* from, std::size_t n) {
  vfloat parts[4]{};
  std::size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (std::size_t part = 0; part < 4; ++part) parts[part] += load(from + i + part * lanes);
  for (; i + lanes <= n; i += lanes) parts[0] += load(from + i);
  if (i < n) parts[1] += load(from + i, n - i);
  return sum_of_lanes((parts[0] + parts[1]) + (parts[2] + parts[3]));
}

struct Largest {
  static constexpr Reduction reduction = Reduction::Max;
  static vfloat of(vfloat a, vfloat b) { return larger(a, b); }
};
struct Smallest {
  static constexpr Reduction reduction = Reduction::Min;
  static vfloat of(vfloat a, vfloat b) { return smaller(a, b); }
};

template <class Pick, int half = lanes / 2>
float picked_of_lanes(vfloat v) {
  v = Pick::of(v, shuffle(v, v, indices([](int i) { return (i + half) % static_cast<int>(lanes); })));
  if constexpr (half > 1) {
    return picked_of_lanes<Pick, half / 2>(v);
  } else {
    return v[0] + 0.f;  // 0 of -0
  }
}

template <class Pick>
float picked(const float* from, std::size_t n) {
  const vfloat nothing = splat(of_nothing(Pick::reduction));
  vfloat parts[4] = {nothing, nothing, nothing, nothing};
  std::size_t i = 0;
  for (; i + 4 * lanes <= n; i += 4 * lanes)
    for (std::size_t part = 0; part < 4; ++part) parts[part] = Pick::of(parts[part], load(from + i + part * lanes));
  for (; i + lanes <= n; i += lanes) parts[0] = Pick::of(parts[0], load(from + i));
  if (i < n) parts[1] = Pick::of(parts[1], select(among_first(n - i), load(from + i, n - i), nothing));
  return picked_of_lanes<Pick>(Pick::of(Pick::of(parts[0], parts[1]), Pick::of(parts[2], parts[3])));
}

double reduction_of(Reduction reduction, const Place& place, std::size_t n) {
  if (!is_sum(reduction)) {
    const std::size_t numbers = place.fixed ? 1 : n;
    return reduction == Reduction::Max ? picked<Largest>(place.data, numbers) : picked<Smallest>(place.data, numbers);
  }
  if (place.fixed) return static_cast<double>(*place.data) * static_cast<double>(n);
  double sum = 0;
  for (std::size_t i = 0; i < n; i += most_short_sum) sum += short_sum(place.data + i, std::min(n - i, most_short_sum));
  return sum;
}

// Sums of rows of at most a vector.
void sum_rows(const float* from, std::size_t row, std::size_t rows, float* to) {
  for (std::size_t i = 0; i < rows; ++i) to[i] = sum_of_lanes(load(from + i * row, row));
}

// Joins a number with the reduction of others.
double joined(Reduction reduction, double all, double one) {
  if (is_sum(reduction)) return all + one;
  return !(one == one) || (reduction == Reduction::Max ? one > all : one < all) ? one : all;
}

void join(Reduction reduction, float* all, const Place& place, std::size_t n) {
  const auto each = [=](auto of) {
    vectors(n, [=](std::size_t i, auto extent) {
      const vfloat one = place.fixed ? splat(*place.data) : load(place.data + i, extent);
      store(all + i, of(load(all + i, extent), one), extent);
    });
  };
  if (is_sum(reduction)) return each([](vfloat a, vfloat b) { return a + b; });
  if (reduction == Reduction::Max) return each([](vfloat a, vfloat b) { return larger(a, b); });
  each([](vfloat a, vfloat b) { return smaller(a, b); });
}

}  // namespace

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
  std::vector<Reduction> reduced;
  for (const Returned& output : returned_)
    if (output.is_reduced()) reduced.push_back(output.output->reduction);
  std::vector<std::vector<ColumnSums>> sums(pieces_ * parts);
  threads.ranges(sums.size(), 1, [&](std::size_t index, std::size_t end) {
    thread_local Scratch scratch;
    float* const memory = scratch.floats(slots_ * stride_);
    std::vector<Place> places = places_;
    for (; index < end; ++index) {
      const std::size_t within = index / parts * block_, part = index % parts;
      std::vector<ColumnSums>& all = sums[index];
      all.assign(reduced.size(), ColumnSums(block_));
      for (std::size_t i = 0; i < all.size(); ++i)
        if (!is_sum(reduced[i])) std::fill_n(all[i].block(), block_, of_nothing(reduced[i]));
      for (std::size_t row = rows * part / parts; row < rows * (part + 1) / parts; ++row) {
        const std::size_t begin = row * row_ + within;
        if (begin >= elements_) break;
        block(begin, std::min({block_, row_ - within, elements_ - begin}), places.data(), memory, all.data());
        for (std::size_t i = 0; i < all.size(); ++i)
          if (is_sum(reduced[i])) all[i].row_done();
      }
      for (ColumnSums& output : all) output.flush();
    }
  });
  std::size_t place = 0;
  for (Returned& output : returned_)
    if (output.is_reduced()) finish_columns(output, place++, sums);
}

void Run::finish_columns(Returned& returned, std::size_t place, const std::vector<std::vector<ColumnSums>>& sums) const {
  const std::size_t columns = elements_ / reduced_, parts = sums.size() / pieces_;
  const Reduction reduction = returned.output->reduction;
  std::vector<double> totals(columns, is_sum(reduction) ? 0 : of_nothing(reduction));
  for (std::size_t i = 0; i < sums.size(); ++i) {
    const std::size_t begin = i / parts * block_, n = std::min(block_, row_ - begin);
    const double* const from = sums[i][place].total().data();
    std::size_t column = begin % columns;
    for (std::size_t j = 0; j < n; ++j, ++column) {
      if (column == columns) column = 0;
      totals[column] = joined(reduction, totals[column], from[j]);
    }
  }
  const double divisor = reduction == Reduction::Mean ? static_cast<double>(reduced_) : 1;
  const std::size_t kept = columns_row_ == 1 ? 1 : returned.output->columns * static_cast<std::size_t>(inner_);
  float* to = returned.data;
  for (std::size_t row = 0; row < columns; row += columns_row_)
    for (std::size_t j = 0; j < kept; ++j) *to++ = static_cast<float>(totals[row + j] / divisor);
}

void Run::finish_rows() {
  for (Returned& returned : returned_) {
    const Reduction reduction = returned.output->reduction;
    const double divisor = reduction == Reduction::Mean ? static_cast<double>(reduced_) : 1;
    for (std::size_t i = 0; i < returned.partial.size() / pieces_; ++i) {
      double total = is_sum(reduction) ? 0 : of_nothing(reduction);
      for (std::size_t piece = 0; piece < pieces_; ++piece)
        total = joined(reduction, total, returned.partial[i * pieces_ + piece]);
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
    if (input.bools) {
      // As bytes: GCC doesn't vectorize loops that read bools.
      const auto* const bytes = reinterpret_cast<const unsigned char*>(input.bools + begin);
      for (std::size_t i = 0; i < n; ++i) to[i] = bytes[i];
      place = {to, false};
      continue;
    }
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
      if (returned.is_reduced()) join(returned.output->reduction, sums++->block(), at(places, returned.output->from), n);
  // The first output last: it may lie in the memory of an input that another one returns.
  for (std::size_t i = returned_.size(); i-- > 0;)
    if (!(sums && returned_[i].is_reduced())) give(returned_[i], begin, n, at(places, returned_[i].output->from));
}

// Writes a block of an output, or its sums over the last axes.
void Run::give(Returned& returned, std::size_t begin, std::size_t n, Place place) const {
  const Output& output = *returned.output;
  if (!returned.partial.empty()) {
    returned.partial[begin / row_ * pieces_ + begin % row_ / block_] = reduction_of(output.reduction, place, n);
  } else if (returned.is_reduced()) {
    const double divisor = output.reduction == Reduction::Mean ? static_cast<double>(reduced_) : 1;
    float* const to = returned.target() + begin / reduced_;
    if (reduced_ <= lanes && !place.fixed && output.reduction == Reduction::Sum) return sum_rows(place.data, reduced_, n / reduced_, to);
    for (std::size_t i = 0; i < n / reduced_; ++i) {
      to[i] = static_cast<float>(reduction_of(output.reduction, place, reduced_) / divisor);
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

namespace {

struct Elementwise {
  static constexpr const char* name = "Elementwise#_float";
  struct Inputs {
    constexpr Type operator[](std::size_t i) const { return i < Program::most_inputs ? Type::Float : Type::Bool; }
    constexpr std::size_t size() const { return Program::most_inputs + Program::most_bools; }
  };
  static constexpr Inputs inputs{};
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
