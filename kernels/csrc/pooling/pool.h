// Pooling of planes by their maxima, and where these were.
#pragma once

#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>

#include "convolution/geometry.h"
#include "core/op.h"
#include "core/scratch.h"
#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Pooling of one plane, three axes; the first maximum of a window counts, or the last NaN, as in PyTorch (2.13).
struct Pool {
  Pool(const Shape& x, const std::vector<int64_t>& kernel_shape, const std::vector<int64_t>& strides,
       const std::vector<int64_t>& pads) {
    const std::size_t rank = kernel_shape.size();
    require(rank >= 1 && rank <= 3 && x.size() == rank + 2, "x must have as many axes as kernel_shape, and two");
    require(strides.size() == rank && pads.size() == 2 * rank, "strides and pads must fit kernel_shape");
    for (std::size_t i = 0; i < rank; ++i) {
      const std::size_t axis = 3 - rank + i;
      in[axis] = x[i + 2], kernel[axis] = kernel_shape[i], stride[axis] = strides[i], pad[axis] = pads[i];
      require(kernel[axis] > 0 && stride[axis] > 0, "kernel_shape and strides must be positive");
      require(in[axis] > 0, "windows need an input along each axis");
      require(kernel[axis] <= std::numeric_limits<int64_t>::max() / 4, "kernel_shape is too large");
      require(pads[i] >= 0 && pads[i] < kernel[axis] && pads[rank + i] >= 0 && pads[rank + i] < kernel[axis],
              "padding must be smaller than the window");
      const int64_t room = in[axis] + pads[i] + pads[rank + i] - kernel[axis];
      require(room >= 0, "the window is larger than the padded input");
      out[axis] = room / stride[axis] + 1;
    }
  }

  Shape result(const Shape& x) const {
    Shape shape(x.begin(), x.begin() + 2);
    for (std::size_t i = 2; i < x.size(); ++i) shape.push_back(out[3 - x.size() + i]);
    return shape;
  }

  bool halves() const {
    const Axes window{kernel[0], 2, 2}, none{0, 0, 0};
    const bool inside = 2 * out[1] <= in[1] && 2 * out[2] <= in[2];  // no padding behind the last window either
    const bool thin = kernel[0] == 1 ? in[0] == 1 : kernel[0] == 2 && 2 * out[0] <= in[0];
    return kernel == window && stride == window && pad == none && inside && thin;
  }

  // The maximum of each window, or `floor` where that is more, and base + its place.
  void run(const float* z, int64_t base, float* y, int64_t* places) const {
    if (!halves())
      run_any(z, base, y, places);
    else if (kernel[0] == 1)
      run_halves(z, base, y, places);
    else
      run_half_volumes(z, base, y, places);
  }

  float floor = 0.f;
  Axes in{1, 1, 1}, out{1, 1, 1}, kernel{1, 1, 1}, stride{1, 1, 1}, pad{0, 0, 0};

 private:
  // Windows of 2 x 2, a vector of them at a time where rows are a power of two: `load_pairs` has its inputs side by side.
  void run_halves(const float* z, int64_t base, float* y, int64_t* places) const {
    const int64_t width = in[2], windows = volume(out);
    int64_t o = 0;
    if (width % (2 * n) == 0 || width == n || 2 * width == n)
      for (; o + n <= windows && in[1] % 2 == 0; o += n) {
        vfloat top[2], bottom[2];
        load_pairs(z, o, top, bottom);
        vfloat best = even(top[0], top[1]);
        vint place{};
        const auto consider = [&](vfloat value, int32_t there) {
          const vint counts = (value > best) | (value != value);
          place = counts ? there - vint{} : place;
          best = select(counts, value, best);
        };
        consider(odd(top[0], top[1]), 1);
        consider(even(bottom[0], bottom[1]), static_cast<int32_t>(width));
        consider(odd(bottom[0], bottom[1]), static_cast<int32_t>(width) + 1);
        store(y + o, select(best < floor, splat(floor), best));
        int32_t offsets[lanes];
        std::memcpy(offsets, &place, sizeof place);
        for (int64_t k = 0; k < n; ++k) {
          const int64_t row = (o + k) / out[2];
          places[o + k] = base + 2 * (o + k) + row * width + offsets[k];
        }
      }
    for (; o < windows; ++o) {
      const int64_t first = 2 * (o / out[2]) * width + 2 * (o % out[2]);
      const int64_t candidates[] = {first, first + 1, first + width, first + width + 1};
      int64_t place = first;
      for (const int64_t candidate : candidates) place = counts(z[candidate], z[place]) ? candidate : place;
      y[o] = z[place] < floor ? floor : z[place];
      places[o] = base + place;
    }
  }

