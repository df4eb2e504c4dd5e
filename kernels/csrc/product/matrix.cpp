// Products of two matrices, of which each may lie transposed.
#include "core/gemm.h"
#include "core/op.h"
#include "core/scratch.h"
#include "product/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct MatrixProduct {
  static constexpr const char* name = "MatrixProduct_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float};

  bool transposes_a, transposes_b;

  explicit MatrixProduct(const Attributes& attributes)
      : transposes_a(attributes.integer("transA") != 0), transposes_b(attributes.integer("transB") != 0) {}

  // As the transpose of the product of the transposes: each of the rows of that fills whole vectors.
  static void few_columns(const Threads& threads, size_t rows, size_t columns, size_t depth, Matrix a, Matrix b, float* c) {
    thread_local Scratch memory;
    float* const transposed = columns == 1 ? c : memory.floats(rows * columns);
    gemm(threads, columns, rows, depth, b.transposed(), a.transposed(), transposed, rows);
    for (size_t i = 0; columns > 1 && i < rows; ++i)
      for (size_t j = 0; j < columns; ++j) c[i * columns + j] = transposed[j * rows + i];
  }

  void compute(Context& context) const {
    const auto a = context.input<float>(0), b = context.input<float>(1);
    require(a.shape.size() == 2 && b.shape.size() == 2, "both factors must be matrices");
    const auto rows = static_cast<size_t>(a.shape[transposes_a]), depth = static_cast<size_t>(a.shape[!transposes_a]);
    const auto columns = static_cast<size_t>(b.shape[!transposes_b]);
    require(static_cast<size_t>(b.shape[transposes_b]) == depth, "the rows of B must be as many as the columns of A");
    const auto c = context.output<float>(0, {static_cast<int64_t>(rows), static_cast<int64_t>(columns)});
    if (c.data == nullptr) return;
    Matrix left = rows_of(a.data, static_cast<size_t>(a.shape[1])), right = rows_of(b.data, static_cast<size_t>(b.shape[1]));
    if (transposes_a) left = left.transposed();
    if (transposes_b) right = right.transposed();
    if (columns <= tile_rows && columns < rows && left.row == 1)
      return few_columns(context.threads(), rows, columns, depth, left, right, c.data);
    gemm(context.threads(), rows, columns, depth, left, right, c.data, columns);
  }
};

}  // namespace

void add_matrix_products(Domain& domain) { domain.add<MatrixProduct>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
