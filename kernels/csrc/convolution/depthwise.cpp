// A vector holds one position of as many channels as it has lanes: planes are turned over on the way in and out, which
// costs less than half of what it saves for rows of any length and stride.
#include "convolution/depthwise.h"

#include <algorithm>
#include <numeric>
#include <type_traits>
#include <vector>

#include "core/scratch.h"
#include "core/transpose.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t n = lanes;
// Of the inputs of some rows of outputs, which the first-level cache holds; where rows are long, more of them, as bands
// read the rows between them twice.
constexpr int64_t band_floats = 8 * 1024, most_band_floats = 32 * 1024;
constexpr int64_t band_places = 384;  // of the gradients of some rows of inputs, which the first-level cache holds

// A part of the planes of n channels, with zeros where there is none of them: [rows][columns][n].
struct Frame {
  int64_t rows, columns;
  int64_t top, left;  // row and column of the planes that the first ones are
  int64_t size() const { return rows * columns * n; }
};

// What windows of output rows [first, last) read of x.
Frame frame_of(const Convolution& c, int64_t first, int64_t last) {
  const int64_t rows = (last - first - 1) * c.stride[1] + (c.kernel[1] - 1) * c.dilation[1] + 1;
  const int64_t columns = (c.out[2] - 1) * c.stride[2] + (c.kernel[2] - 1) * c.dilation[2] + 1;
  return {rows, columns, first * c.stride[1] - c.pad[1], -c.pad[2]};
}

int64_t floor_of(int64_t a, int64_t b) { return a / b - (a % b < 0); }

// What the gradient of all of x reads of dy.
Frame frame_of_outputs(const Convolution& c) {
  Axes first{}, last{};
  for (const std::size_t axis : {1, 2}) {
    first[axis] = std::min<int64_t>(floor_of(c.pad[axis] - (c.kernel[axis] - 1) * c.dilation[axis], c.stride[axis]), 0);
    last[axis] = std::max(floor_of(c.in[axis] - 1 + c.pad[axis], c.stride[axis]), c.out[axis] - 1);
  }
  return {last[1] - first[1] + 1, last[2] - first[2] + 1, first[1], first[2]};
}

// Turns over the planes [height, width] of n channels into a frame: row by row, or whole planes at once where that
// leaves fewer vectors incomplete.
void read_frame(int64_t height, int64_t width, const Frame& frame, const float* x, int64_t channels, float* to) {
  const int64_t top = std::max<int64_t>(frame.top, 0), bottom = std::min(height, frame.top + frame.rows);
  const int64_t left = std::max<int64_t>(frame.left, 0), right = std::min(width, frame.left + frame.columns);
  const int64_t plane = height * width;
  if (bottom - top < frame.rows || right - left < frame.columns) std::fill_n(to, frame.size(), 0.f);
  if (bottom <= top || right <= left) return;
  if (frame.left == 0 && frame.columns == width)
    return transpose(x + top * width, plane, channels, (bottom - top) * width, to + (top - frame.top) * width * n, n);
  auto at = [&](int64_t row, int64_t column) {
    return to + ((row - frame.top) * frame.columns + column - frame.left) * n;
  };
  if (left == 0 && right == width && (width + n - 1) / n * n > width + width / 2) {
    int64_t row = top, column = 0;
    transpose_to<true>(x + top * width, plane, channels, (bottom - top) * width, [&](int64_t) {
      float* const place = at(row, column);
      if (++column == width) column = 0, ++row;
      return place;
    });
    return;
  }
  for (int64_t row = top; row < bottom; ++row)
    transpose(x + row * width + left, plane, channels, right - left, at(row, left), n);
}

// Filters of n channels: [tap][n].
void read_filters(const Convolution& c, const float* w, int64_t channels, float* to) {
  const int64_t taps = volume(c.kernel);
  transpose(w, taps, channels, taps, to, n);
}

// Vectors in rows and columns, `row` and `column` floats apart.
struct Grid {
  int64_t row, column;
};

constexpr int most_taps = 9;  // whose vectors registers hold

