// What attention and its gradient share: sizes, masks, and the scores of a few queries with all keys.
//
// All scores of a head are never there at once: a block of queries at a time, whose scores fit the L2 cache, goes through
// everything. Memory grows with the length of the sequence, not with its square.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "core/gemm.h"
#include "core/op.h"
#include "core/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

// Which keys a query attends to: all; those up to its own place; or as much as a mask, which is added to the scores, says.
// Of rows that are masked throughout a safe one makes zeros, the other NaN, as Softmax does.
enum class Masking { None, Causal, Added, AddedSafely };

// Of the names of an op for each way of masking the one for this one.
constexpr const char* name_for(Masking masking, const char* none, const char* causal, const char* added,
                               const char* added_safely = nullptr) {
  switch (masking) {
    case Masking::None: return none;
    case Masking::Causal: return causal;
    case Masking::Added: return added;
    default: return added_safely;
  }
}

constexpr bool is_added(Masking masking) { return masking == Masking::Added || masking == Masking::AddedSafely; }

struct Sizes {
  size_t batch, heads, queries, keys, depth, width;  // depth: of queries and keys, width: of values

  // Of queries, keys and values of one shape.
  Sizes(size_t batch, size_t heads, size_t positions, size_t depth)
      : batch(batch), heads(heads), queries(positions), keys(positions), depth(depth), width(depth) {}
  Sizes(const Shape& q, const Shape& k, const Shape& v) {
    require(q.size() == 4 && k.size() == 4 && v.size() == 4, "queries, keys and values must have four axes");
    const auto size = [](const Shape& shape, size_t axis) { return static_cast<size_t>(shape[axis]); };
    batch = size(q, 0), heads = size(q, 1), queries = size(q, 2), keys = size(k, 2), depth = size(q, 3), width = size(v, 3);
    require(k == Shape{q[0], q[1], k[2], q[3]}, "keys must be of the batch, heads and size of queries");
    require(v == Shape{q[0], q[1], k[2], v[3]}, "values must be of the batch and heads of queries, as many as keys");
  }

  // Queries whose scores, of which a gradient needs two, take some 400 KB.
  size_t block() const {
    const size_t fitting = 49152 / std::max<size_t>(keys, 1) / tile_rows * tile_rows;
    return std::min(std::clamp(fitting, tile_rows, 8 * tile_rows), std::max<size_t>(queries, 1));
  }
  // Scores of one query are that far from those of the next: rows 4 KB apart would share one place of the L1 cache.
  size_t stride() const { return divided_up(keys, lanes) * lanes + lanes; }
  size_t all_heads() const { return batch * heads; }
  // Heads are cut into that many pieces where there are few of them.
  size_t pieces() const {
    const size_t wanted = divided_up(16, std::max<size_t>(all_heads(), 1));
    return std::clamp<size_t>(divided_up(queries, block()), 1, wanted);
  }
};

// The rows of a tensor, one for each position of each head; rows of one head, heads of one batch element, and batch
// elements are as far apart as said here.
template <class T>
struct Rows {
  T* data;
  size_t batch, head, row;

  // The first row of a head, of the heads of all batch elements.
  T* of(size_t head_of_all, size_t heads) const {
    return data ? data + head_of_all / heads * batch + head_of_all % heads * head : nullptr;
  }
  Matrix matrix(size_t head_of_all, size_t heads) const {
    return {of(head_of_all, heads), static_cast<ptrdiff_t>(row), 1};
  }
};

// The rows of a tensor [batch, heads, positions, width].
template <class T>
Rows<T> rows_in_order(T* data, size_t heads, size_t positions, size_t width) {
  return {data, heads * positions * width, positions * width, width};
}

