// Memory for floats that is aligned to a cache line.
#pragma once

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Not initialised.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size) : size_(size) {
    const std::size_t bytes = (size * sizeof(float) + kLine) / kLine * kLine;  // never none
    memory_.reset(static_cast<float*>(std::aligned_alloc(kLine, bytes)));
    if (memory_ == nullptr) throw std::bad_alloc();
  }
  float* data() const { return memory_.get(); }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kLine = 64;
  struct Free {
    void operator()(float* memory) const { std::free(memory); }
  };
  std::size_t size_ = 0;
  std::unique_ptr<float, Free> memory_;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
