// Memory that a thread keeps from one call to the next: what is mapped afresh costs a page fault every 4 KB.
#pragma once

#include <array>

#include "core/buffer.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

class Scratch {
 public:
  // Returns `count` floats, with room for a vector behind them. They are not set, and are the caller's until it asks
  // again.
  float* floats(std::size_t count) {
    if (count + kSlack > memory_.size()) {
      memory_ = Buffer();  // before there is another one
      memory_ = Buffer(count + kSlack);
    }
    return memory_.data();
  }
  // The same for several pieces, each of which begins at a cache line.
  template <std::size_t N>
  std::array<float*, N> pieces(const std::size_t (&sizes)[N]) {
    constexpr std::size_t line = 16;
    std::array<std::size_t, N> starts;
    std::size_t count = 0;
    for (std::size_t i = 0; i < N; ++i) starts[i] = count, count += (sizes[i] + line - 1) / line * line;
    float* const memory = floats(count);
    std::array<float*, N> result;
    for (std::size_t i = 0; i < N; ++i) result[i] = memory + starts[i];
    return result;
  }

 private:
  static constexpr std::size_t kSlack = 64;
  Buffer memory_;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
