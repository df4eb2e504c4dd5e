// BatchNormalization by the statistics of the batch, MaxPool and ReLU in one, and their gradient; MaxPool alone.
//
// What BatchNormalization gives never reaches memory; its gradient is read where the maxima were.
#include <cmath>
#include <cstring>

#include "convolution/channels.h"
#include "convolution/family.h"
#include "convolution/geometry.h"
#include "convolution/scratch.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// Pooling of one plane, three axes; the first maximum of a window counts.
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
    const Axes window{1, 2, 2}, none{0, 0, 0};
    const bool inside = 2 * out[1] <= in[1] && 2 * out[2] <= in[2];  // no padding behind the last window either
    return kernel == window && stride == window && pad == none && in[0] == 1 && inside;
  }

  // The maximum of each window, or `floor` where that is more, and base + its place.
  void run(const float* z, int64_t base, float* y, int64_t* places) const {
    halves() ? run_halves(z, base, y, places) : run_any(z, base, y, places);
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
          place = value > best ? there - vint{} : place;
          best = value > best ? value : best;
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
      for (const int64_t candidate : candidates) place = z[candidate] > z[place] ? candidate : place;
      y[o] = z[place] < floor ? floor : z[place];
      places[o] = base + place;
    }
  }

  static constexpr int64_t n = lanes;

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
            if (z[here] > best) best = z[here], place = here;
          }
      *y++ = best < floor ? floor : best;
      *places++ = base + place;
    }
  }
};

struct MaxPool {
  static constexpr const char* name = "MaxPool_float";
  static constexpr Floats<1> inputs{};
  static constexpr Type outputs[] = {Type::Float, Type::Int64};

  explicit MaxPool(const Attributes& a)
      : kernel_(a.integers("kernel_shape")), strides_(a.integers("strides")), pads_(a.integers("pads")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0);
    Pool pool(x.shape, kernel_, strides_, pads_);
    pool.floor = -__builtin_inff();
    const Shape result = pool.result(x.shape);
    const auto y = context.output<float>(0, result);
    const auto places = context.output<int64_t>(1, result);
    const std::size_t size = static_cast<std::size_t>(volume(pool.in)), windows = static_cast<std::size_t>(volume(pool.out));
    context.threads().ranges(x.shape[0] * x.shape[1], 1 + 16384 / (1 + size), [&](std::size_t plane, std::size_t end) {
      thread_local Scratch result_memory;
      thread_local std::vector<int64_t> unread;
      if (!places.data) unread.resize(windows);
      for (; plane < end; ++plane)
        pool.run(x.data + plane * size, static_cast<int64_t>(plane * size),
                 y.data ? y.data + plane * windows : result_memory.floats(windows),
                 places.data ? places.data + plane * windows : unread.data());
    });
  }

 private:
  std::vector<int64_t> kernel_, strides_, pads_;
};

struct BatchNormalizationMaxPoolRelu {
  static constexpr const char* name = "BatchNormalizationMaxPoolRelu_float";
  static constexpr Floats<5> inputs{};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float, Type::Int64};

  explicit BatchNormalizationMaxPoolRelu(const Attributes& a)
      : epsilon_(a.number("epsilon")), momentum_(a.number("momentum")), kernel_(a.integers("kernel_shape")),
        strides_(a.integers("strides")), pads_(a.integers("pads")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0), scale = context.input<const float>(1), bias = context.input<const float>(2);
    const auto mean = context.input<const float>(3), var = context.input<const float>(4);
    const Sizes sizes(x.shape);
    const Pool pool(x.shape, kernel_, strides_, pads_);
    for (const auto& parameter : {scale, bias, mean, var})
      require(parameter.size() == sizes.channels, "one scale, bias, mean and variance per channel");
    const Shape result = pool.result(x.shape);
    const auto y = context.output<float>(0, result);
    const auto new_mean = context.output<float>(1, mean.shape), new_var = context.output<float>(2, var.shape);
    const auto places = context.output<int64_t>(3, result);
    const std::size_t windows = static_cast<std::size_t>(volume(pool.out));
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      thread_local Scratch plane_memory, result_memory;
      thread_local std::vector<int64_t> unread;
      const Channel channel = sizes.channel();
      const Statistics s(channel, x.data + c * sizes.positions);
      if (new_mean.data) new_mean.data[c] = mean.data[c] * momentum_ + s.center * (1 - momentum_);
      if (new_var.data) new_var.data[c] = var.data[c] * momentum_ + static_cast<float>(s.variance) * (1 - momentum_);
      const float factor = scale.data[c] / std::sqrt(static_cast<float>(s.variance) + epsilon_), shift = bias.data[c];
      float* const z = plane_memory.floats(sizes.positions);
      if (!places.data) unread.resize(windows);
      for (std::size_t n = 0; n < sizes.batch; ++n) {
        const std::size_t plane = n * sizes.channels + c;
        const float* const from = x.data + plane * sizes.positions;
        vectors(sizes.positions, [=, center = s.center](std::size_t i, auto extent) {
          store(z + i, (load(from + i, extent) - center) * factor + shift, extent);
        });
        pool.run(z, static_cast<int64_t>(plane * sizes.positions), y.data ? y.data + plane * windows : result_memory.floats(windows),
                 places.data ? places.data + plane * windows : unread.data());
      }
    });
  }

 private:
  float epsilon_, momentum_;
  std::vector<int64_t> kernel_, strides_, pads_;
};

