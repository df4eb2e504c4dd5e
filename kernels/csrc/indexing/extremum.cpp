// The maximum or minimum along an axis with its index, and the gradient, which goes to the element of that index.
#include "core/transpose.h"
#include "indexing/family.h"
#include "indexing/rows.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// Where x takes the place of `best`. The first one of equal elements stays, and the first NaN.
template <bool Largest>
inline vint replaces(vfloat x, vfloat best) {
  const vint stays = Largest ? x <= best : x >= best;
  return ~stays & (best == best);
}

// The extrema that have been found so far in one vector of columns, and their places.
template <bool Largest>
struct Extrema {
  vfloat value;
  vint place;

  void add(vfloat x, vint at) {
    const vint where = replaces<Largest>(x, value);
    value = select(where, x, value);
    place = where ? at : place;
  }
  // Adds those of other places, in any order.
  void join(const Extrema& other) {
    const vint equal = (other.value == value) | ((other.value != other.value) & (value != value));
    const vint where = replaces<Largest>(other.value, value) | (equal & (other.place < place));
    value = select(where, other.value, value);
    place = where ? other.place : place;
  }
};

inline vint splat(int32_t x) { return x - vint{}; }
inline std::size_t size(Full) { return lanes; }
inline std::size_t size(Part part) { return part.count; }

// Where the values and the indices go; null where nothing reads them.
struct Found {
  float* value;
  int64_t* index;

  template <bool Largest, class Extent>
  void put(std::size_t at, const Extrema<Largest>& best, Extent extent) const {
    if (value) store(value + at, best.value, extent);
    if (!index) return;
    int32_t place[lanes];
    std::memcpy(place, &best.place, sizeof place);
    std::copy(place, place + size(extent), index + at);
  }
};

// Vectors of a strip of columns, which has registers for values and for places.
constexpr std::size_t strip_vectors = registers / 4, strip = strip_vectors * lanes;

// The extrema of columns of n elements that are `step` apart.
template <bool Largest, std::size_t Vectors, class Extent>
inline void columns(Extrema<Largest> (&best)[Vectors], const float* x, std::size_t n, std::size_t step, Extent extent) {
#pragma GCC unroll 8
  for (std::size_t v = 0; v < Vectors; ++v) best[v] = {load(x + v * lanes, extent), vint{}};
  for (std::size_t k = 1; k < n; ++k) {
    const vint place = splat(static_cast<int32_t>(k));
#pragma GCC unroll 8
    for (std::size_t v = 0; v < Vectors; ++v) best[v].add(load(x + k * step + v * lanes, extent), place);
  }
}

// The extrema of the columns that a row of n >= 2 * lanes elements makes in lines of a vector.
template <bool Largest>
inline Extrema<Largest> lines(const float* x, std::size_t n) {
  const vint place = indices([](int i) { return i; });
  const auto line = [&](std::size_t k) { return Extrema<Largest>{load(x + k), place + static_cast<int32_t>(k)}; };
  // Two, to hide the latency of comparisons.
  Extrema<Largest> even = line(0), odd = line(lanes);
  std::size_t k = 2 * lanes;
  for (; k + 2 * lanes <= n; k += 2 * lanes) {
    even.add(load(x + k), place + static_cast<int32_t>(k));
    odd.add(load(x + k + lanes), place + static_cast<int32_t>(k + lanes));
  }
  even.join(odd);
  if (k + lanes <= n) even.join(line(k));
  // The last elements, some of them for the second time.
  if (n % lanes) even.join(line(n - lanes));
  return even;
}

// The extrema of a vector of rows of n elements.
template <bool Largest, class Extent>
inline void rows(const float* x, std::size_t n, const Found& to, std::size_t at, Extent extent) {
  const auto count = static_cast<int64_t>(size(extent));
  float values[2 * lanes * lanes];
  if (n == 0) return;  // never, but GCC would warn
  if (n < 2 * lanes) {
    transpose(x, static_cast<int64_t>(n), count, static_cast<int64_t>(n), values, lanes);
    Extrema<Largest> best[1];
    columns(best, values, n, lanes, Full{});
    return to.put(at, *best, extent);
  }
  // Vectors of a row each become vectors of all rows.
  float places[lanes * lanes], turned_values[lanes * lanes], turned_places[lanes * lanes];
  for (std::size_t r = 0; r < size(extent); ++r) {
    const Extrema<Largest> best = lines<Largest>(x + r * n, n);
    store(values + r * lanes, best.value);
    std::memcpy(places + r * lanes, &best.place, sizeof best.place);
  }
  transpose(values, lanes, count, lanes, turned_values, lanes);
  transpose(places, lanes, count, lanes, turned_places, lanes);
  const auto column = [&](std::size_t c) {
    return Extrema<Largest>{load(turned_values + c * lanes), as_ints(load(turned_places + c * lanes))};
  };
  Extrema<Largest> best = column(0);
  for (std::size_t c = 1; c < lanes; ++c) best.join(column(c));
  to.put(at, best, extent);
}

// The shape with one element along the axis.
inline Shape of_one(Shape shape, const Along& axis) {
  shape[axis.axis] = 1;
  return shape;
}