  // Windows of 2 x 2 x 2: of each of two planes the windows of 2 x 2, then the better of both.
  void run_half_volumes(const float* z, int64_t base, float* y, int64_t* places) const {
    thread_local Scratch value_memory;
    thread_local std::vector<int64_t> second_places;
    const int64_t size = in[1] * in[2], windows = out[1] * out[2];
    Pool plane = *this;
    plane.in[0] = plane.out[0] = 1;
    plane.floor = -__builtin_inff();
    float* const values = value_memory.floats(static_cast<std::size_t>(windows));
    second_places.resize(static_cast<std::size_t>(windows));
    for (int64_t d = 0; d < out[0]; ++d, y += windows, places += windows) {
      const int64_t first = 2 * d * size;
      plane.run_halves(z + first, base + first, y, places);
      plane.run_halves(z + first + size, base + first + size, values, second_places.data());
      for (int64_t o = 0; o < windows; ++o) {
        const bool second = counts(values[o], y[o]);
        const float best = second ? values[o] : y[o];
        places[o] = second ? second_places[static_cast<std::size_t>(o)] : places[o];
        y[o] = best < floor ? floor : best;
      }
    }
  }

  static constexpr int64_t n = lanes;

  // Whether a value takes the place of the best before it.
  static bool counts(float value, float best) { return value > best || value != value; }

  static vfloat even(vfloat a, vfloat b) { return picked<0, 2>(a, b); }
  static vfloat odd(vfloat a, vfloat b) { return picked<1, 2>(a, b); }

  // Lanes First, First + Step, ... of two vectors; with Step 0 the halves First of both.
  template <int First, int Step>
  static vfloat picked(vfloat a, vfloat b) {
    float both[2 * lanes], result[lanes];
    store(both, a);
    store(both + lanes, b);
#pragma GCC unroll 16
    for (int k = 0; k < static_cast<int>(lanes); ++k) {
      constexpr int half = static_cast<int>(lanes) / 2;
      result[k] = both[Step ? First + Step * k : First * half + k % half + (k < half ? 0 : static_cast<int>(lanes))];
    }
    return load(result);
  }

  // The upper and lower inputs of windows [o, o + n), two vectors of each.
  void load_pairs(const float* z, int64_t o, vfloat (&top)[2], vfloat (&bottom)[2]) const {
    const int64_t width = in[2];
    if (width % (2 * n) == 0) {
      const float* const at = z + 2 * (o / out[2]) * width + 2 * (o % out[2]);
      top[0] = load(at), top[1] = load(at + n), bottom[0] = load(at + width), bottom[1] = load(at + width + n);
    } else {
      const float* const at = z + 4 * o;  // rows are whole in what the windows read
      const vfloat v[] = {load(at), load(at + n), load(at + 2 * n), load(at + 3 * n)};
      if (width == n) {
        top[0] = v[0], bottom[0] = v[1], top[1] = v[2], bottom[1] = v[3];
      } else {
        top[0] = picked<0, 0>(v[0], v[1]), top[1] = picked<0, 0>(v[2], v[3]);
        bottom[0] = picked<1, 0>(v[0], v[1]), bottom[1] = picked<1, 0>(v[2], v[3]);
      }
    }
  }

  void run_any(const float* z, int64_t base, float* y, int64_t* places) const {
    for (int64_t o = 0; o < volume(out); ++o) {
      const Axes at{o / (out[1] * out[2]), o / out[2] % out[1], o % out[2]};
      Axes low, high;
      for (int i = 0; i < 3; ++i) {
        low[i] = std::max<int64_t>(at[i] * stride[i] - pad[i], 0);
        high[i] = std::min(at[i] * stride[i] - pad[i] + kernel[i], in[i]);
      }
      int64_t place = (low[0] * in[1] + low[1]) * in[2] + low[2];
      float best = z[place];
      for (int64_t a = low[0]; a < high[0]; ++a)
        for (int64_t b = low[1]; b < high[1]; ++b)
          for (int64_t c = low[2]; c < high[2]; ++c) {
            const int64_t here = (a * in[1] + b) * in[2] + c;
            if (counts(z[here], best)) best = z[here], place = here;
          }
      *y++ = best < floor ? floor : best;
      *places++ = base + place;
    }
  }
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
