// Sums over all but the last axes, as the gradients of biases are: of blocks of rows in float, and of those in double.
#include <algorithm>
#include <vector>

#include "core/op.h"
#include "core/rows.h"
#include "core/threads.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// Rows that are added in float: as many as `ColumnSums` adds.
constexpr size_t block = 32;
// Eight sums hide the latency of an addition.
constexpr size_t strip = 8 * lanes;
// Numbers that are worth a thread.
constexpr size_t least_numbers = 65536;

// Adds n rows of `Vectors` vectors of columns to `total`; the last vector has `extent`.
template <size_t Vectors, class Extent>
inline void add_rows(const float* from, size_t n, size_t stride, Extent extent, double* total) {
  for (size_t row = 0; row < n;) {
    vfloat sums[Vectors]{};
    for (const size_t end = std::min(n, row + block); row < end; ++row, from += stride) {
#pragma GCC unroll 8
      for (size_t v = 0; v + 1 < Vectors; ++v) sums[v] += load(from + v * lanes);
      sums[Vectors - 1] += load(from + (Vectors - 1) * lanes, extent);
    }
    float added[Vectors * lanes];
    for (size_t v = 0; v < Vectors; ++v) store(added + v * lanes, sums[v]);
    for (size_t i = 0; i < Vectors * lanes; ++i) total[i] += added[i];
  }
}

template <class Extent>
inline void add_strip(size_t count, const float* from, size_t n, size_t stride, Extent extent, double* total) {
  switch (count) {
    case 8: return add_rows<8>(from, n, stride, extent, total);
    case 7: return add_rows<7>(from, n, stride, extent, total);
    case 6: return add_rows<6>(from, n, stride, extent, total);
    case 5: return add_rows<5>(from, n, stride, extent, total);
    case 4: return add_rows<4>(from, n, stride, extent, total);
    case 3: return add_rows<3>(from, n, stride, extent, total);
    case 2: return add_rows<2>(from, n, stride, extent, total);
    default: return add_rows<1>(from, n, stride, extent, total);
  }
}

struct ColumnSum {
  static constexpr const char* name = "ColumnSum_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64};
  static constexpr Floats<1> outputs{};

  explicit ColumnSum(const Attributes& attributes) : columns_(attributes.integer("columns")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0);
    require(0 <= columns_ && columns_ <= static_cast<int64_t>(x.shape.size()), "the columns must be axes of the tensor");
    const auto place = x.shape.end() - columns_;
    const auto y = context.output<float>(0, Shape(place, x.shape.end()));
    const size_t rows = count(x.shape.begin(), place), columns = count(place, x.shape.end());
    if (y.data == nullptr || columns == 0) return;
    const size_t strips = divided_up(columns, strip), width = strips * strip;
    const size_t parts = std::clamp<size_t>(rows * columns / least_numbers, 1, most_parts);
    std::vector<double> totals(parts * width);
    // One part's strips one after the other: its rows stay in a cache.
    context.threads().run(parts, [&](size_t part) {
      const size_t first = rows * part / parts, n = rows * (part + 1) / parts - first;
      // What fits the second-level cache.
      const size_t some = std::max(block, least_numbers / columns / block * block);
      for (size_t done = 0; done < n; done += some)
        for (size_t column = 0; column < columns; column += strip) {
          const float* const from = x.data + (first + done) * columns + column;
          const size_t vectors = divided_up(std::min(strip, columns - column), lanes);
          const size_t rest = columns - column - (vectors - 1) * lanes, left = std::min(some, n - done);
          double* const total = totals.data() + part * width + column;
          if (rest >= lanes)
            add_strip(vectors, from, left, columns, Full{}, total);
          else
            add_strip(vectors, from, left, columns, Part{rest}, total);
        }
    });
    for (size_t i = 0; i < columns; ++i) {
      double sum = 0;
      for (size_t part = 0; part < parts; ++part) sum += totals[part * width + i];
      y.data[i] = static_cast<float>(sum);
    }
  }

 private:
  int64_t columns_;
};

}  // namespace

void add_column_sums(Domain& domain) { domain.add<ColumnSum>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
