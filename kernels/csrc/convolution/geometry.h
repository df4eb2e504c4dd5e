// The sizes of a convolution. All are of three spatial axes; axes that a tensor lacks have size 1.
//
// x: [batch, groups * channels, in...], w: [groups * rows, channels, kernel...], y: [batch, groups * rows, out...].
// Window o of an axis reads, with its tap t, position o * stride + t * dilation - pad of x, zero where there is none.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace onnxtrain {

using Axes = std::array<int64_t, 3>;

struct Convolution {
  int64_t batch, groups, channels, rows;  // channels and rows: of one group
  Axes in, out, kernel, stride, dilation, pad;
  bool bfloat16 = false;  // whether factors are rounded to bfloat16, where the processor multiplies these
};

}  // namespace onnxtrain

namespace onnxtrain::ONNXTRAIN_LEVEL {

inline int64_t volume(const Axes& axes) { return axes[0] * axes[1] * axes[2]; }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
