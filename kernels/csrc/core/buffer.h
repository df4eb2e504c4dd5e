// Memory for floats that is aligned to a cache line.
#pragma once

#include <cstddef>
#include <memory>
#include <new>

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Not initialised.
class Buffer {
 public:
  Buffer() = default;
  explicit Buffer(std::size_t size) : size_(size) {
    const std::size_t bytes = (size * sizeof(float) + kLine) / kLine * kLine;  // never none
    // Not std::aligned_alloc, which the C library of Windows lacks.
    memory_.reset(static_cast<float*>(::operator new(bytes, std::align_val_t{kLine})));
  }
  float* data() const { return memory_.get(); }
  std::size_t size() const { return size_; }

 private:
  static constexpr std::size_t kLine = 64;
  struct Free {
    void operator()(float* memory) const { ::operator delete(memory, std::align_val_t{kLine}); }
  };
  std::size_t size_ = 0;
  std::unique_ptr<float, Free> memory_;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
