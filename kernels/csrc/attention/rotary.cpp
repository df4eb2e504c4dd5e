// Rotary position embeddings of halves: with (low, high) the halves of a row, low cos - high sin and high cos + low sin, each
// with its own half of cos and sin; and the gradient.
#include "attention/family.h"
#include "core/rows.h"
#include "core/walk.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// For each axis of x but the last one, how far its elements are apart in x and in a tensor that broadcasts to x.
std::vector<Axis> leading_axes(const Shape& x, const Shape& angles) {
  std::vector<Axis> axes;
  ptrdiff_t to = x.back(), from = angles.back();
  for (size_t i = 1; i < x.size(); ++i) {
    const int64_t size = x[x.size() - 1 - i], own = i < angles.size() ? angles[angles.size() - 1 - i] : 1;
    require(own == 1 || own == size, "cos and sin must broadcast to x");
    axes.push_back({static_cast<size_t>(size), own == 1 ? 0 : from, to});
    to *= size, from *= own;
  }
  std::reverse(axes.begin(), axes.end());
  return axes;
}

// y = x cos + (-high, low) sin; of the gradient y = x cos + (high', -low'), with the halves of x sin.
template <bool gradient>
struct Rotary {
  static constexpr const char* name = gradient ? "RotaryGradient_float" : "Rotary_float";
  static constexpr Floats<3> inputs{};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr int in_place[] = {0};

  void compute(Context& context) const {
    const auto x = context.input<float>(0), cos = context.input<float>(1), sin = context.input<float>(2);
    require(!x.shape.empty() && x.shape.back() % 2 == 0, "rows must have two halves");
    require(cos.shape == sin.shape, "cos and sin must have one shape");
    require(!cos.shape.empty() && cos.shape.size() <= x.shape.size() && cos.shape.back() == x.shape.back(),
            "cos and sin must broadcast to x, and have its last axis");
    const std::vector<Axis> axes = leading_axes(x.shape, cos.shape);
    const auto y = context.output<float>(0, x.shape);
    if (y.data == nullptr || y.size() == 0) return;
    const auto row = static_cast<size_t>(x.shape.back()), half = row / 2;
    context.threads().ranges(elements(axes), (1 << 14) / row + 1, [&](size_t begin, size_t end) {
      for (Walk walk(axes, begin); begin < end; ++begin, walk.next()) {
        const float *const own = x.data + walk.to(), *const c = cos.data + walk.from(), *const s = sin.data + walk.from();
        float* const to = y.data + walk.to();
        vectors(half, [&](size_t i, auto extent) {
          const vfloat low = load(own + i, extent), high = load(own + half + i, extent);
          const vfloat s_low = load(s + i, extent), s_high = load(s + half + i, extent);
          const vfloat from_high = gradient ? high * s_high : -high * s_low;
          const vfloat from_low = gradient ? -low * s_low : low * s_high;
          store(to + i, low * load(c + i, extent) + from_high, extent);
          store(to + half + i, high * load(c + half + i, extent) + from_low, extent);
        });
      }
    });
  }
};

}  // namespace

void add_rotary(Domain& domain) {
  domain.add<Rotary<false>>();
  domain.add<Rotary<true>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
