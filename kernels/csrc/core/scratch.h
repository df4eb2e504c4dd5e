// Memory that a thread keeps from one call to the next: what is mapped afresh costs a page fault every 4 KB.
#pragma once

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

 private:
  static constexpr std::size_t kSlack = 64;
  Buffer memory_;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