// to = start + the sum over taps t of from[t] * taps[t], over rows and columns; with `more`, to instead of start.
template <int Taps>
void weigh(const float* const* sources, const float* weights, bool more, vfloat start, int64_t rows, int64_t columns, Grid in,
           float* to, Grid out) {
  const float* from[Taps];
  vfloat taps[Taps];
#pragma GCC unroll 16
  for (int t = 0; t < Taps; ++t) from[t] = sources[t], taps[t] = load(weights + t * n);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = i * in.row + j * in.column;
      float* const place = to + i * out.row + j * out.column;
      vfloat sum = more ? load(place) : start;
#pragma GCC unroll 16
      for (int t = 0; t < Taps; ++t) sum += load(from[t] + at) * taps[t];
      store(place, sum);
    }
}

// sums[t] += the sum over rows and columns of from[t] * g.
template <int Taps>
void correlate(const float* const* sources, int64_t rows, int64_t columns, Grid in, const float* g, Grid of_g, float* sums) {
  const float* from[Taps];
  vfloat total[Taps];
#pragma GCC unroll 16
  for (int t = 0; t < Taps; ++t) from[t] = sources[t], total[t] = vfloat{};
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      const int64_t at = i * in.row + j * in.column;
      const vfloat factor = load(g + i * of_g.row + j * of_g.column);
#pragma GCC unroll 16
      for (int t = 0; t < Taps; ++t) total[t] += factor * load(from[t] + at);
    }
#pragma GCC unroll 16
  for (int t = 0; t < Taps; ++t) store(sums + t * n, load(sums + t * n) + total[t]);
}

// Calls task(first tap, constant of their number) for all taps, as many at a time as registers hold.
template <class Task>
void for_taps(std::size_t taps, Task&& task) {
  std::size_t first = 0;
  for (; taps - first > most_taps; first += most_taps) task(first, std::integral_constant<int, most_taps>{});
  switch (taps - first) {
    case 1: return task(first, std::integral_constant<int, 1>{});
    case 2: return task(first, std::integral_constant<int, 2>{});
    case 3: return task(first, std::integral_constant<int, 3>{});
    case 4: return task(first, std::integral_constant<int, 4>{});
    case 5: return task(first, std::integral_constant<int, 5>{});
    case 6: return task(first, std::integral_constant<int, 6>{});
    case 7: return task(first, std::integral_constant<int, 7>{});
    case 8: return task(first, std::integral_constant<int, 8>{});
    case 9: return task(first, std::integral_constant<int, 9>{});
    default: return;
  }
}

// Where the taps of the first window find its values in a frame of x; until the thread asks again.
const std::vector<const float*>& places_of_taps(const Convolution& c, const Frame& frame, const float* x) {
  thread_local std::vector<const float*> places;
  places.clear();
  for (int64_t a = 0; a < c.kernel[1]; ++a)
    for (int64_t b = 0; b < c.kernel[2]; ++b)
      places.push_back(x + (a * c.dilation[1] * frame.columns + b * c.dilation[2]) * n);
  return places;
}

Grid windows(const Convolution& c, const Frame& frame) {
  return {c.stride[1] * frame.columns * n, c.stride[2] * n};
}

// The gradient of rows [first, last) of x, from a frame of dy: [row][column][n].
//
// Which taps read a place of x depends on its row and column modulo the strides; places where these are the same are
// computed at once. A tap a of row r reads what lies in row (r + pad - a * dilation) / stride of dy.
void unfilter(const Convolution& c, const Frame& frame, const float* dy, const float* filters, int64_t first, int64_t last,
              float* dx) {
  thread_local std::vector<const float*> sources;
  thread_local Scratch memory;
  float* const taps = memory.floats(volume(c.kernel) * n);
  for (int64_t r = first; r < std::min(first + c.stride[1], last); ++r)
    for (int64_t q = 0; q < std::min(c.stride[2], c.in[2]); ++q) {
      sources.clear();
      // From the last tap to the first: in the order of the outputs.
      for (int64_t a = c.kernel[1] - 1; a >= 0; --a) {
        const int64_t row = r + c.pad[1] - a * c.dilation[1];
        if (row % c.stride[1] != 0) continue;
        for (int64_t b = c.kernel[2] - 1; b >= 0; --b) {
          const int64_t column = q + c.pad[2] - b * c.dilation[2];
          if (column % c.stride[2] != 0) continue;
          store(taps + static_cast<int64_t>(sources.size()) * n, load(filters + (a * c.kernel[2] + b) * n));
          const int64_t place = (row / c.stride[1] - frame.top) * frame.columns + column / c.stride[2] - frame.left;
          sources.push_back(dy + place * n);
        }
      }
      const int64_t rows = (last - r + c.stride[1] - 1) / c.stride[1], columns = (c.in[2] - q + c.stride[2] - 1) / c.stride[2];
      const Grid out{c.stride[1] * c.in[2] * n, c.stride[2] * n};
      float* const to = dx + ((r - first) * c.in[2] + q) * n;
      for (int64_t i = 0; i < rows && sources.empty(); ++i)
        for (int64_t j = 0; j < columns; ++j) store(to + i * out.row + j * out.column, vfloat{});
      for_taps(sources.size(), [&](std::size_t t, auto count) {
        weigh<count>(sources.data() + t, taps + static_cast<int64_t>(t) * n, t > 0, vfloat{}, rows, columns,
                     {frame.columns * n, n}, to, out);
      });
    }
}

