// MatMul and Gemm with factors rounded to bfloat16, and the rounding alone.
#include <algorithm>
#include <vector>

#include "activation/elementwise.h"
#include "product/bfloat16.h"
#include "product/family.h"
#include "product/rounding.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// A factor of MatMul with its axes in another order: the last two are a matrix, those before them its batch.
struct Factor {
  const float* data;
  Shape shape;
  std::vector<ptrdiff_t> strides;

  Factor(const Tensor<const float>& tensor, const std::vector<int64_t>& perm, bool right) : data(tensor.data) {
    const size_t rank = tensor.shape.size();
    require(rank > 0, "a factor must have an axis");
    std::vector<ptrdiff_t> own(rank, 1);
    for (size_t axis = rank - 1; axis > 0; --axis) own[axis - 1] = own[axis] * tensor.shape[axis];
    require(perm.empty() || perm.size() == rank, "perm must name each axis of its factor");
    for (size_t axis = 0; axis < perm.size(); ++axis)
      require(std::count(perm.begin(), perm.end(), static_cast<int64_t>(axis)) == 1, "perm must name each axis of its factor once");
    for (size_t axis = 0; axis < rank; ++axis) {
      const int64_t from = perm.empty() ? static_cast<int64_t>(axis) : perm[axis];
      shape.push_back(tensor.shape[static_cast<size_t>(from)]);
      strides.push_back(own[static_cast<size_t>(from)]);
    }
    if (rank == 1) {  // a row on the left, a column on the right
      shape.insert(right ? shape.end() : shape.begin(), 1);
      strides.insert(right ? strides.end() : strides.begin(), 1);
    }
  }

  size_t batch_rank() const { return shape.size() - 2; }
  size_t rows() const { return static_cast<size_t>(shape[shape.size() - 2]); }
  size_t columns() const { return static_cast<size_t>(shape.back()); }
  Matrix matrix() const { return {data, strides[strides.size() - 2], strides.back()}; }
};

// The axes of the batch of a product, each with its size and the distances in both factors, which are 0 where one factor
// serves all.
struct BatchAxis {
  size_t size;
  ptrdiff_t a, b;
};

std::vector<BatchAxis> batch_of(const Factor& a, const Factor& b) {
  const size_t rank = std::max(a.batch_rank(), b.batch_rank());
  std::vector<BatchAxis> axes(rank);
  for (size_t axis = 0; axis < rank; ++axis) {
    const auto of = [&](const Factor& factor) -> std::pair<int64_t, ptrdiff_t> {
      const size_t before = rank - factor.batch_rank();
      if (axis < before) return {1, 0};
      const int64_t size = factor.shape[axis - before];
      return {size, size == 1 ? 0 : factor.strides[axis - before]};
    };
    const auto [left, left_step] = of(a);
    const auto [right, right_step] = of(b);
    require(left == right || left == 1 || right == 1, "the batches of the factors do not broadcast");
    axes[axis] = {static_cast<size_t>(left == 1 ? right : left), left_step, right_step};
  }
  return axes;
}

struct Sizes {
  size_t rows, columns, depth;
};

// All products of a batch; those of a batch of rows that one matrix multiplies are one product of more rows.
void run(const Threads& threads, Sizes sizes, Matrix a, Matrix b, std::vector<BatchAxis> batch, float* y) {
  for (; !batch.empty() && batch.back().b == 0; batch.pop_back()) {
    const BatchAxis axis = batch.back();
    if (axis.size == 1) continue;
    if (sizes.rows == 1)
      a.row = axis.a;
    else if (axis.a != static_cast<ptrdiff_t>(sizes.rows) * a.row)
      break;
    sizes.rows *= axis.size;
  }
  size_t count = 1;
  for (const BatchAxis& axis : batch) count *= axis.size;
  const auto one = [&](const Threads& own, size_t index) {
    Matrix left = a, right = b;
    size_t rest = index;
    for (size_t i = batch.size(); i-- > 0; rest /= batch[i].size) {
      const auto place = static_cast<ptrdiff_t>(rest % batch[i].size);
      left.data += place * batch[i].a;
      right.data += place * batch[i].b;
    }
    product_in_bfloat16(own, sizes.rows, sizes.columns, sizes.depth, left, right, y + index * sizes.rows * sizes.columns);
  };
  // Many products, or some small ones, are shared among the threads; each of a few large ones is.
  const double work = static_cast<double>(sizes.rows) * static_cast<double>(sizes.columns) * static_cast<double>(sizes.depth);
  if (count >= 16 || (count >= 4 && work < 1e7))
    threads.run(count, [&](size_t index) { one(Threads(), index); });
  else
    for (size_t index = 0; index < count; ++index) one(threads, index);
}

