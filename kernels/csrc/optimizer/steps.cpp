// One optimizer step of one parameter, in one pass over its tensors. Outputs may lie in the memory of the inputs: each
// vector is read wholly before it is written.
#include <array>
#include <cmath>
#include <limits>

#include "core/op.h"
#include "core/rows.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

template <std::size_t count>
using Vectors = std::array<vfloat, count>;

// An op of `Formula::tensors` tensors of one shape and `Formula::scalars` numbers, which gives `Formula::results` tensors:
// the new values of the parameter and its moments. apply(tensors, numbers) computes them.
template <class Formula>
struct Step {
  static constexpr const char* name = Formula::name;
  static constexpr std::size_t tensors = Formula::tensors, scalars = Formula::scalars, results = Formula::results;

  static constexpr Floats<tensors + scalars> inputs{};
  static constexpr Floats<results> outputs{};

  void compute(Context& context) const {
    std::array<const float*, tensors> from;
    std::array<float*, results> to;
    std::array<float, scalars> numbers;
    const Shape shape = context.input<float>(0).shape;
    for (std::size_t i = 0; i < tensors; ++i) {
      const auto tensor = context.input<float>(i);
      require(tensor.shape == shape, "parameter, gradient and moments must have one shape");
      from[i] = tensor.data;
    }
    for (std::size_t i = 0; i < scalars; ++i) {
      const auto number = context.input<float>(tensors + i);
      require(number.size() == 1, "a hyperparameter must be one number");
      numbers[i] = *number.data;
    }
    for (std::size_t i = 0; i < results; ++i) to[i] = context.output<float>(i, shape).data;

    context.threads().ranges(count(shape), 16384, [&](std::size_t begin, std::size_t end) {
      vectors(end - begin, [&](std::size_t i, auto extent) {
        Vectors<tensors> values;
        for (std::size_t k = 0; k < tensors; ++k) values[k] = load(from[k] + begin + i, extent);
        const Vectors<results> updated = Formula::apply(values, numbers);
        for (std::size_t k = 0; k < results; ++k)
          if (to[k]) store(to[k] + begin + i, updated[k], extent);
      });
    });
  }
};

template <std::size_t count>
using Numbers = const std::array<float, count>&;

inline vfloat average_of_squares(vfloat average, vfloat g, float keep, float renew) {
  return average * keep + g * renew * g;
}

// The last number of a clipped step is a factor of the gradient.
template <bool decoupled_decay, bool clipped>
struct Adam {
  static constexpr const char* name =
      clipped ? (decoupled_decay ? "ClippedAdamWStep_float" : "ClippedAdamStep_float")
              : (decoupled_decay ? "AdamWStep_float" : "AdamStep_float");
  static constexpr std::size_t tensors = 4, scalars = 6 + decoupled_decay + clipped, results = 3;

  static Vectors<3> apply(const Vectors<4>& in, Numbers<scalars> n) {
    const vfloat w = in[0], m = in[2], v = in[3], g = clipped ? in[1] * n[scalars - 1] : in[1];
    const vfloat m_new = m * n[0] + g * n[1], v_new = average_of_squares(v, g, n[2], n[3]);
    const vfloat change = m_new / (sqrt(v_new) + n[5]) * n[4];
    if constexpr (decoupled_decay) return {w * n[6] - change, m_new, v_new};
    return {w - change, m_new, v_new};
  }
};

struct SGD {
  static constexpr const char* name = "SGDStep_float";
  static constexpr std::size_t tensors = 2, scalars = 1, results = 1;
  static Vectors<1> apply(const Vectors<2>& in, Numbers<1> n) { return {in[0] - in[1] * n[0]}; }
};

template <bool nesterov>
struct Momentum {
  static constexpr const char* name = nesterov ? "NesterovStep_float" : "MomentumStep_float";
  static constexpr std::size_t tensors = 3, scalars = 2, results = 2;

  static Vectors<2> apply(const Vectors<3>& in, Numbers<2> n) {
    const auto& [w, g, b] = in;
    const vfloat b_new = b * n[1] + g, change = nesterov ? g + b_new * n[1] : b_new;
    return {w - change * n[0], b_new};
  }
};

struct Adagrad {
  static constexpr const char* name = "AdagradStep_float";
  static constexpr std::size_t tensors = 3, scalars = 2, results = 2;

  static Vectors<2> apply(const Vectors<3>& in, Numbers<2> n) {
    const auto& [w, g, s] = in;
    const vfloat s_new = s + g * g;
    return {w - g / (sqrt(s_new) + n[1]) * n[0], s_new};
  }
};

struct Lion {
  static constexpr const char* name = "LionStep_float";
  static constexpr std::size_t tensors = 3, scalars = 4, results = 2;

  static Vectors<2> apply(const Vectors<3>& in, Numbers<4> n) {
    const auto& [w, g, m] = in;
    const vfloat difference = m - g, average = g + difference * n[0];
    vfloat sign = select(average > 0, splat(1.f), select(average < 0, splat(-1.f), vfloat{}));
    sign = select(average == average, sign, average);  // NaN stays
    return {w * n[3] - sign * n[2], g + difference * n[1]};
  }
};

// w, g, v, then m if centered, then b with momentum; learning_rate, alpha, 1 - alpha, eps, momentum.
template <bool centered, bool momentum>
struct RMSprop {
  static constexpr const char* name =
      centered ? (momentum ? "CenteredRMSpropMomentumStep_float" : "CenteredRMSpropStep_float")
               : (momentum ? "RMSpropMomentumStep_float" : "RMSpropStep_float");
  static constexpr std::size_t tensors = 3 + centered + momentum, scalars = 4 + momentum, results = tensors - 1;

  static Vectors<results> apply(const Vectors<tensors>& in, Numbers<scalars> n) {
    const vfloat w = in[0], g = in[1];
    Vectors<results> out;
    out[1] = average_of_squares(in[2], g, n[1], n[2]);
    vfloat variance = out[1];
    if constexpr (centered) {
      out[2] = in[3] * n[1] + g * n[2];
      // Where the square of the mean overflows, the mean of the squares is infinite, and so is the variance.
      const vfloat largest = splat(std::numeric_limits<float>::max()), square = out[2] * out[2];
      // Rounding can leave a tiny negative variance, whose root would be NaN; a NaN stays one.
      variance = variance - select(square > largest, largest, square);
      variance = select(variance < 0, vfloat{}, variance);
    }
    vfloat change = g / (sqrt(variance) + n[3]);
    if constexpr (momentum) change = out[results - 1] = in[tensors - 1] * n[4] + change;
    out[0] = w - change * n[0];
    return out;
  }
};

}  // namespace

void add_optimizers(Domain& domain) {
  domain.add<Step<Adam<false, false>>>();
  domain.add<Step<Adam<true, false>>>();
  domain.add<Step<Adam<false, true>>>();
  domain.add<Step<Adam<true, true>>>();
  domain.add<Step<SGD>>();
  domain.add<Step<Momentum<false>>>();
  domain.add<Step<Momentum<true>>>();
  domain.add<Step<Adagrad>>();
  domain.add<Step<Lion>>();
  domain.add<Step<RMSprop<false, false>>>();
  domain.add<Step<RMSprop<false, true>>>();
  domain.add<Step<RMSprop<true, false>>>();
  domain.add<Step<RMSprop<true, true>>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
