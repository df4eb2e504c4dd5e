// Loops over the elements of a row, vector by vector; the last, incomplete vector is loaded and stored in part.
#pragma once

#include <vector>

#include "core/simd.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

struct Full {};
struct Part {
  std::size_t count;
};

inline vfloat load(const float* from, Full) { return load(from); }
inline vfloat load(const float* from, Part part) { return load(from, part.count); }
inline void store(float* to, vfloat v, Full) { store(to, v); }
inline void store(float* to, vfloat v, Part part) { store(to, v, part.count); }

// Calls each(i, extent) for the vectors of n elements; extent is Full or Part and goes to load and store.
template <class Each>
inline void vectors(std::size_t n, Each&& each) {
  std::size_t i = 0;
  for (; i + lanes <= n; i += lanes) each(i, Full{});
  if (i < n) each(i, Part{n - i});
}

// Sums over many rows of a vector per column, as the gradients of scales and biases are: in float over blocks of rows,
// so that rounding grows with the number of blocks only, and of those in double. One of these per part of the rows;
// the parts are added in their order.
class ColumnSums {
 public:
  explicit ColumnSums(std::size_t columns) : block_(columns), total_(columns) {}

  float* block() { return block_.data(); }

  // To be called after each row was added to block().
  void row_done() {
    if (++rows_ == kRows) flush();
  }
  void flush() {
    for (std::size_t i = 0; i < block_.size(); ++i) {
      total_[i] += block_[i];
      block_[i] = 0;
    }
    rows_ = 0;
  }
  const std::vector<double>& total() const { return total_; }

 private:
  static constexpr int kRows = 32;
  std::vector<float> block_;
  std::vector<double> total_;
  int rows_ = 0;
};

// Writes the sum of what the parts have in `member` of their sums.
template <class Parts, class Sums>
void write_sums(const Parts& parts, Sums Parts::value_type::*member, float* to, std::size_t columns) {
  for (std::size_t i = 0; to && i < columns; ++i) {
    double sum = 0;
    for (const auto& part : parts) sum += (part.*member).total()[i];
    to[i] = static_cast<float>(sum);
  }
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
