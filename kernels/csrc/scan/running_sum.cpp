// Sums of the elements up to each one, along any axis. They are double, and each is rounded to float once.
#include <algorithm>

#include "core/op.h"
#include "core/simd.h"
#include "core/threads.h"
#include "core/transpose.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

constexpr size_t half = lanes / 2;

typedef double vdouble __attribute__((vector_size(half * sizeof(double))));
typedef float vhalf __attribute__((vector_size(half * sizeof(float))));

inline vdouble load_wide(const float* from) {
  vhalf v;
  std::memcpy(&v, from, sizeof v);
  return __builtin_convertvector(v, vdouble);
}
inline void store_narrow(float* to, vdouble wide) {
  const vhalf v = __builtin_convertvector(wide, vhalf);
  std::memcpy(to, &v, sizeof v);
}

// The first element of a sum in x and in y, and the distance to the next one.
struct Walk {
  const float* x;
  float* y;
  ptrdiff_t step;

  Walk from(ptrdiff_t offset) const { return {x + offset, y + offset, step}; }
};

// -0 + x is x, also where x is 0 or -0. ONNX Runtime's exclusive sums begin with 0.
template <bool Exclusive>
constexpr double start = Exclusive ? 0. : -0.;

// `Count` sums at once, whose elements are `apart`. `total` has the sums so far.
template <bool Exclusive, size_t Count>
inline void scalars(Walk walk, size_t n, ptrdiff_t apart, double* total) {
  double sum[Count];
#pragma GCC unroll 8
  for (size_t i = 0; i < Count; ++i) sum[i] = total[i];
  for (size_t k = 0; k < n; ++k, walk = walk.from(walk.step)) {
#pragma GCC unroll 8
    for (size_t i = 0; i < Count; ++i) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(i) * apart;
      const double next = sum[i] + walk.x[at];
      walk.y[at] = static_cast<float>(Exclusive ? sum[i] : next);
      sum[i] = next;
    }
  }
#pragma GCC unroll 8
  for (size_t i = 0; i < Count; ++i) total[i] = sum[i];
}

// The same for 1 to `Count` sums.
template <bool Exclusive, size_t Count>
inline void some_scalars(size_t count, Walk walk, size_t n, ptrdiff_t apart, double* total) {
  if (count == Count)
    scalars<Exclusive, Count>(walk, n, apart, total);
  else if constexpr (Count > 1)
    some_scalars<Exclusive, Count - 1>(count, walk, n, apart, total);
}

// `Vectors` half vectors of sums whose elements lie beside one another.
template <bool Exclusive, size_t Vectors>
inline void columns(Walk walk, size_t n) {
  vdouble sum[Vectors];
#pragma GCC unroll 8
  for (size_t v = 0; v < Vectors; ++v) sum[v] = start<Exclusive> - vdouble{};
  for (size_t k = 0; k < n; ++k, walk = walk.from(walk.step)) {
#pragma GCC unroll 8
    for (size_t v = 0; v < Vectors; ++v) {
      const vdouble next = sum[v] + load_wide(walk.x + v * half);
      store_narrow(walk.y + v * half, Exclusive ? sum[v] : next);
      sum[v] = next;
    }
  }
}

// Eight sums hide the latency of an addition.
constexpr size_t strip = 8 * half;

// `width` <= strip sums whose elements lie beside one another.
template <bool Exclusive>
inline void strip_of_columns(Walk walk, size_t n, size_t width) {
  if (width == strip) return columns<Exclusive, 8>(walk, n);
  size_t i = 0;
  for (; i + half <= width; i += half) columns<Exclusive, 1>(walk.from(static_cast<ptrdiff_t>(i)), n);
  double total[half];
  std::fill(total, total + half, start<Exclusive>);
  if (i < width) some_scalars<Exclusive, half - 1>(width - i, walk.from(static_cast<ptrdiff_t>(i)), n, 1, total);
}

