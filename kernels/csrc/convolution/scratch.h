// Memory that a thread keeps from one call to the next: what is mapped afresh costs a page fault every 4 KB.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace onnxtrain::ONNXTRAIN_LEVEL {

class Scratch {
 public:
  // Returns `count` floats, aligned to a cache line, with room for a vector behind them. They are not set, and are the
  // caller's until it asks again.
  float* floats(std::size_t count) {
    if (count > size_) {
      memory_.reset();
      size_ = 0;
      const std::size_t bytes = ((count + slack) * sizeof(float) + 63) / 64 * 64;
      memory_.reset(static_cast<float*>(std::aligned_alloc(64, bytes)));
      if (!memory_) throw std::bad_alloc();
      size_ = count;
    }
    return memory_.get();
  }

 private:
  static constexpr std::size_t slack = 64;
  struct Free {
    void operator()(float* p) const { std::free(p); }
  };
  std::unique_ptr<float, Free> memory_;
  std::size_t size_ = 0;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
