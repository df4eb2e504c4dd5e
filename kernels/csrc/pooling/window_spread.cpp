// What windows of a pooling gave each of their inputs: the gradient of an average, and of a norm.
#include <algorithm>
#include <vector>

#include "convolution/geometry.h"
#include "core/op.h"
#include "core/rows.h"
#include "core/scratch.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// dx: of each window, its ct at all places that it reads. Windows are boxes, so one axis is spread after the other.
struct WindowSpread {
  static constexpr const char* name = "WindowSpread#_float";
  static constexpr Floats<2> inputs{};
  static constexpr Floats<1> outputs{};

  explicit WindowSpread(const Attributes& a)
      : kernel_(a.integers("kernel_shape")), strides_(a.integers("strides")), dilations_(a.integers("dilations")),
        pads_(a.integers("pads")) {
    const std::size_t rank = kernel_.size();
    require(rank >= 1 && rank <= 3, "a pooling has one to three spatial axes");
    require(strides_.size() == rank && dilations_.size() == rank && pads_.size() == 2 * rank,
            "strides, dilations and pads must fit kernel_shape");
    for (const auto* numbers : {&kernel_, &strides_, &dilations_})
      for (const int64_t number : *numbers)
        require(number > 0 && number < most, "kernel_shape, strides and dilations must be positive");
    for (const int64_t pad : pads_) require(-most < pad && pad < most, "padding must be smaller than 2^31");
  }

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1);
    const std::size_t rank = kernel_.size();
    require(x.shape.size() == rank + 2, "x must have as many axes as kernel_shape, and two");
    require(ct.shape.size() == rank + 2 && ct.shape[0] == x.shape[0] && ct.shape[1] == x.shape[1],
            "ct must have the batch and channels of x");
    Axes in{1, 1, 1}, out{1, 1, 1};
    for (std::size_t i = 0; i < rank; ++i) in[3 - rank + i] = x.shape[i + 2], out[3 - rank + i] = ct.shape[i + 2];
    for (const Axes& axes : {in, out})
      for (const int64_t size : axes) require(size < most, "axes must be shorter than 2^31");
    const auto dx = context.output<float>(0, x.shape);
    if (dx.data == nullptr || dx.size() == 0) return;
    const auto size = static_cast<std::size_t>(volume(in)), windows = static_cast<std::size_t>(volume(out));
    const std::size_t planes = count(x.shape.begin(), x.shape.begin() + 2);
    context.threads().ranges(planes, 1 + 16384 / size, [&](std::size_t plane, std::size_t end) {
      thread_local Scratch memory[2];
      for (; plane < end; ++plane) {
        const float* from = ct.data + plane * windows;
        Axes sizes = out;
        for (std::size_t i = rank; i-- > 0;) {
          const std::size_t axis = 3 - rank + i;
          int64_t outer = 1, inner = 1;
          for (std::size_t j = 0; j < axis; ++j) outer *= sizes[j];
          for (std::size_t j = axis + 1; j < 3; ++j) inner *= sizes[j];
          const auto room = static_cast<std::size_t>(outer * in[axis] * inner);
          float* const to = i == 0 ? dx.data + plane * size : memory[i - 1].floats(room);
          spread(i, from, outer, out[axis], in[axis], inner, to);
          sizes[axis] = in[axis];
          from = to;
        }
      }
    });
  }

 private:
  static constexpr int64_t most = int64_t{1} << 31;  // places are sums of products of two such numbers

  // to[outer][in][inner], from[outer][out][inner].
  void spread(std::size_t i, const float* from, int64_t outer, int64_t out, int64_t in, int64_t inner, float* to) const {
    const int64_t stride = strides_[i], dilation = dilations_[i];
    std::fill_n(to, outer * in * inner, 0.f);
    for (int64_t tap = 0; tap < kernel_[i]; ++tap) {
      // Window o reads o * stride + start, which is in [0, in) for those in [first, last).
      const int64_t start = tap * dilation - pads_[i];
      if (start >= in) break;
      const int64_t first = start >= 0 ? 0 : (-start + stride - 1) / stride;
      const int64_t last = std::min(out, (in - start + stride - 1) / stride);
      for (int64_t k = 0; k < outer; ++k)
        if (inner == 1) {
          const float* const row = from + k * out;
          float* const at = to + k * in + start;
          for (int64_t o = first; o < last; ++o) at[o * stride] += row[o];
        } else {
          for (int64_t o = first; o < last; ++o) {
            const float* const row = from + (k * out + o) * inner;
            float* const at = to + (k * in + start + o * stride) * inner;
            vectors(static_cast<std::size_t>(inner), [=](std::size_t j, auto extent) {
              store(at + j, load(at + j, extent) + load(row + j, extent), extent);
            });
          }
        }
    }
  }

  std::vector<int64_t> kernel_, strides_, dilations_, pads_;
};

}  // namespace

void add_window_spread(Domain& domain) { domain.add_numbered<WindowSpread>(4); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