// Queries, keys and values in one tensor x, and a tensor y with the axes that x has beside that of the three.
class Packed {
 public:
  // `perm` names the axes of x: that of the three, batch, heads, positions, and size, which is the last one.
  Packed(const Shape& x, const std::vector<int64_t>& perm) : perm_(perm) {
    require(x.size() == 5 && perm.size() == 5 && perm[4] == 4, "x must have five axes, and perm end with the last one");
    size_t named = 0, step = 1;
    for (const int64_t axis : perm) named |= size_t{0 <= axis && axis < 5} << (axis & 7);
    require(named == 31, "perm must name each axis once");
    require(x[of(0)] == 3, "the first axis that perm names must be of queries, keys and values");
    for (size_t i = 5; i-- > 0; step *= static_cast<size_t>(x[i])) x_steps_[i] = step;
    step = 1;
    for (size_t i = 5; i-- > 0;) {
      if (i == of(0)) continue;
      y_steps_[i] = step, step *= static_cast<size_t>(x[i]);
      y_shape_.insert(y_shape_.begin(), x[i]);
    }
    for (size_t i = 1; i < 5; ++i) sizes_[i - 1] = static_cast<size_t>(x[of(i)]);
  }

  Sizes sizes() const { return {sizes_[0], sizes_[1], sizes_[2], sizes_[3]}; }
  const Shape& y_shape() const { return y_shape_; }
  // Queries (0), keys (1) or values (2).
  template <class T>
  Rows<T> part(T* x, size_t which) const {
    return {x ? x + which * x_steps_[of(0)] : nullptr, x_steps_[of(1)], x_steps_[of(2)], x_steps_[of(3)]};
  }
  template <class T>
  Rows<T> y(T* y) const {
    return {y, y_steps_[of(1)], y_steps_[of(2)], y_steps_[of(3)]};
  }

 private:
  size_t of(size_t i) const { return static_cast<size_t>(perm_[i]); }

  std::vector<int64_t> perm_;
  size_t x_steps_[5], y_steps_[5], sizes_[4];
  Shape y_shape_;
};

// The mask of one head, or none. Its axes are those of the scores or 1.
struct Mask {
  const float* data = nullptr;
  size_t row = 0;
  bool per_key = false;

  const float* of(size_t query) const { return data + query * row; }
};

class Masks {
 public:
  Masks() = default;
  Masks(const Tensor<const float>& mask, const Sizes& sizes) : data_(mask.data) {
    const size_t wanted[] = {sizes.batch, sizes.heads, sizes.queries, sizes.keys}, rank = mask.shape.size();
    require(rank <= 4, "a mask has at most the four axes of the scores");
    size_t step = 1;
    for (size_t axis = 4; axis-- > 4 - rank;) {
      const auto size = static_cast<size_t>(mask.shape[axis + rank - 4]);
      require(size == 1 || size == wanted[axis], "a mask must have the sizes of the scores, or 1");
      steps_[axis] = size == 1 ? 0 : step;
      step *= size;
    }
  }
  Mask of(size_t batch, size_t head) const {
    return {data_ + batch * steps_[0] + head * steps_[1], steps_[2], steps_[3] != 0};
  }

 private:
  const float* data_ = nullptr;
  size_t steps_[4] = {};
};

// How many keys the query attends to at most.
template <Masking masking>
inline size_t keys_of(size_t query, size_t keys) {
  return masking == Masking::Causal ? std::min(query + 1, keys) : keys;
}

// Products with keys become scores: scaled, and masked. each(i, extent, score) takes them.
template <Masking masking, class Each>
inline void scores_of(const float* products, size_t count, float scale, const Mask& mask, size_t query, Each&& each) {
  vectors(count, [&](size_t i, auto extent) {
    vfloat score = load(products + i, extent) * scale;
    if constexpr (is_added(masking))
      score += mask.per_key ? load(mask.of(query) + i, extent) : splat(*mask.of(query));
    each(i, extent, score);
  });
}

// Calls task(head, first query, behind the last one) for all queries of all heads.
template <class Task>
void for_pieces(const Threads& threads, const Sizes& sizes, Task&& task) {
  const size_t pieces = sizes.pieces(), blocks = divided_up(sizes.queries, sizes.block());
  threads.run(sizes.all_heads() * pieces, [&](size_t part) {
    const size_t piece = part % pieces, first = blocks * piece / pieces * sizes.block();
    task(part / pieces, piece, first, std::min(blocks * (piece + 1) / pieces * sizes.block(), sizes.queries));
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
