// The gradient of Gather along the first axis, as embeddings have: rows of cotangents added to the rows that were read.
#include <algorithm>

#include "core/op.h"
#include "core/rows.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct EmbeddingGradient {
  static constexpr const char* name = "EmbeddingGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Int64};
  static constexpr Type outputs[] = {Type::Float};

  // Each part owns a range of rows and takes from all indices those that lie in it: no two write to one row, and each
  // row is summed in the order of the indices.
  void compute(Context& context) const {
    const auto ct = context.input<float>(0);
    const auto indices = context.input<int64_t>(1), dims = context.input<int64_t>(2);
    const Shape shape(dims.data, dims.data + dims.size());
    require(!shape.empty(), "the table must have rows");
    const auto to = context.output<float>(0, shape);
    const std::size_t reads = indices.size(), width = count(shape.begin() + 1, shape.end());
    const int64_t rows = shape[0];
    require(ct.size() == reads * width, "one row of cotangents per index");
    for (std::size_t i = 0; i < reads; ++i)
      require(-rows <= indices.data[i] && indices.data[i] < rows, "an index is not one of the rows");
    if (to.data == nullptr || width == 0) return;

    const std::size_t least = 1 + 16384 / width;
    context.threads().ranges(static_cast<std::size_t>(rows), least, [&](std::size_t begin, std::size_t end) {
      std::fill(to.data + begin * width, to.data + end * width, 0.f);
      for (std::size_t i = 0; i < reads; ++i) {
        const auto row = static_cast<std::size_t>(indices.data[i] + (indices.data[i] < 0 ? rows : 0));
        if (row < begin || row >= end) continue;
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