// The gradient of the planes of x, some rows at a time, which the first-level cache holds: as many as end with a complete
// vector of the plane, where rows are short.
void write_input_gradient(const Convolution& c, const Frame& frame, const float* dy, const float* filters, int64_t channels,
                          float* x) {
  thread_local Scratch memory;
  const int64_t plane = volume(c.in), even = n / std::gcd(n, c.in[2]);
  if (plane == 0) return;
  int64_t band = std::max<int64_t>(band_places / c.in[2], 1);
  if (band >= even) band -= band % even;
  float* const rows = memory.floats(std::min(band, c.in[1]) * c.in[2] * n);
  for (int64_t first = 0; first < c.in[1]; first += band) {
    const int64_t last = std::min(first + band, c.in[1]), count = (last - first) * c.in[2];
    unfilter(c, frame, dy, filters, first, last, rows);
    for (int64_t p = 0; p < count; p += n)
      transpose_to<false>(rows + p * n, n, std::min(n, count - p), channels,
                          [&](int64_t k) { return x + k * plane + first * c.in[2] + p; });
  }
}

void forward_task(const Convolution& c, const float* x, const float* w, const float* bias, int64_t sample, int64_t block,
                  int64_t first, int64_t last, float* y) {
  thread_local Scratch input_memory, output_memory, filter_memory;
  const int64_t channel = block * n, channels = std::min(n, c.groups - channel), positions = volume(c.out);
  const Frame frame = frame_of(c, first, last);
  float* const inputs = input_memory.floats(frame.size());
  float* const outputs = output_memory.floats((last - first) * c.out[2] * n);
  float* const filters = filter_memory.floats(volume(c.kernel) * n);
  read_filters(c, w + channel * volume(c.kernel), channels, filters);
  read_frame(c.in[1], c.in[2], frame, x + (sample * c.groups + channel) * volume(c.in), channels, inputs);
  const vfloat start = bias ? load(bias + channel, channels) : vfloat{};
  const auto& places = places_of_taps(c, frame, inputs);
  for_taps(places.size(), [&](std::size_t t, auto taps) {
    weigh<taps>(places.data() + t, filters + static_cast<int64_t>(t) * n, t > 0, start, last - first, c.out[2],
                windows(c, frame), outputs, {c.out[2] * n, n});
  });
  float* const to = y + (sample * c.groups + channel) * positions + first * c.out[2];
  const int64_t count = (last - first) * c.out[2];
  for (int64_t p = 0; p < count; p += n)
    transpose_to<false>(outputs + p * n, n, std::min(n, count - p), channels, [&](int64_t k) { return to + k * positions + p; });
}

