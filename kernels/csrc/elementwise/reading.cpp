#include "elementwise/reading.h"

#include <algorithm>
#include <cstring>

#include "core/rows.h"
#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {
namespace {

// The axes of a shape before and behind a place that is counted from the end.
Shape first_axes(const Shape& shape, std::size_t last) {
  return {shape.begin(), shape.end() - static_cast<std::ptrdiff_t>(std::min(last, shape.size()))};
}
Shape last_axes(const Shape& shape, std::size_t last) {
  return {shape.end() - static_cast<std::ptrdiff_t>(std::min(last, shape.size())), shape.end()};
}

void copy(const float* from, std::size_t n, float* to) {
  vectors(n, [=](std::size_t i, auto extent) { store(to + i, load(from + i, extent), extent); });
}
// Up to a vector behind them may be written, too.
void fill(float* to, std::size_t n, vfloat value) {
  for (std::size_t i = 0; i < n; i += lanes) store(to + i, value);
}

}  // namespace

Shape broadcast(const std::vector<Tensor<const float>>& tensors, const Columns& columns) {
  std::size_t rank = 0;
  for (const auto& tensor : tensors) rank = std::max(rank, tensor.shape.size());
  require(rank >= columns.axis, "no input has the axis of the columns");
  Shape all(rank, 1);
  for (const auto& [data, shape] : tensors)
    for (std::size_t i = 0; i < shape.size(); ++i) {
      if (shape.size() - i == columns.axis) continue;
      int64_t& size = all[rank - shape.size() + i];
      require(shape[i] == size || shape[i] == 1 || size == 1, "the shapes of the inputs must broadcast");
      if (size == 1) size = shape[i];
    }
  if (columns.axis) all[rank - columns.axis] = static_cast<int64_t>(columns.width);
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

RowReading::RowReading(const Shape& input, const Shape& output, const Columns& columns, int64_t offset)
    : outer_(reading(first_axes(input, columns.axis), first_axes(output, columns.axis))),
      row_(count(last_axes(output, columns.axis))) {
  if (outer_.axes.empty()) outer_.axes.push_back({1, true});
  const Shape own = last_axes(input, columns.axis);
  const bool has_columns = own.size() == columns.axis && (own[0] != 1 || offset != 0);
  const int64_t width = static_cast<int64_t>(columns.width), size = has_columns ? own[0] : 1;
  const std::size_t inner = row_ / columns.width;
  stride_ = count(own);
  require(stride_ >= 1, "an input has no columns");
  if (stride_ == 1 && !has_columns) {
    kind_ = Kind::Fill;
  } else if (has_columns && stride_ == static_cast<std::size_t>(size) * inner) {
    const int64_t lead = std::clamp<int64_t>(-offset, 0, width), start = std::clamp<int64_t>(offset, 0, size);
    lead_ = static_cast<std::size_t>(lead) * inner;
    start_ = static_cast<std::size_t>(start) * inner;
    length_ = static_cast<std::size_t>(std::min(width - lead, size - start)) * inner;
  } else {
    kind_ = Kind::Table;
    table_.reserve(row_);
    for (std::size_t i = 0; i < row_; ++i) table_.push_back(source(i, own, output, has_columns ? columns.axis : 0, offset));
  }
}

int64_t RowReading::source(std::size_t place, const Shape& own, const Shape& output, std::size_t moving, int64_t offset) {
  int64_t all = 0, step = 1;
  for (std::size_t axis = 1; axis <= own.size(); ++axis) {  // from the end
    const auto whole = static_cast<std::size_t>(output[output.size() - axis]);
    const int64_t size = own[own.size() - axis], at = static_cast<int64_t>(place % whole) + (axis == moving ? offset : 0);
    if (axis == moving && (at < 0 || at >= size)) return -1;
    if (size > 1) all += at * step;
    step *= size;
    place /= whole;
  }
  return all;
}

void RowReading::write(const float* from, float* to) const {
  switch (kind_) {
    case Kind::Fill:
      return fill(to, row_, splat(*from));
    case Kind::Table:
      for (std::size_t i = 0; i < row_; ++i) to[i] = table_[i] < 0 ? 0.f : from[table_[i]];
      return;
    case Kind::Copy:
      if (lead_ == 0 && row_ <= lanes) return store(to, load_some(from + start_, length_));
      fill(to, lead_, vfloat{});
      copy(from + start_, length_, to + lead_);
      fill(to + lead_ + length_, row_ - lead_ - length_, vfloat{});
  }
}

void RowReading::gather(const float* from, std::size_t first, std::size_t count, float* to) const {
  const std::size_t run = outer_.run(), step = outer_.axes[0].moves ? stride_ : 0;
  while (count > 0) {
    const std::size_t within = first % run, n = std::min(count, run - within);
    const float* row = from + outer_.place(first / run) * stride_ + within * step;
    for (std::size_t i = 0; i < n; ++i, row += step, to += row_) write(row, to);
    first += n;
    count -= n;
  }
}

void write_rows(const float* from, std::size_t row, std::size_t kept, std::size_t count, float* to) {
  for (std::size_t room = count * kept; count > 0; --count, from += row, to += kept, room -= kept)
    // What is too much is written again by the next row.
    if (kept <= lanes && room >= lanes)
      store(to, load(from));
    else
      copy(from, kept, to);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
