// Gather and ScatterND along an axis, with one index for each row, for all leading axes or for each entry of theirs.
#include "indexing/family.h"
#include "indexing/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// The axis of the rows, and how many axes before it the indices have too: none or all.
class Axis {
 public:
  explicit Axis(const Attributes& attributes)
      : axis_(attributes.integer("axis")), batch_(attributes.integer("batch_dims")) {
    require(axis_ >= 0 && (batch_ == 0 || batch_ == axis_), "an axis, and no batch axes or all before it");
  }

  RowShape sizes(const Shape& data, const Shape& indices) const {
    require(axis_ < static_cast<int64_t>(data.size()), "the table must have the axis of the rows");
    require(batch_ <= static_cast<int64_t>(indices.size()), "the indices must have the batch axes");
    require(std::equal(indices.begin(), indices.begin() + batch_, data.begin()),
            "the indices must have the batch axes");
    const auto axis = data.begin() + axis_;
    return {count(data.begin(), axis), static_cast<std::size_t>(*axis), count(axis + 1, data.end()),
            count(indices.begin() + batch_, indices.end()), batch_ == 0};
  }

  // The shape of the rows that are read.
  Shape read(const Shape& data, const Shape& indices) const {
    Shape shape(data.begin(), data.begin() + axis_);
    shape.insert(shape.end(), indices.begin() + batch_, indices.end());
    shape.insert(shape.end(), data.begin() + axis_ + 1, data.end());
    return shape;
  }

 private:
  int64_t axis_, batch_;
};

struct GatherRows {
  static constexpr const char* name = "GatherRows#_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64};
  static constexpr Type outputs[] = {Type::Float};

  explicit GatherRows(const Attributes& attributes) : axis_(attributes) {}

  void compute(Context& context) const {
    const auto data = context.input<float>(0);
    const auto indices = context.input<int64_t>(1);
    const RowShape shape = axis_.sizes(data.shape, indices.shape);
    const RowIndices rows(indices.data, indices.size(), shape.rows);
    const auto to = context.output<float>(0, axis_.read(data.shape, indices.shape));
    if (to.data == nullptr || to.size() == 0) return;
    gather_rows(context.threads(), shape, to.data, data.data, rows);
  }

 private:
  Axis axis_;
};

struct ScatterRows {
  static constexpr const char* name = "ScatterRows#_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Float};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr int in_place[] = {0};

  explicit ScatterRows(const Attributes& attributes) : axis_(attributes), reduction_(attributes.integer("reduction")) {
    require(reduction_ >= 0 && reduction_ <= 3, "one of four reductions");
  }

  void compute(Context& context) const {
    const auto data = context.input<float>(0), updates = context.input<float>(2);
    const auto indices = context.input<int64_t>(1);
    const RowShape shape = axis_.sizes(data.shape, indices.shape);
    const RowIndices rows(indices.data, indices.size(), shape.rows);
    require(updates.shape == axis_.read(data.shape, indices.shape), "a row of updates for each index");
    const auto to = context.output<float>(0, data.shape);
    if (to.data == nullptr || to.size() == 0) return;
    const Threads threads = context.threads();
    if (to.data != data.data)
      threads.ranges(to.size(), least_of_thread, [&](std::size_t first, std::size_t last) {
        std::copy(data.data + first, data.data + last, to.data + first);
      });
    const auto scatter = [&](auto reduce) { scatter_rows(threads, shape, to.data, updates.data, rows, reduce); };
    // The order of `REDUCTIONS` in functions/indexing.py.
    switch (reduction_) {
      case 0: return scatter(Assign());
      case 1: return scatter(Sum());
      case 2: return scatter(Largest());
      default: return scatter(Smallest());
    }
  }

 private:
  Axis axis_;
  int64_t reduction_;
};

}  // namespace

void add_rows(Domain& domain) {
  domain.add_numbered<GatherRows>(16);
  domain.add_numbered<ScatterRows>(16);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
