// The gradient of Gather along the first axis, as embeddings have: rows of cotangents added to the rows that were read.
#include "indexing/family.h"
#include "indexing/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct EmbeddingGradient {
  static constexpr const char* name = "EmbeddingGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Int64};
  static constexpr Type outputs[] = {Type::Float};

  void compute(Context& context) const {
    const auto ct = context.input<float>(0);
    const auto indices = context.input<int64_t>(1), dims = context.input<int64_t>(2);
    const Shape shape(dims.data, dims.data + dims.size());
    require(!shape.empty(), "the table must have rows");
    for (const int64_t dim : shape) require(dim >= 0, "the shape of the table must not be negative");
    const auto all = static_cast<std::size_t>(shape[0]);
    const RowShape sizes{1, all, count(shape.begin() + 1, shape.end()), indices.size(), true};
    require(ct.size() == sizes.numbers_read(), "one row of cotangents per index");
    const RowIndices rows(indices.data, sizes.reads, sizes.rows);
    const auto to = context.output<float>(0, shape);
    if (to.data == nullptr || to.size() == 0) return;
    const Threads threads = context.threads();
    threads.ranges(to.size(), least_of_thread, [&](std::size_t first, std::size_t last) {
      std::fill(to.data + first, to.data + last, 0.f);
    });
    scatter_rows(threads, sizes, to.data, ct.data, rows, Sum());
  }
};

}  // namespace

void add_embedding(Domain& domain) { domain.add<EmbeddingGradient>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