// The gradients of a block of channels over some samples; sums: [taps + 1][n], the last those of dy.
void gradient_task(const Convolution& c, const float* dy, const float* x, const float* w, int64_t block, int64_t first,
                   int64_t last, float* dx, float* sums, bool filters_wanted, bool bias_wanted) {
  thread_local Scratch input_memory, output_memory, filter_memory;
  const int64_t channel = block * n, channels = std::min(n, c.groups - channel);
  const int64_t taps = volume(c.kernel);
  const Frame frame = frame_of(c, 0, c.out[1]);
  const Frame of_outputs = dx ? frame_of_outputs(c) : Frame{c.out[1], c.out[2], 0, 0};
  float* const outputs = output_memory.floats(of_outputs.size());
  const float* const first_output = outputs - (of_outputs.top * of_outputs.columns + of_outputs.left) * n;
  const Grid output_grid{of_outputs.columns * n, n};
  float* const filters = filter_memory.floats(taps * n);
  float* const inputs = filters_wanted ? input_memory.floats(frame.size()) : nullptr;
  if (dx) read_filters(c, w + channel * taps, channels, filters);
  std::fill_n(sums, (taps + 1) * n, 0.f);
  for (int64_t sample = first; sample < last; ++sample) {
    const int64_t place = sample * c.groups + channel;
    read_frame(c.out[1], c.out[2], of_outputs, dy + place * volume(c.out), channels, outputs);
    if (filters_wanted) {
      read_frame(c.in[1], c.in[2], frame, x + place * volume(c.in), channels, inputs);
      const auto& places = places_of_taps(c, frame, inputs);
      for_taps(places.size(), [&](std::size_t t, auto count) {
        correlate<count>(places.data() + t, c.out[1], c.out[2], windows(c, frame), first_output, output_grid,
                         sums + static_cast<int64_t>(t) * n);
      });
    }
    if (dx) write_input_gradient(c, of_outputs, outputs, filters, channels, dx + place * volume(c.in));
    if (!bias_wanted) continue;
    vfloat total{};
    for (int64_t i = 0; i < c.out[1]; ++i)
      for (int64_t j = 0; j < c.out[2]; ++j) total += load(first_output + i * output_grid.row + j * n);
    store(sums + taps * n, load(sums + taps * n) + total);
  }
}

}  // namespace

bool is_depthwise(const Convolution& c) {
  return c.channels == 1 && c.rows == 1 && c.in[0] == 1 && c.kernel[0] == 1 && c.out[0] == 1 && c.pad[0] == 0 && volume(c.out) > 0;
}

void depthwise_forward(
    const Threads& threads, const Convolution& c, const float* x, const float* w, const float* bias, float* y) {
  const int64_t blocks = (c.groups + n - 1) / n, per_row = frame_of(c, 0, 1).columns * c.stride[1] * n;
  const int64_t twice = (c.kernel[1] - 1) * c.dilation[1] / c.stride[1];
  const int64_t wanted = std::max(band_floats / per_row, std::min(4 * twice, most_band_floats / per_row));
  const int64_t rows = std::clamp<int64_t>(wanted, 1, c.out[1]), bands = (c.out[1] + rows - 1) / rows;
  threads.run(static_cast<std::size_t>(c.batch * blocks * bands), [&](std::size_t task) {
    const auto index = static_cast<int64_t>(task);
    const int64_t band = index % bands, block = index / bands % blocks, sample = index / bands / blocks;
    forward_task(c, x, w, bias, sample, block, c.out[1] * band / bands, c.out[1] * (band + 1) / bands, y);
  });
}

void depthwise_gradient(const Threads& threads, const Convolution& c, const float* dy, const float* x, const float* w,
                        float* dx, float* dw, float* db) {
  thread_local Scratch memory;
  const int64_t blocks = (c.groups + n - 1) / n, taps = volume(c.kernel);
  const int64_t splits = std::clamp<int64_t>((32 + blocks - 1) / blocks, 1, std::max<int64_t>(c.batch, 1));
  const int64_t size = (taps + 1) * n;
  float* const sums = memory.floats(blocks * splits * size);
  threads.run(static_cast<std::size_t>(blocks * splits), [&](std::size_t task) {
    const int64_t block = static_cast<int64_t>(task) / splits, split = static_cast<int64_t>(task) % splits;
    gradient_task(c, dy, x, w, block, c.batch * split / splits, c.batch * (split + 1) / splits, dx,
                  sums + static_cast<int64_t>(task) * size, dw != nullptr, db != nullptr);
  });
  for (int64_t channel = 0; channel < c.groups; ++channel)
    for (int64_t tap = 0; tap <= taps; ++tap) {
      float* const to = tap < taps ? (dw ? dw + channel * taps + tap : nullptr) : (db ? db + channel : nullptr);
      if (to == nullptr) continue;
      const float* from = sums + channel / n * splits * size + tap * n + channel % n;
      *to = 0.f;
      for (int64_t split = 0; split < splits; ++split) *to += from[split * size];
    }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