template <bool permutes_a, bool permutes_b>
struct MatMul {
  static constexpr const char* name =
      permutes_a ? (permutes_b ? "MatMulPermutedBothBfloat16_float" : "MatMulPermutedLeftBfloat16_float")
                 : (permutes_b ? "MatMulPermutedRightBfloat16_float" : "MatMulBfloat16_float");
  static constexpr Type inputs[] = {Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float};

  explicit MatMul(const Attributes& attributes) {
    if constexpr (permutes_a) perm_a_ = attributes.integers("perm_a");
    if constexpr (permutes_b) perm_b_ = attributes.integers("perm_b");
  }

  void compute(Context& context) const {
    const auto left = context.input<float>(0), right = context.input<float>(1);
    const Factor a(left, perm_a_, false), b(right, perm_b_, true);
    require(a.columns() == b.rows(), "the factors do not fit together");
    std::vector<BatchAxis> batch = batch_of(a, b);
    Shape shape;
    for (const BatchAxis& axis : batch) shape.push_back(static_cast<int64_t>(axis.size));
    if (left.shape.size() > 1) shape.push_back(static_cast<int64_t>(a.rows()));
    if (right.shape.size() > 1) shape.push_back(static_cast<int64_t>(b.columns()));
    const auto y = context.output<float>(0, shape);
    if (y.data == nullptr) return;
    run(context.threads(), {a.rows(), b.columns(), a.columns()}, a.matrix(), b.matrix(), std::move(batch), y.data);
  }

 private:
  std::vector<int64_t> perm_a_, perm_b_;
};

struct Gemm {
  static constexpr const char* name = "GemmBfloat16_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr size_t optional_from = 2;

  explicit Gemm(const Attributes& attributes)
      : alpha_(attributes.number("alpha")),
        beta_(attributes.number("beta")),
        trans_a_(attributes.integer("transA") != 0),
        trans_b_(attributes.integer("transB") != 0) {}

  void compute(Context& context) const {
    const auto left = context.input<float>(0), right = context.input<float>(1), c = context.input<float>(2);
    require(left.shape.size() == 2 && right.shape.size() == 2, "the factors must be matrices");
    const auto size = [](const Shape& shape, bool second) { return static_cast<size_t>(shape[second]); };
    const size_t rows = size(left.shape, trans_a_), depth = size(left.shape, !trans_a_);
    const size_t columns = size(right.shape, !trans_b_);
    require(size(right.shape, trans_b_) == depth, "the factors do not fit together");
    const Matrix a = rows_of(left.data, size(left.shape, true)), b = rows_of(right.data, size(right.shape, true));
    const auto y = context.output<float>(0, {static_cast<int64_t>(rows), static_cast<int64_t>(columns)});
    if (y.data == nullptr) return;
    product_in_bfloat16(context.threads(), rows, columns, depth, trans_a_ ? a.transposed() : a,
                        trans_b_ ? b.transposed() : b, y.data, alpha_, summand(c, rows, columns));
  }

 private:
  // C has the shape of the product, or one that is broadcast to it.
  Summand summand(const Tensor<const float>& c, size_t rows, size_t columns) const {
    if (!c.given()) return {};
    const size_t rank = c.shape.size();
    const size_t down = rank > 1 ? static_cast<size_t>(c.shape[rank - 2]) : 1;
    const size_t across = rank > 0 ? static_cast<size_t>(c.shape[rank - 1]) : 1;
    require(rank <= 2 && (down == rows || down == 1) && (across == columns || across == 1),
            "the summand does not broadcast to the product");
    return {c.data, down == 1 ? 0 : static_cast<ptrdiff_t>(across), across == 1 ? 0 : 1, beta_};
  }

  float alpha_, beta_;
  bool trans_a_, trans_b_;
};

struct Round : Unary<Round> {
  static constexpr const char* name = "RoundToBfloat16_float";
  static vfloat apply(vfloat x) { return rounded_to_bfloat16(x); }
};

}  // namespace

void add_bfloat16_products(Domain& domain) {
  domain.add<MatMul<false, false>>();
  domain.add<MatMul<false, true>>();
  domain.add<MatMul<true, false>>();
  domain.add<MatMul<true, true>>();
  domain.add<Gemm>();
  domain.add<Round>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