template <bool Largest>
void extrema(const Threads& threads, const float* x, const Along& axis, const Found& to) {
  const std::size_t n = axis.n, inner = axis.inner;
  if (inner == 1) {
    const std::size_t blocks = divided_up(axis.outer, lanes);
    threads.ranges(blocks, 1 + least_of_thread / (n * lanes), [&](std::size_t first, std::size_t end) {
      const std::size_t begin = first * lanes;
      vectors(std::min(end * lanes, axis.outer) - begin, [&](std::size_t i, auto extent) {
        rows<Largest>(x + (begin + i) * n, n, to, begin + i, extent);
      });
    });
    return;
  }
  const std::size_t strips = divided_up(inner, strip), least = 1 + least_of_thread / (n * std::min(inner, strip));
  threads.ranges(axis.outer * strips, least, [&](std::size_t first, std::size_t end) {
    for (; first < end; ++first) {
      const std::size_t begin = first % strips * strip, width = std::min(strip, inner - begin);
      const float* from = x + first / strips * n * inner + begin;
      const std::size_t at = first / strips * inner + begin;
      if (width == strip) {
        Extrema<Largest> best[strip_vectors];
        columns(best, from, n, inner, Full{});
        for (std::size_t v = 0; v < strip_vectors; ++v) to.put(at + v * lanes, best[v], Full{});
      } else {
        vectors(width, [&](std::size_t i, auto extent) {
          Extrema<Largest> best[1];
          columns(best, from + i, n, inner, extent);
          to.put(at + i, *best, extent);
        });
      }
    }
  });
}

// What the ops have in common; `results(shape)` allocates their outputs.
template <bool Largest, class Results>
void compute_extrema(const Context& context, int64_t along, Results&& results) {
  const auto x = context.input<float>(0);
  const Along axis(x.shape, along);
  require(axis.n <= INT32_MAX, "the axis must have fewer than 2^31 elements");
  require(axis.n > 0 || axis.outer * axis.inner == 0, "the axis must have elements");
  const Found to = results(of_one(x.shape, axis));
  if (axis.outer * axis.inner > 0) extrema<Largest>(context.threads(), x.data, axis, to);
}

struct Extremum {
  static constexpr const char* name = "Extremum_float";
  static constexpr Type inputs[] = {Type::Float};
  static constexpr Type outputs[] = {Type::Float, Type::Int64};

  explicit Extremum(const Attributes& attributes)
      : axis_(attributes.integer("axis")), largest_(attributes.integer("largest") != 0) {}

  void compute(Context& context) const {
    const auto results = [&](const Shape& shape) {
      return Found{context.output<float>(0, shape).data, context.output<int64_t>(1, shape).data};
    };
    if (largest_)
      compute_extrema<true>(context, axis_, results);
    else
      compute_extrema<false>(context, axis_, results);
  }

 private:
  int64_t axis_;
  bool largest_;
};

template <bool Largest>
struct ArgExtremum {
  static constexpr const char* name = Largest ? "ArgMax_float" : "ArgMin_float";
  static constexpr Type inputs[] = {Type::Float};
  static constexpr Type outputs[] = {Type::Int64};

  explicit ArgExtremum(const Attributes& attributes) : axis_(attributes.integer("axis")) {}

  void compute(Context& context) const {
    compute_extrema<Largest>(context, axis_, [&](const Shape& shape) {
      return Found{nullptr, context.output<int64_t>(0, shape).data};
    });
  }

 private:
  int64_t axis_;
};

struct ExtremumGradient {
  static constexpr const char* name = "ExtremumGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Int64};
  static constexpr Type outputs[] = {Type::Float};

  explicit ExtremumGradient(const Attributes& attributes) : axis_(attributes.integer("axis")) {}

  void compute(Context& context) const {
    const auto ct = context.input<float>(0);
    const auto index = context.input<int64_t>(1), dims = context.input<int64_t>(2);
    const Shape shape(dims.data, dims.data + dims.size());
    for (const int64_t dim : shape) require(dim >= 0, "the shape must not be negative");
    const Along axis(shape, axis_);
    require(ct.shape == of_one(shape, axis) && index.shape == ct.shape, "one cotangent and index per extremum");
    const RowIndices places(index.data, index.size(), axis.n);
    const auto to = context.output<float>(0, shape);
    if (to.data == nullptr || to.size() == 0) return;
    const std::size_t n = axis.n, inner = axis.inner;
    context.threads().ranges(axis.outer * n, 1 + least_of_thread / inner, [&](std::size_t first, std::size_t last) {
      while (first < last) {
        const std::size_t slice = first / n, begin = first % n, end = std::min(n, begin + last - first);
        const Slice part{ct.data + slice * inner, places.from(slice * inner), inner, to.data + slice * n * inner};
        if (n < kFew && inner >= lanes)
          part.compare(begin, end);
        else
          part.scatter(begin, end);
        first += end - begin;
      }
    });
  }

 private:
  static constexpr std::size_t kFew = 32;  // rows, of which every one gets many cotangents

  // One entry of the axes before the axis: its cotangents and indices [inner], and the rows [n, inner] that get them.
  struct Slice {
    const float* ct;
    RowIndices places;
    std::size_t inner;
    float* to;

    void compare(std::size_t begin, std::size_t end) const {
      for (std::size_t row = begin; row < end; ++row)
        for (std::size_t i = 0; i < inner; ++i) to[row * inner + i] = places[i] == row ? ct[i] : 0.f;
    }
    void scatter(std::size_t begin, std::size_t end) const {
      std::fill(to + begin * inner, to + end * inner, 0.f);
      for (std::size_t i = 0; i < inner; ++i) {
        const std::size_t row = places[i];
        if (begin <= row && row < end) to[row * inner + i] = ct[i];
      }
    }
  };

  int64_t axis_;
};

}  // namespace

void add_extrema(Domain& domain) {
  domain.add<Extremum>();
  domain.add<ArgExtremum<true>>();
  domain.add<ArgExtremum<false>>();
  domain.add<ExtremumGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
