// Convolution and its gradients as ops.
#include "convolution/dense.h"
#include "convolution/depthwise.h"
#include "convolution/family.h"
#include "core/buffer.h"
#include "core/op.h"
#include "core/rows.h"
#include "product/rounding.h"
#include "product/words.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// The attributes of ONNX's Conv, with padding written out.
struct Geometry {
  explicit Geometry(const Attributes& a)
      : strides(a.integers("strides")), dilations(a.integers("dilations")), pads(a.integers("pads")), group(a.integer("group")) {
    require(strides.size() == dilations.size() && pads.size() == 2 * strides.size(), "strides, dilations and pads must fit");
    require(group > 0 && group < most, "group must be positive");
    for (std::size_t i = 0; i < strides.size(); ++i)
      require(strides[i] > 0 && dilations[i] > 0 && strides[i] < most && dilations[i] < most, "strides and dilations must be positive");
    for (const int64_t pad : pads) require(-most < pad && pad < most, "padding must be smaller than 2^31");
  }

  // x: [batch, channels, in...], w: [outputs, channels / group, kernel...].
  Convolution of(const Shape& x, const Shape& w) const {
    const std::size_t rank = strides.size();
    require(rank >= 1 && rank <= 3, "a convolution has one to three spatial axes");
    require(x.size() == rank + 2 && w.size() == rank + 2, "x and w must have as many axes as strides, and two");
    require(x[1] == w[1] * group && w[0] % group == 0, "the channels of x and w must fit");
    Convolution c{x[0], group, w[1], w[0] / group, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0, 0, 0}};
    for (std::size_t i = 0; i < rank; ++i) {
      const std::size_t axis = 3 - rank + i;
      c.in[axis] = x[i + 2], c.kernel[axis] = w[i + 2];
      require(w[i + 2] > 0 && w[i + 2] < int64_t{1} << 31, "the kernel must have a tap along each axis");
      c.stride[axis] = strides[i], c.dilation[axis] = dilations[i], c.pad[axis] = pads[i];
      const int64_t room = c.in[axis] + pads[i] + pads[rank + i] - (c.kernel[axis] - 1) * c.dilation[axis] - 1;
      require(room >= 0, "the kernel is larger than the padded input");
      c.out[axis] = room / c.stride[axis] + 1;
    }
    return c;
  }

  // The shape of x where y and w have these shapes, with so many positions behind the last window.
  Shape source(const Shape& y, const Shape& w, const std::vector<int64_t>& behind) const {
    const std::size_t rank = strides.size();
    require(rank >= 1 && rank <= 3, "a convolution has one to three spatial axes");
    require(behind.size() == rank, "output_padding must fit strides");
    require(y.size() == rank + 2 && w.size() == rank + 2, "x and w must have as many axes as strides, and two");
    require(w[1] < most, "w must have fewer than 2^31 channels");
    Shape shape{y[0], w[1] * group};
    for (std::size_t i = 0; i < rank; ++i) {
      require(behind[i] >= 0 && behind[i] < strides[i], "output_padding must be smaller than the stride");
      require(y[i + 2] > 0 && y[i + 2] < most, "x must have a position along each axis");
      require(w[i + 2] > 0 && w[i + 2] < most, "the kernel must have a tap along each axis");
      const int64_t reach = (y[i + 2] - 1) * strides[i] + (w[i + 2] - 1) * dilations[i] + 1;
      shape.push_back(reach + behind[i] - pads[i] - pads[rank + i]);
      require(shape.back() >= 0, "the padding takes away more than there is");
    }
    return shape;
  }

  // The shape of y.
  static Shape result(const Convolution& c, std::size_t rank) {
    Shape shape{c.batch, c.groups * c.rows};
    for (std::size_t axis = 3 - rank; axis < 3; ++axis) shape.push_back(c.out[axis]);
    return shape;
  }

  static constexpr int64_t most = int64_t{1} << 31;  // places are sums of products of two such numbers
  std::vector<int64_t> strides, dilations, pads;
  int64_t group;
};

// Whether factors are rounded where they are packed.
bool rounds_itself(const Convolution& c) { return pairs_supported() && !is_depthwise(c); }

// A factor rounded to bfloat16, where products are to be of such and convolutions themselves do not round; else as it is.
class Factor {
 public:
  Factor(const Threads& threads, const Tensor<const float>& from, bool round) : data_(from.data) {
    if (!round) return;
    memory_ = Buffer(from.size());
    round_to_bfloat16(threads, from.data, from.size(), memory_.data());
    data_ = memory_.data();
  }
  operator const float*() const { return data_; }

