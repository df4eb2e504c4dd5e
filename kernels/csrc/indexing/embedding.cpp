// The gradient of Gather along the first axis, as embeddings have: rows of cotangents added to the rows that were read.
#include <algorithm>
#include <vector>

#include "core/op.h"
#include "core/rows.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct EmbeddingGradient {
  static constexpr const char* name = "EmbeddingGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Int64};
  static constexpr Type outputs[] = {Type::Float};

  // Each part owns a range of rows and takes those indices that lie in it: no two write to one row, and each row is summed
  // in the order of the indices.
  void compute(Context& context) const {
    const auto ct = context.input<float>(0);
    const auto indices = context.input<int64_t>(1), dims = context.input<int64_t>(2);
    const Shape shape(dims.data, dims.data + dims.size());
    require(!shape.empty(), "the table must have rows");
    for (const int64_t dim : shape) require(dim >= 0, "the shape of the table must not be negative");
    const auto to = context.output<float>(0, shape);
    const std::size_t reads = indices.size(), width = count(shape.begin() + 1, shape.end());
    const int64_t rows = shape[0];
    require(ct.size() == reads * width, "one row of cotangents per index");
    for (std::size_t i = 0; i < reads; ++i)
      require(-rows <= indices.data[i] && indices.data[i] < rows, "an index is not one of the rows");
    if (to.data == nullptr || width == 0) return;

    // A part is 2 to the power of `shift` rows: enough of them to be worth a thread, and no more parts than are useful.
    const auto all = static_cast<std::size_t>(rows), least = std::max((all + most_parts - 1) / most_parts, 1 + 16384 / width);
    unsigned shift = 0;
    while ((std::size_t{1} << shift) < least) ++shift;
    const std::size_t parts = (all >> shift) + 1;  // of which the last may have no rows
    const auto row_of = [&](std::size_t i) { return static_cast<std::size_t>(indices.data[i] + (indices.data[i] < 0 ? rows : 0)); };
    // Indices by part: `ends` are first where each part begins, and in the end where it ends.
    std::vector<std::size_t> ends(parts + 1), sorted(reads);
    for (std::size_t i = 0; i < reads; ++i) ++ends[(row_of(i) >> shift) + 1];
    for (std::size_t part = 0; part < parts; ++part) ends[part + 1] += ends[part];
    for (std::size_t i = 0; i < reads; ++i) sorted[ends[row_of(i) >> shift]++] = i;
    context.threads().run(parts, [&](std::size_t part) {
      const std::size_t first = part << shift, last = std::min(all, (part + 1) << shift);
      std::fill(to.data + first * width, to.data + last * width, 0.f);
      for (std::size_t place = part ? ends[part - 1] : 0; place < ends[part]; ++place) {
        const std::size_t i = sorted[place], row = row_of(i);
        const float* from = ct.data + i * width;
        float* sum = to.data + row * width;
        vectors(width, [&](std::size_t k, auto extent) {
          store(sum + k, load(sum + k, extent) + load(from + k, extent), extent);
        });
      }
    });
  }
};

}  // namespace

void add_indexing(Domain& domain) { domain.add<EmbeddingGradient>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
