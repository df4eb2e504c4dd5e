// Tensors with their axes in another order.
#include <cstring>
#include <vector>

#include "core/transpose.h"
#include "core/walk.h"
#include "indexing/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

using std::ptrdiff_t;
using std::size_t;

// The axes of the result, `from` in the tensor and `to` in the result, without those of one element; adjacent ones as one
// where the tensor has them in the same order.
std::vector<Axis> axes_of(const Shape& shape, const std::vector<int64_t>& perm) {
  std::vector<ptrdiff_t> strides(shape.size(), 1);
  for (size_t i = shape.size(); i-- > 1;) strides[i - 1] = strides[i] * shape[i];
  std::vector<Axis> axes;
  ptrdiff_t to = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    const auto axis = static_cast<size_t>(perm[i]);
    const auto size = static_cast<size_t>(shape[axis]);
    if (size != 1 && !axes.empty() && strides[axis] == static_cast<ptrdiff_t>(axes.back().size) * axes.back().from)
      axes.back().size *= size;
    else if (size != 1)
      axes.push_back({size, strides[axis], to});
    to *= shape[axis];
  }
  std::reverse(axes.begin(), axes.end());
  return axes;
}

constexpr size_t least_work = 1 << 14;

// Rows stay rows.
void copy_rows(const Threads& threads, const std::vector<Axis>& outer, size_t row, const float* x, float* y) {
  threads.ranges(elements(outer), least_work / row + 1, [&](size_t begin, size_t end) {
    for (Walk walk(outer, begin); begin < end; ++begin, walk.next()) {
      const float* const from = x + walk.from();
      float* const to = y + walk.to();
      size_t i = 0;
      for (; i + lanes <= row; i += lanes) store(to + i, load(from + i));
      if (i < row) store(to + i, load(from + i, row - i), row - i);
    }
  });
}

// Rows become columns: so many columns at a time that their cache lines stay until they are full.
void turn_rows(const Threads& threads, const std::vector<Axis>& outer, Axis column, Axis row, const float* x, float* y) {
  constexpr size_t width = 64;
  const size_t strips = divided_up(column.size, width), work = row.size * std::min(column.size, width);
  threads.ranges(elements(outer) * strips, least_work / work + 1, [&](size_t begin, size_t end) {
    Walk walk(outer, begin / strips);
    for (; begin < end; ++begin) {
      const size_t first = begin % strips * width, columns = std::min(width, column.size - first);
      const float* const from = x + walk.from() + first;
      float* const to = y + walk.to() + static_cast<ptrdiff_t>(first) * column.to;
      for (size_t r = 0; r < row.size; r += lanes) {
        const auto rows = static_cast<int64_t>(std::min(lanes, row.size - r));
        transpose_to<false>(from + static_cast<ptrdiff_t>(r) * row.from, row.from, rows, static_cast<int64_t>(columns),
                            [=](int64_t c) { return to + c * column.to + r; });
      }
      if (begin % strips == strips - 1) walk.next();
    }
  });
}

struct Transpose {
  static constexpr const char* name = "Transpose_float";
  static constexpr Type inputs[] = {Type::Float};
  static constexpr Type outputs[] = {Type::Float};

  std::vector<int64_t> perm;

  explicit Transpose(const Attributes& attributes) : perm(attributes.integers("perm")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0);
    require(perm.size() == x.shape.size(), "perm must name each axis once");
    std::vector<bool> named(perm.size());
    Shape shape;
    for (const int64_t axis : perm) {
      const auto i = static_cast<size_t>(axis);
      require(0 <= axis && i < perm.size() && !named[i], "perm must name each axis once");
      named[i] = true;
      shape.push_back(x.shape[i]);
    }
    const auto y = context.output<float>(0, shape);
    if (y.data == nullptr || y.size() == 0) return;
    std::vector<Axis> outer = axes_of(x.shape, perm);
    const Axis last = outer.empty() ? Axis{1, 1, 1} : outer.back();
    if (!outer.empty()) outer.pop_back();
    if (last.from == 1) return copy_rows(context.threads(), outer, last.size, x.data, y.data);
    const auto column = std::find_if(outer.begin(), outer.end(), [](const Axis& axis) { return axis.from == 1; });
    const Axis turned = *column;
    outer.erase(column);
    turn_rows(context.threads(), outer, turned, last, x.data, y.data);
  }
};

}  // namespace

void add_transpose(Domain& domain) { domain.add<Transpose>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