 private:
  Buffer memory_;
  const float* data_;
};

template <bool bfloat16>
struct ConvolutionForward : Geometry {
  static constexpr const char* name = bfloat16 ? "ConvolutionBfloat16_float" : "Convolution_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr std::size_t optional_from = 2;

  using Geometry::Geometry;

  void compute(Context& context) const {
    const auto x = context.input<const float>(0), w = context.input<const float>(1), b = context.input<const float>(2);
    Convolution c = of(x.shape, w.shape);
    require(!b.given() || b.shape == Shape{w.shape[0]}, "the bias must have a number per output");
    const auto y = context.output<float>(0, result(c, strides.size()));
    if (y.data == nullptr || y.size() == 0) return;
    c.bfloat16 = bfloat16 && rounds_itself(c);
    const bool round = bfloat16 && !c.bfloat16;
    const Factor own_x(context.threads(), x, round), own_w(context.threads(), w, round);
    (is_depthwise(c) ? depthwise_forward : forward)(context.threads(), c, own_x, own_w, b.given() ? b.data : nullptr, y.data);
  }
};

// The same, under the names of functions whose bodies compute small planes otherwise.
struct DepthwiseForward : ConvolutionForward<false> {
  static constexpr const char* name = "DepthwiseConvolution#_float";

  using ConvolutionForward::ConvolutionForward;
};

// dx and dw, or one of them where the other is not wanted; behind dw db, where that is wanted. Of x only the shape is read
// for dx.
template <bool of_x, bool of_w, bool bfloat16>
struct ConvolutionGradient : Geometry {
  static constexpr const char* name =
      bfloat16 ? (!of_w ? "ConvolutionBfloat16InputGradient#_float"
                  : !of_x ? "ConvolutionBfloat16WeightGradient#_float" : "ConvolutionBfloat16Gradient#_float")
               : (!of_w ? "ConvolutionInputGradient#_float"
                  : !of_x ? "ConvolutionWeightGradient#_float" : "ConvolutionGradient#_float");
  static constexpr Floats<3> inputs{};
  static constexpr Floats<of_x + 2 * of_w> outputs{};

  using Geometry::Geometry;

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), w = context.input<const float>(2);
    Convolution c = of(x.shape, w.shape);
    require(ct.shape == result(c, strides.size()), "the cotangent must have the shape of the result");
    float* const dx = of_x ? context.output<float>(0, x.shape).data : nullptr;
    float* const dw = of_w ? context.output<float>(of_x, w.shape).data : nullptr;
    float* const db = context.outputs() > of_x + 1 ? context.output<float>(of_x + 1, {w.shape[0]}).data : nullptr;
    c.bfloat16 = bfloat16 && rounds_itself(c);
    const bool round = bfloat16 && !c.bfloat16;
    const Threads threads = context.threads();
    const Factor own_ct(threads, ct, round), own_x(threads, x, round && of_w), own_w(threads, w, round && of_x);
    if (is_depthwise(c)) return depthwise_gradient(threads, c, own_ct, own_x, own_w, dx, dw, db);
    if (dx) input_gradient(threads, c, own_ct, own_w, nullptr, dx);
    const Buffer unread(!dw && db ? w.size() : 0);
    if (dw || db) weight_gradient(threads, c, own_ct, own_x, dw ? dw : unread.data(), db);
  }
};

// ONNX's ConvTranspose: a convolution's gradient of its input, whose x is the result here, and whose y is x here.
struct ConvolutionTranspose : Geometry {
  static constexpr const char* name = "ConvolutionTranspose_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr std::size_t optional_from = 2;

