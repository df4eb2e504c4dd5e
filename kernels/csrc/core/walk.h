// Places in two tensors that move along common axes.
#pragma once

#include <cstddef>
#include <vector>

namespace onnxtrain::ONNXTRAIN_LEVEL {

// An axis; its elements are `from` apart in one tensor, and `to` apart in the other.
struct Axis {
  std::size_t size;
  std::ptrdiff_t from, to;
};

inline std::size_t elements(const std::vector<Axis>& axes) {
  std::size_t product = 1;
  for (const Axis& axis : axes) product *= axis.size;
  return product;
}

// A place in both tensors that moves along some axes, the last one fastest.
class Walk {
 public:
  Walk(const std::vector<Axis>& axes, std::size_t index) : axes_(axes), at_(axes.size()) {
    for (std::size_t i = axes.size(); i-- > 0; index /= axes[i].size) {
      at_[i] = index % axes[i].size;
      from_ += static_cast<std::ptrdiff_t>(at_[i]) * axes[i].from, to_ += static_cast<std::ptrdiff_t>(at_[i]) * axes[i].to;
    }
  }
  void next() {
    for (std::size_t i = axes_.size(); i-- > 0;) {
      from_ += axes_[i].from, to_ += axes_[i].to;
      if (++at_[i] < axes_[i].size) return;
      const auto size = static_cast<std::ptrdiff_t>(axes_[i].size);
      from_ -= size * axes_[i].from, to_ -= size * axes_[i].to, at_[i] = 0;
    }
  }
  std::ptrdiff_t from() const { return from_; }
  std::ptrdiff_t to() const { return to_; }

 private:
  const std::vector<Axis>& axes_;
  std::vector<std::size_t> at_;
  std::ptrdiff_t from_ = 0, to_ = 0;
};

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
