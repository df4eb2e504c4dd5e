// Products of two matrices, of which each may lie transposed.
#include "core/gemm.h"
#include "core/op.h"
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

  void compute(Context& context) const {
    const auto a = context.input<float>(0), b = context.input<float>(1);
    require(a.shape.size() == 2 && b.shape.size() == 2, "both factors must be matrices");
    const auto rows = static_cast<size_t>(a.shape[transposes_a]), depth = static_cast<size_t>(a.shape[!transposes_a]);
    const auto columns = static_cast<size_t>(b.shape[!transposes_b]);
    require(static_cast<size_t>(b.shape[transposes_b]) == depth, "the rows of B must be as many as the columns of A");
    const auto c = context.output<float>(0, {static_cast<int64_t>(rows), static_cast<int64_t>(columns)});
    if (c.data == nullptr) return;
    const Matrix left = rows_of(a.data, static_cast<size_t>(a.shape[1]));
    const Matrix right = rows_of(b.data, static_cast<size_t>(b.shape[1]));
    gemm(context.threads(), rows, columns, depth, transposes_a ? left.transposed() : left,
         transposes_b ? right.transposed() : right, c.data, columns);
  }
};

}  // namespace

void add_matrix_products(Domain& domain) { domain.add<MatrixProduct>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
