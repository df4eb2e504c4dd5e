// The sum of the squares of several gradients, for clipping by their common norm.
#include <algorithm>
#include <cmath>
#include <vector>

#include "core/op.h"
#include "core/rows.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// In float over a block, so that rounding grows with the number of blocks only, and of those in double.
constexpr std::size_t block = 32 * lanes;

double sum_of_squares(const float* x, std::size_t size) {
  double total = 0;
  for (std::size_t start = 0; start < size; start += block) {
    vfloat squares{};
    vectors(std::min(block, size - start), [&](std::size_t i, auto extent) {
      const vfloat v = load(x + start + i, extent);
      squares = squares + v * v;
    });
    total += sum(squares);
  }
  return total;
}

struct SumOfSquares {
  static constexpr const char* name = "SumOfSquares#_float";
  static constexpr Floats<1> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr bool variadic = true;

  void compute(Context& context) const {
    require(context.outputs() == 1, "there must be one output");
    std::vector<Tensor<const float>> gradients;
    std::size_t total = 0;
    for (std::size_t i = 0; i < context.inputs(); ++i) {
      gradients.push_back(context.input<float>(i));
      total += gradients.back().size();
    }
    // All gradients are one range of elements for the threads, and the parts are added in their order.
    const std::size_t parts = std::clamp<std::size_t>(total / 32768, 1, most_parts);
    std::vector<double> sums(parts);
    context.threads().run(parts, [&](std::size_t part) {
      const std::size_t begin = total * part / parts, end = total * (part + 1) / parts;
      std::size_t start = 0;  // of a gradient, in the range of all
      for (const auto& gradient : gradients) {
        const std::size_t from = std::max(begin, start), to = std::min(end, start + gradient.size());
        if (from < to) sums[part] += sum_of_squares(gradient.data + (from - start), to - from);
        start += gradient.size();
      }
    });
    double sum = 0;
    for (const double part : sums) sum += part;
    const auto result = context.output<float>(0, {});
    if (result.data) *result.data = static_cast<float>(sum);
  }
};

}  // namespace

void add_gradient_norms(Domain& domain) { domain.add_numbered<SumOfSquares>(1); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
