// A vector holds one position of as many channels as it has lanes: planes are turned over on the way in and out, which
// costs less than half of what it saves for rows of any length and stride.
#include "convolution/depthwise.h"

#include <algorithm>

#include "core/scratch.h"
#include "convolution/transpose.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

namespace {

constexpr int64_t n = lanes;
constexpr int64_t band_floats = 32 * 1024;  // of the inputs of some rows of outputs

// The part of the planes of n channels that windows read, padding included: [rows][columns][n].
struct Frame {
  int64_t rows, columns;
  int64_t top, left;  // row and column of x that the first ones are
  int64_t size() const { return rows * columns * n; }
};

// The frame of output rows [first, last).
Frame frame_of(const Convolution& c, int64_t first, int64_t last) {
  const int64_t rows = (last - first - 1) * c.stride[1] + (c.kernel[1] - 1) * c.dilation[1] + 1;
  const int64_t columns = (c.out[2] - 1) * c.stride[2] + (c.kernel[2] - 1) * c.dilation[2] + 1;
  return {rows, columns, first * c.stride[1] - c.pad[1], -c.pad[2]};
}

// Where x and a frame overlap: rows and columns of x.
struct Overlap {
  int64_t top, bottom, left, right;
};

Overlap overlap_of(const Convolution& c, const Frame& frame) {
  const int64_t bottom = std::min(c.in[1], frame.top + frame.rows);
  const int64_t right = std::min(c.in[2], frame.left + frame.columns);
  return {std::max<int64_t>(frame.top, 0), bottom, std::max<int64_t>(frame.left, 0), right};
}

// Calls each(row of x, its first column, that place in the frame) and turns over what lies in between, row by row, or
// whole planes at once where rows are short.
void read_frame(const Convolution& c, const Frame& frame, const float* x, int64_t channels, float* to) {
  const Overlap o = overlap_of(c, frame);
  const int64_t plane = volume(c.in);
  if (o.bottom - o.top < frame.rows || o.right - o.left < frame.columns) std::fill_n(to, frame.size(), 0.f);
  if (o.bottom <= o.top || o.right <= o.left) return;
  auto at = [&](int64_t row, int64_t column) {
    return to + ((row - frame.top) * frame.columns + column - frame.left) * n;
  };
  if (o.left == 0 && o.right == c.in[2] && c.in[2] < n) {
    int64_t row = o.top, column = 0;
    transpose_to<true>(x + o.top * c.in[2], plane, channels, (o.bottom - o.top) * c.in[2], [&](int64_t) {
      float* const place = at(row, column);
      if (++column == c.in[2]) column = 0, ++row;
      return place;
    });
    return;
  }
  for (int64_t row = o.top; row < o.bottom; ++row)
    transpose(x + row * c.in[2] + o.left, plane, channels, o.right - o.left, at(row, o.left), n);
}

// Writes a frame over all of x; what is in no frame becomes zero.
void write_frame(const Convolution& c, const Frame& frame, const float* from, int64_t channels, float* x) {
  thread_local Scratch memory;
  const Overlap o = overlap_of(c, frame);
  const int64_t plane = volume(c.in);
  float* const flat = memory.floats(plane * n);
  if (o.top > 0 || o.bottom < c.in[1] || o.left > 0 || o.right < c.in[2]) std::fill_n(flat, plane * n, 0.f);
  for (int64_t row = o.top; row < o.bottom; ++row)
    if (o.right > o.left)
      std::copy_n(from + ((row - frame.top) * frame.columns + o.left - frame.left) * n, (o.right - o.left) * n,
                  flat + (row * c.in[2] + o.left) * n);
  for (int64_t p = 0; p < plane; p += n)
    transpose_to<false>(flat + p * n, n, std::min(n, plane - p), channels, [&](int64_t k) { return x + k * plane + p; });
}

// Filters of n channels: [tap][n].
void read_filters(const Convolution& c, const float* w, int64_t channels, float* to) {
  const int64_t taps = volume(c.kernel);
  transpose(w, taps, channels, taps, to, n);
}

// Outputs of all columns of `rows` rows of outputs: y = bias + sum over taps. K: size of a square kernel, 0 for others.
template <int K>
void filter(const Convolution& c, const Frame& frame, const float* x, const float* w, vfloat bias, int64_t rows, float* y) {
  const int64_t height = K ? K : c.kernel[1], width = K ? K : c.kernel[2];
  vfloat taps[K ? K * K : 1];
  if constexpr (K > 0)
    for (int t = 0; t < K * K; ++t) taps[t] = load(w + t * n);
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < c.out[2]; ++j, y += n) {
      const float* const at = x + (i * c.stride[1] * frame.columns + j * c.stride[2]) * n;
      vfloat sum = bias;
#pragma GCC unroll 8
      for (int64_t a = 0; a < height; ++a)
#pragma GCC unroll 8
        for (int64_t b = 0; b < width; ++b) {
          const vfloat value = load(at + (a * c.dilation[1] * frame.columns + b * c.dilation[2]) * n);
          if constexpr (K > 0)
            sum += value * taps[a * K + b];
          else
            sum += value * load(w + (a * width + b) * n);
        }
      store(y, sum);
    }
}