// ct_x as in BatchNormalization's gradient, where the cotangent of its result is ct at the places of positive maxima, no
// two of which are the same, and zero elsewhere.
struct BatchNormalizationMaxPoolReluGradient {
  static constexpr const char* name = "BatchNormalizationMaxPoolReluGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float, Type::Int64};
  static constexpr Floats<3> outputs{};

  explicit BatchNormalizationMaxPoolReluGradient(const Attributes& a) : epsilon_(a.number("epsilon")) {}

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), scale = context.input<const float>(2);
    const auto y = context.input<const float>(3);
    const auto places = context.input<const int64_t>(4);
    const Sizes sizes(x.shape);
    require(ct.shape == y.shape && places.shape == y.shape, "y, its places and cotangent must have one shape");
    require(y.shape.size() == x.shape.size() && y.shape[0] == x.shape[0] && y.shape[1] == x.shape[1], "y must have the batch and channels of x");
    require(scale.size() == sizes.channels, "one scale per channel");
    const std::size_t windows = count(y.shape.begin() + 2, y.shape.end());
    const auto ct_x = context.output<float>(0, x.shape);
    const auto ct_scale = context.output<float>(1, {x.shape[1]}), ct_bias = context.output<float>(2, {x.shape[1]});
    for_channels(context.threads(), sizes, [&](std::size_t c) {
      const Channel channel = sizes.channel();
      const Statistics s(channel, x.data + c * sizes.positions);
      double total = 0, along = 0;
      for (std::size_t n = 0; n < sizes.batch; ++n) {
        const std::size_t plane = n * sizes.channels + c, first = plane * sizes.positions;
        float plane_total = 0, plane_along = 0;
        for (std::size_t i = plane * windows; i < (plane + 1) * windows; ++i) {
          const std::size_t place = static_cast<std::size_t>(places.data[i]);
          require(place - first < sizes.positions, "a maximum must lie in the plane of its window");
          const float g = y.data[i] > 0.f ? ct.data[i] : 0.f;
          plane_total += g;
          plane_along += g * (x.data[place] - s.center);
        }
        total += plane_total, along += plane_along;
      }
      const double product = along - s.off * total, inverse = 1 / std::sqrt(s.variance + epsilon_);
      if (ct_scale.data) ct_scale.data[c] = static_cast<float>(product * inverse);
      if (ct_bias.data) ct_bias.data[c] = static_cast<float>(total);
      if (ct_x.data == nullptr) return;
      const float factor = static_cast<float>(scale.data[c] * inverse), mean = static_cast<float>(total / channel.count());
      const float slope = static_cast<float>(product / channel.count() * inverse * inverse);
      for (std::size_t n = 0; n < sizes.batch; ++n) {
        const std::size_t plane = n * sizes.channels + c, first = plane * sizes.positions;
        const float* const from = x.data + first;
        float* const to = ct_x.data + first;
        vectors(sizes.positions, [=, center = s.center](std::size_t i, auto extent) {
          store(to + i, -(mean + (load(from + i, extent) - center) * slope) * factor, extent);
        });
        for (std::size_t i = plane * windows; i < (plane + 1) * windows; ++i)
          ct_x.data[places.data[i]] += (y.data[i] > 0.f ? ct.data[i] : 0.f) * factor;
      }
    });
  }

 private:
  float epsilon_;
};

}  // namespace

void add_batch_norm_pool(Domain& domain) {
  domain.add<MaxPool>();
  domain.add<BatchNormalizationMaxPoolRelu>();
  domain.add<BatchNormalizationMaxPoolReluGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