  explicit ConvolutionTranspose(const Attributes& a) : Geometry(a), behind(a.integers("output_padding")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0), w = context.input<const float>(1), b = context.input<const float>(2);
    const Shape shape = source(x.shape, w.shape, behind);
    const Convolution c = of(shape, w.shape);
    require(x.shape == result(c, strides.size()), "the channels of x and w must fit");
    require(!b.given() || b.shape == Shape{shape[1]}, "the bias must have a number per output");
    const auto y = context.output<float>(0, shape);
    if (y.data == nullptr || y.size() == 0) return;
    const float* const bias = b.given() ? b.data : nullptr;
    if (!is_depthwise(c)) return input_gradient(context.threads(), c, x.data, w.data, bias, y.data);
    depthwise_gradient(context.threads(), c, x.data, nullptr, w.data, y.data, nullptr, nullptr);
    if (bias) add_bias(context.threads(), c, bias, y.data);
  }

  std::vector<int64_t> behind;

 private:
  static void add_bias(const Threads& threads, const Convolution& c, const float* bias, float* y) {
    const auto size = static_cast<std::size_t>(volume(c.in)), channels = static_cast<std::size_t>(c.groups * c.channels);
    const auto planes = static_cast<std::size_t>(c.batch) * channels;
    threads.ranges(planes, 1 + 16384 / size, [&](std::size_t plane, std::size_t end) {
      for (; plane < end; ++plane) {
        float* const at = y + plane * size;
        const float own = bias[plane % channels];
        vectors(size, [=](std::size_t i, auto extent) { store(at + i, load(at + i, extent) + own, extent); });
      }
    });
  }
};

// dx and dw, or one of them where the other is not wanted; behind dw db, where that is wanted. Input and output gradient
// have exchanged their places: dx is a convolution of ct, and dw the gradient that a convolution of ct would have.
template <bool of_x, bool of_w>
struct ConvolutionTransposeGradient : Geometry {
  static constexpr const char* name = !of_w ? "ConvolutionTransposeInputGradient#_float"
                                      : !of_x ? "ConvolutionTransposeWeightGradient#_float"
                                              : "ConvolutionTransposeGradient#_float";
  static constexpr Floats<3> inputs{};
  static constexpr Floats<of_x + 2 * of_w> outputs{};

  using Geometry::Geometry;

  void compute(Context& context) const {
    const auto ct = context.input<const float>(0), x = context.input<const float>(1), w = context.input<const float>(2);
    const Convolution c = of(ct.shape, w.shape);
    require(x.shape == result(c, strides.size()), "the cotangent must have the shape of the result");
    float* const dx = of_x ? context.output<float>(0, x.shape).data : nullptr;
    float* const dw = of_w ? context.output<float>(of_x, w.shape).data : nullptr;
    float* const db = context.outputs() > of_x + 1 ? context.output<float>(of_x + 1, {ct.shape[1]}).data : nullptr;
    const Threads threads = context.threads();
    const bool depthwise = is_depthwise(c);
    if (dx) (depthwise ? depthwise_forward : forward)(threads, c, ct.data, w.data, nullptr, dx);
    if (dw && depthwise) depthwise_gradient(threads, c, x.data, ct.data, w.data, nullptr, dw, nullptr);
    if (dw && !depthwise) weight_gradient(threads, c, x.data, ct.data, dw, nullptr);
    if (db) sum_positions(threads, c, ct.data, db);
  }

 private:
  static void sum_positions(const Threads& threads, const Convolution& c, const float* ct, float* db) {
    const auto size = static_cast<std::size_t>(volume(c.in)), channels = static_cast<std::size_t>(c.groups * c.channels);
    const auto batch = static_cast<std::size_t>(c.batch);
    threads.ranges(channels, 1 + 16384 / (1 + size * batch), [&](std::size_t channel, std::size_t end) {
      for (; channel < end; ++channel) {
        double total = 0;
        for (std::size_t sample = 0; sample < batch; ++sample) {
          const float* const plane = ct + (sample * channels + channel) * size;
          vfloat sums{};
          vectors(size, [&](std::size_t i, auto extent) { sums += load(plane + i, extent); });
          total += sum(sums);
        }
        db[channel] = static_cast<float>(total);
      }
    });
  }
};

template <bool bfloat16>
void add(Domain& domain) {
  domain.add<ConvolutionForward<bfloat16>>();
  domain.add_numbered<ConvolutionGradient<true, true, bfloat16>>(64);
  domain.add_numbered<ConvolutionGradient<false, true, bfloat16>>(16);
  domain.add_numbered<ConvolutionGradient<true, false, bfloat16>>(16);
}

}  // namespace

void add_convolutions(Domain& domain) {
  add<false>(domain);
  add<true>(domain);
  domain.add_numbered<DepthwiseForward>(16);
  domain.add<ConvolutionTranspose>();
  domain.add_numbered<ConvolutionTransposeGradient<true, true>>(16);
  domain.add_numbered<ConvolutionTransposeGradient<false, true>>(4);
  domain.add_numbered<ConvolutionTransposeGradient<true, false>>(4);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