// Adds what the outputs pass back to inputs and filters.
template <int K, bool Inputs, bool Filters>
void unfilter(const Convolution& c, const Frame& frame, const float* dy, const float* x, const float* w, float* dx, float* dw) {
  const int64_t height = K ? K : c.kernel[1], width = K ? K : c.kernel[2];
  vfloat taps[K ? K * K : 1], sums[K ? K * K : 1];
  if constexpr (K > 0)
    for (int t = 0; t < K * K; ++t) taps[t] = Inputs ? load(w + t * n) : vfloat{}, sums[t] = vfloat{};
  for (int64_t i = 0; i < c.out[1]; ++i)
    for (int64_t j = 0; j < c.out[2]; ++j, dy += n) {
      const int64_t place = (i * c.stride[1] * frame.columns + j * c.stride[2]) * n;
      const vfloat g = load(dy);
#pragma GCC unroll 8
      for (int64_t a = 0; a < height; ++a)
#pragma GCC unroll 8
        for (int64_t b = 0; b < width; ++b) {
          const int64_t at = place + (a * c.dilation[1] * frame.columns + b * c.dilation[2]) * n, t = a * width + b;
          if constexpr (K > 0) {
            if constexpr (Inputs) store(dx + at, load(dx + at) + g * taps[t]);
            if constexpr (Filters) sums[t] += g * load(x + at);
          } else {
            if constexpr (Inputs) store(dx + at, load(dx + at) + g * load(w + t * n));
            if constexpr (Filters) store(dw + t * n, load(dw + t * n) + g * load(x + at));
          }
        }
    }
  if constexpr (K > 0 && Filters)
    for (int t = 0; t < K * K; ++t) store(dw + t * n, load(dw + t * n) + sums[t]);
}

template <bool Inputs, bool Filters>
void unfilter(const Convolution& c, const Frame& frame, const float* dy, const float* x, const float* w, float* dx, float* dw) {
  if (c.kernel[1] == 3 && c.kernel[2] == 3)
    unfilter<3, Inputs, Filters>(c, frame, dy, x, w, dx, dw);
  else
    unfilter<0, Inputs, Filters>(c, frame, dy, x, w, dx, dw);
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
  read_frame(c, frame, x + (sample * c.groups + channel) * volume(c.in), channels, inputs);
  const vfloat start = bias ? load(bias + channel, channels) : vfloat{};
  if (c.kernel[1] == 3 && c.kernel[2] == 3)
    filter<3>(c, frame, inputs, filters, start, last - first, outputs);
  else
    filter<0>(c, frame, inputs, filters, start, last - first, outputs);
  float* const to = y + (sample * c.groups + channel) * positions + first * c.out[2];
  const int64_t count = (last - first) * c.out[2];
  for (int64_t p = 0; p < count; p += n)
    transpose_to<false>(outputs + p * n, n, std::min(n, count - p), channels, [&](int64_t k) { return to + k * positions + p; });
}

// The gradients of a block of channels over some samples; sums: [taps + 1][n], the last those of dy.
void gradient_task(const Convolution& c, const float* dy, const float* x, const float* w, int64_t block, int64_t first,
                   int64_t last, float* dx, float* sums, bool filters_wanted, bool bias_wanted) {
  thread_local Scratch input_memory, output_memory, gradient_memory, filter_memory;
  const int64_t channel = block * n, channels = std::min(n, c.groups - channel);
  const int64_t positions = volume(c.out), plane = volume(c.in), taps = volume(c.kernel);
  const Frame frame = frame_of(c, 0, c.out[1]);
  float* const outputs = output_memory.floats(positions * n);
  float* const filters = filter_memory.floats(taps * n);
  float* const inputs = filters_wanted ? input_memory.floats(frame.size()) : nullptr;
  float* const gradients = dx ? gradient_memory.floats(frame.size()) : nullptr;
  if (dx) read_filters(c, w + channel * taps, channels, filters);
  std::fill_n(sums, (taps + 1) * n, 0.f);
  for (int64_t sample = first; sample < last; ++sample) {
    const int64_t place = sample * c.groups + channel;
    transpose(dy + place * positions, positions, channels, positions, outputs, n);
    if (filters_wanted) read_frame(c, frame, x + place * plane, channels, inputs);
    if (dx) std::fill_n(gradients, frame.size(), 0.f);
    if (dx && filters_wanted)
      unfilter<true, true>(c, frame, outputs, inputs, filters, gradients, sums);
    else if (dx)
      unfilter<true, false>(c, frame, outputs, inputs, filters, gradients, sums);
    else if (filters_wanted)
      unfilter<false, true>(c, frame, outputs, inputs, filters, gradients, sums);
    if (dx) write_frame(c, frame, gradients, channels, dx + place * plane);
    if (!bias_wanted) continue;
    vfloat total{};
    for (int64_t p = 0; p < positions; ++p) total += load(outputs + p * n);
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
  const int64_t rows = std::clamp<int64_t>(band_floats / per_row, 1, c.out[1]), bands = (c.out[1] + rows - 1) / rows;
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