// `lanes` rows of n elements: square blocks are transposed, summed, and transposed back.
template <bool Exclusive>
inline void square_rows(const float* x, float* y, size_t n, bool reverse) {
  alignas(64) float turned[lanes * lanes], sums[lanes * lanes];
  alignas(64) double total[lanes];
  std::fill(total, total + lanes, start<Exclusive>);
  const ptrdiff_t apart = static_cast<ptrdiff_t>(n), step = reverse ? -1 : 1;
  const size_t whole = n / lanes * lanes, rest = n - whole;
  const auto remainder = [&] {
    if (rest == 0) return;
    const Walk walk{x, y, step};
    for (size_t r = 0; r < lanes; r += 4)
      scalars<Exclusive, 4>(
          walk.from(static_cast<ptrdiff_t>(r * n + (reverse ? n - 1 : whole))), rest, apart, total + r);
  };
  if (reverse) remainder();
  vdouble low, high;
  std::memcpy(&low, total, sizeof low), std::memcpy(&high, total + half, sizeof high);
  for (size_t done = 0; done < whole; done += lanes) {
    const size_t column = reverse ? whole - lanes - done : done;
    transpose(x + column, apart, lanes, lanes, turned, lanes);
    for (size_t j = 0; j < lanes; ++j) {
      const size_t at = (reverse ? lanes - 1 - j : j) * lanes;
      const vdouble next_low = low + load_wide(turned + at), next_high = high + load_wide(turned + at + half);
      store_narrow(sums + at, Exclusive ? low : next_low);
      store_narrow(sums + at + half, Exclusive ? high : next_high);
      low = next_low, high = next_high;
    }
    transpose(sums, lanes, lanes, lanes, y + column, apart);
  }
  std::memcpy(total, &low, sizeof low), std::memcpy(total + half, &high, sizeof high);
  if (!reverse) remainder();
}

// Rows [first, end) of n elements.
template <bool Exclusive>
inline void rows(const float* x, float* y, size_t n, size_t first, size_t end, bool reverse) {
  if (n >= lanes)
    for (; first + lanes <= end; first += lanes) square_rows<Exclusive>(x + first * n, y + first * n, n, reverse);
  const Walk walk{x, y, reverse ? -1 : 1};
  for (; first < end; first += std::min<size_t>(4, end - first)) {
    double total[4];
    std::fill(total, total + 4, start<Exclusive>);
    some_scalars<Exclusive, 4>(std::min<size_t>(4, end - first),
                               walk.from(static_cast<ptrdiff_t>(first * n + (reverse ? n - 1 : 0))), n,
                               static_cast<ptrdiff_t>(n), total);
  }
}

struct RunningSum {
  static constexpr const char* name = "RunningSum_float";
  static constexpr Floats<1> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr int in_place[] = {0};

  explicit RunningSum(const Attributes& attributes)
      : axis_(attributes.integer("axis")),
        exclusive_(attributes.integer("exclusive") != 0),
        reverse_(attributes.integer("reverse") != 0) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0);
    const Along axis(x.shape, axis_);
    const auto y = context.output<float>(0, x.shape);
    if (y.data == nullptr || x.size() == 0) return;
    if (exclusive_)
      sums<true>(context.threads(), x.data, y.data, axis);
    else
      sums<false>(context.threads(), x.data, y.data, axis);
  }

 private:
  static constexpr size_t kLeast = 8192;  // elements that are worth a thread

  template <bool Exclusive>
  void sums(const Threads& threads, const float* x, float* y, const Along& axis) const {
    const size_t outer = axis.outer, n = axis.n, inner = axis.inner;
    if (inner == 1) {
      const size_t unit = outer < 4 * lanes ? 4 : lanes;
      threads.ranges(divided_up(outer, unit), 1 + kLeast / (unit * n), [&](size_t begin, size_t end) {
        rows<Exclusive>(x, y, n, begin * unit, std::min(end * unit, outer), reverse_);
      });
      return;
    }
    const size_t strips = divided_up(inner, strip), all = n * inner;
    const ptrdiff_t step = static_cast<ptrdiff_t>(reverse_ ? 0 - inner : inner);
    threads.ranges(outer * strips, 1 + kLeast / (n * std::min(inner, strip)), [&](size_t begin, size_t end) {
      for (size_t s = begin; s < end; ++s) {
        const size_t column = s % strips * strip, at = s / strips * all + column + (reverse_ ? all - inner : 0);
        strip_of_columns<Exclusive>({x + at, y + at, step}, n, std::min(strip, inner - column));
      }
    });
  }

  int64_t axis_;
  bool exclusive_, reverse_;
};

}  // namespace

void add_running_sums(Domain& domain) { domain.add<RunningSum>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
