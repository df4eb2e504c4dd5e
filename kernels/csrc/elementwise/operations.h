// The operations of elementwise programs, and the loop of each over a block.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "core/rows.h"
#include "core/simd.h"
#include "elementwise/functions.h"

namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise {

enum class Kind : uint8_t { None, Number, Mask };

// Masks have all bits of a lane set, or none.
inline vint mask(vfloat a) { return as_ints(a); }
inline vfloat bits(vint a) { return as_floats(a); }

// Name, time beside that of an addition, kinds of the result and of the operands a, b and c, formula. Programs call an
// operation by its place in this table: append, and change no place.
#define ONNXTRAIN_ELEMENTWISE_OPERATIONS(X)                                       \
  X(Add, 1, Number, Number, Number, None, a + b)                                  \
  X(Sub, 1, Number, Number, Number, None, a - b)                                  \
  X(Mul, 1, Number, Number, Number, None, a * b)                                  \
  X(Div, 3, Number, Number, Number, None, a / b)                                  \
  X(Neg, 1, Number, Number, None, None, -a)                                       \
  X(Abs, 1, Number, Number, None, None, magnitude(a))                             \
  X(Reciprocal, 3, Number, Number, None, None, 1.f / a)                           \
  X(Sqrt, 4, Number, Number, None, None, sqrt(a))                                 \
  X(Exp, 6, Number, Number, None, None, precise_exp(a))                           \
  X(Log, 7, Number, Number, None, None, log(a))                                   \
  X(Sigmoid, 9, Number, Number, None, None, precise_sigmoid(a))                   \
  X(Tanh, 8, Number, Number, None, None, precise_tanh(a))                         \
  X(Erf, 8, Number, Number, None, None, precise_erf(a))                           \
  X(Relu, 1, Number, Number, None, None, select(a < 0.f, vfloat{}, a))            \
  X(Max, 1, Number, Number, Number, None, larger(a, b))                           \
  X(Min, 1, Number, Number, Number, None, smaller(a, b))                          \
  X(Less, 1, Mask, Number, Number, None, bits(a < b))                             \
  X(LessOrEqual, 1, Mask, Number, Number, None, bits(a <= b))                     \
  X(Greater, 1, Mask, Number, Number, None, bits(a > b))                          \
  X(GreaterOrEqual, 1, Mask, Number, Number, None, bits(a >= b))                  \
  X(Equal, 1, Mask, Number, Number, None, bits(a == b))                           \
  X(And, 1, Mask, Mask, Mask, None, bits(mask(a) & mask(b)))                      \
  X(Or, 1, Mask, Mask, Mask, None, bits(mask(a) | mask(b)))                       \
  X(Not, 1, Mask, Mask, None, None, bits(~mask(a)))                               \
  X(Where, 1, Number, Mask, Number, Number, select(mask(a), b, c))                \
  X(ToFloat, 1, Number, Mask, None, None, select(mask(a), splat(1.f), vfloat{}))  \
  X(IsNaN, 1, Mask, Number, None, None, bits(a != a))                             \
  X(Sign, 2, Number, Number, None, None, sign(a))                                 \
  X(Floor, 1, Number, Number, None, None, floor(a))                               \
  X(Ceil, 1, Number, Number, None, None, ceil(a))                                 \
  X(Round, 1, Number, Number, None, None, round(a))                               \
  X(Softplus, 20, Number, Number, None, None, softplus(a))                        \
  X(Sin, 20, Number, Number, None, None, sine(a))                                 \
  X(Cos, 20, Number, Number, None, None, cosine(a))                               \
  X(Pow, 100, Number, Number, Number, None, power(a, b))                          \
  X(Log1p, 10, Number, Number, None, None, log1p(a))                               \
  X(Window, 1, Number, Number, Mask, None, bits(mask(a) & mask(b)))

#define ONNXTRAIN_OPERATION(Name, cost, result, kind_a, kind_b, kind_c, formula)                          \
  struct Name {                                                                                           \
    static constexpr std::size_t operands = (Kind::kind_b != Kind::None) + (Kind::kind_c != Kind::None) + 1; \
    static vfloat apply([[maybe_unused]] vfloat a, [[maybe_unused]] vfloat b, [[maybe_unused]] vfloat c) { \
      return formula;                                                                                     \
    }                                                                                                     \
  };
namespace operations {
ONNXTRAIN_ELEMENTWISE_OPERATIONS(ONNXTRAIN_OPERATION)
}  // namespace operations
#undef ONNXTRAIN_OPERATION

// An operand of a loop: absent, one number for the whole block, or a number per element.
template <bool given, bool fixed>
class Operand {
 public:
  explicit Operand([[maybe_unused]] const float* from) : from_(from) {
    if constexpr (given && fixed) {
      // The bits, of which a subtraction of floats may change those of a mask.
      int32_t one;
      std::memcpy(&one, from, sizeof one);
      value_ = as_floats(one - vint{});
    }
  }
  template <class Extent>
  vfloat at([[maybe_unused]] std::size_t i, [[maybe_unused]] Extent extent) const {
    if constexpr (given && !fixed)
      return load(from_ + i, extent);
    else
      return value_;
  }

 private:
  const float* from_;
  vfloat value_{};
};

// Computes n elements. `to` may be one of the operands.
using Loop = void (*)(std::size_t n, const float* a, const float* b, const float* c, float* to);

// Bits of `fixed` tell which operands are one number.
template <class Operation, unsigned fixed>
void loop(std::size_t n, const float* a, const float* b, const float* c, float* to) {
  const Operand<true, (fixed & 1) != 0> first(a);
  const Operand<(Operation::operands > 1), (fixed & 2) != 0> second(b);
  const Operand<(Operation::operands > 2), (fixed & 4) != 0> third(c);
  vectors(n, [=](std::size_t i, auto extent) {
    store(to + i, Operation::apply(first.at(i, extent), second.at(i, extent), third.at(i, extent)), extent);
  });
}

// The loops of an operation by which operands are fixed. Absent operands count as fixed. Where all are fixed, it is the
// loop of numbers per element, for one element.
using Loops = std::array<Loop, 8>;
template <class Operation>
constexpr Loops loops_of() {
  constexpr unsigned given = (1u << Operation::operands) - 1;
  Loops all{};
  const auto set = [&](auto which) {
    constexpr unsigned fixed = decltype(which)::value;
    all[fixed] = loop<Operation, (fixed & given) == given ? 0 : fixed & given>;
  };
  set(std::integral_constant<unsigned, 0>()), set(std::integral_constant<unsigned, 1>());
  set(std::integral_constant<unsigned, 2>()), set(std::integral_constant<unsigned, 3>());
  set(std::integral_constant<unsigned, 4>()), set(std::integral_constant<unsigned, 5>());
  set(std::integral_constant<unsigned, 6>()), set(std::integral_constant<unsigned, 7>());
  return all;
}

struct Operation {
  const char* name;
  std::size_t cost;
  Kind result;
  std::array<Kind, 3> operands;
  Loops loops;

  // Those of the table, and what may stand for them, as these structs.
  template <class Formula>
  static constexpr Operation of(const char* name, std::size_t cost, Kind result, std::array<Kind, 3> operands) {
    return {name, cost, result, operands, loops_of<Formula>()};
  }
};

#define ONNXTRAIN_OPERATION(Name, cost, result, a, b, c, formula) \
  Operation::of<operations::Name>(#Name, cost, Kind::result, {Kind::a, Kind::b, Kind::c}),
inline constexpr Operation table[] = {ONNXTRAIN_ELEMENTWISE_OPERATIONS(ONNXTRAIN_OPERATION)};
#undef ONNXTRAIN_OPERATION

// The places in the table.
enum class Code : std::size_t {
#define ONNXTRAIN_OPERATION(Name, ...) Name,
  ONNXTRAIN_ELEMENTWISE_OPERATIONS(ONNXTRAIN_OPERATION)
#undef ONNXTRAIN_OPERATION
};
#undef ONNXTRAIN_ELEMENTWISE_OPERATIONS
inline const Operation& operation(Code code) { return table[static_cast<std::size_t>(code)]; }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL::elementwise
