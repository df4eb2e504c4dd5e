// Products of two matrices, of which each may lie transposed, and linear layers.
#include "core/gemm.h"
#include "core/op.h"
#include "core/scratch.h"
#include "product/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// Two matrices, of which each may lie transposed, as factors.
struct Factors {
  size_t rows, columns, depth;
  Matrix a, b;

  Factors(const Tensor<const float>& first, bool transposes_a, const Tensor<const float>& second, bool transposes_b) {
    require(first.shape.size() == 2 && second.shape.size() == 2, "both factors must be matrices");
    rows = static_cast<size_t>(first.shape[transposes_a]), depth = static_cast<size_t>(first.shape[!transposes_a]);
    columns = static_cast<size_t>(second.shape[!transposes_b]);
    require(static_cast<size_t>(second.shape[transposes_b]) == depth, "the rows of B must be as many as the columns of A");
    a = rows_of(first.data, static_cast<size_t>(first.shape[1])), b = rows_of(second.data, static_cast<size_t>(second.shape[1]));
    if (transposes_a) a = a.transposed();
    if (transposes_b) b = b.transposed();
  }

  Shape shape() const { return {static_cast<int64_t>(rows), static_cast<int64_t>(columns)}; }
};

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
    const Factors of(context.input<float>(0), transposes_a, context.input<float>(1), transposes_b);
    const auto c = context.output<float>(0, of.shape());
    if (c.data == nullptr) return;
    if (of.columns <= tile_rows && of.columns < of.rows && of.a.row == 1)
      return few_columns(context.threads(), of.rows, of.columns, of.depth, of.a, of.b, c.data);
    gemm(context.threads(), of.rows, of.columns, of.depth, of.a, of.b, c.data, of.columns);
  }
};

// A product with a row added to each row of it; with a ReLU, what is below zero then becomes zero.
template <bool relu>
struct Linear {
  static constexpr const char* name = relu ? "LinearRelu_float" : "Linear_float";
  static constexpr Floats<3> inputs{};
  static constexpr Type outputs[] = {Type::Float};

  bool transposes_b;

  explicit Linear(const Attributes& attributes) : transposes_b(attributes.integer("transB") != 0) {}

  void compute(Context& context) const {
    const Factors of(context.input<float>(0), false, context.input<float>(1), transposes_b);
    const auto bias = context.input<float>(2);
    require(bias.shape.size() == 1 && bias.size() == of.columns, "the bias must have a number for each column");
    const auto c = context.output<float>(0, of.shape());
    if (c.data == nullptr) return;
    gemm(context.threads(), of.rows, of.columns, of.depth, of.a, of.b, c.data, of.columns, false, Bias{bias.data, relu});
  }
};

}  // namespace

void add_matrix_products(Domain& domain) {
  domain.add<MatrixProduct>();
  domain.add<Linear<false>>();
  domain.add<Linear<true>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
