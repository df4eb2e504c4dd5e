// One optimizer step of one parameter, in one pass over its tensors. Outputs may lie in the memory of the inputs: each
// vector is read wholly before it is written.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <vector>

#include "core/op.h"
#include "core/simd.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

template <std::size_t count>
using Vectors = std::array<vfloat, count>;

// The tensors of one parameter: `Formula::tensors` of one shape that are read, `Formula::results` that are written.
template <class Formula>
struct Parameter {
  static constexpr std::size_t tensors = Formula::tensors, results = Formula::results;

  std::array<const float*, tensors> from;
  std::array<float*, results> to;
  std::size_t size;

  // Reads the tensors from the inputs `first_input`, ..., and allocates the results as the outputs `first_output`, ...
  Parameter(Context& context, std::size_t first_input, std::size_t first_output) {
    const auto w = context.input<float>(first_input);
    from[0] = w.data, size = w.size();
    for (std::size_t i = 1; i < tensors; ++i) {
      const auto tensor = context.input<float>(first_input + i);
      require(tensor.shape == w.shape, "parameter, gradient and moments must have one shape");
      from[i] = tensor.data;
    }
    for (std::size_t i = 0; i < results; ++i) to[i] = context.output<float>(first_output + i, w.shape).data;
  }

  // Computes the elements [begin, end) of the results.
  void update(const std::array<float, Formula::scalars>& numbers, std::size_t begin, std::size_t end) const {
    auto inputs = from;
    auto outputs = to;
    for (auto& input : inputs) input += begin;
    for (auto& output : outputs) output = output ? output + begin : nullptr;
    const std::size_t whole = (end - begin) / lanes, rest = (end - begin) % lanes;
    run(inputs, outputs, numbers, whole);
    if (rest == 0) return;
    float padded_inputs[tensors][lanes]{}, padded_outputs[results][lanes];
    for (std::size_t k = 0; k < tensors; ++k) {
      std::copy_n(inputs[k] + whole * lanes, rest, padded_inputs[k]);
      inputs[k] = padded_inputs[k];
    }
    const auto last = outputs;
    for (std::size_t k = 0; k < results; ++k) outputs[k] = padded_outputs[k];
    run(inputs, outputs, numbers, 1);
    for (std::size_t k = 0; k < results; ++k)
      if (last[k]) std::copy_n(padded_outputs[k], rest, last[k] + whole * lanes);
  }

 private:
  // One function, whose loop is the only code of the formula: compilers are free in which product of a*b + c*d they
  // contract with the addition, and an element must have the same bits wherever a range begins.
  [[gnu::noinline]] static void run(
      std::array<const float*, tensors> from, std::array<float*, results> to,
      const std::array<float, Formula::scalars>& numbers, std::size_t vectors) {
    const auto own_numbers = numbers;
    for (std::size_t i = 0; i < vectors * lanes; i += lanes) {
      Vectors<tensors> values;
      for (std::size_t k = 0; k < tensors; ++k) values[k] = load(from[k] + i);
      const Vectors<results> updated = Formula::apply(values, own_numbers);
      for (std::size_t k = 0; k < results; ++k)
        if (to[k]) store(to[k] + i, updated[k]);
    }
  }
};

// The numbers of a step, which are the inputs from `first` on.
template <class Formula>
std::array<float, Formula::scalars> numbers_of(const Context& context, std::size_t first) {
  std::array<float, Formula::scalars> numbers;
  for (std::size_t i = 0; i < Formula::scalars; ++i) {
    const auto number = context.input<float>(first + i);
    require(number.size() == 1, "a hyperparameter must be one number");
    numbers[i] = *number.data;
  }
  return numbers;
}

// What a thread of its own is worth, in elements.
constexpr std::size_t least_elements = 16384;

// An op of `Formula::tensors` tensors of one shape and `Formula::scalars` numbers, which gives `Formula::results` tensors:
// the new values of the parameter and its moments. apply(tensors, numbers) computes them.
template <class Formula>
struct Step {
  static constexpr const char* name = Formula::name;
  static constexpr Floats<Formula::tensors + Formula::scalars> inputs{};
  static constexpr Floats<Formula::results> outputs{};

  void compute(Context& context) const {
    const Parameter<Formula> parameter(context, 0, 0);
    const auto numbers = numbers_of<Formula>(context, Formula::tensors);
    context.threads().ranges(parameter.size, least_elements, [&](std::size_t begin, std::size_t end) {
      parameter.update(numbers, begin, end);
    });
  }
};

// The same step of several parameters: the numbers, then the tensors of each parameter. All parameters are one range of
// elements for the threads, so that many small ones take one node, and no more threads than are worth it.
template <class Formula>
struct Steps {
  static constexpr const char* name = Formula::name_of_several;
  static constexpr Floats<Formula::scalars + 1> inputs{};
  static constexpr Floats<1> outputs{};
  static constexpr bool variadic = true;

  void compute(Context& context) const {
    const std::size_t count = (context.inputs() - Formula::scalars) / Formula::tensors;
    require(context.inputs() == Formula::scalars + count * Formula::tensors && context.outputs() == count * Formula::results,
            "the numbers of inputs and outputs are not those of whole parameters");
    const auto numbers = numbers_of<Formula>(context, 0);
    std::vector<Parameter<Formula>> parameters;
    parameters.reserve(count);
    std::size_t total = 0;
    for (std::size_t i = 0; i < count; ++i) {
      parameters.emplace_back(context, Formula::scalars + i * Formula::tensors, i * Formula::results);
      total += parameters.back().size;
    }
    context.threads().ranges(total, least_elements, [&](std::size_t begin, std::size_t end) {
      std::size_t start = 0;  // of a parameter, in the range of all
      for (const auto& parameter : parameters) {
        const std::size_t from = std::max(begin, start), to = std::min(end, start + parameter.size);
        if (from < to) parameter.update(numbers, from - start, to - start);
        start += parameter.size;
      }
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
  static constexpr const char* name_of_several =
      clipped ? (decoupled_decay ? "ClippedAdamWSteps#_float" : "ClippedAdamSteps#_float")
              : (decoupled_decay ? "AdamWSteps#_float" : "AdamSteps#_float");
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
  static constexpr const char* name_of_several = "SGDSteps#_float";
  static constexpr std::size_t tensors = 2, scalars = 1, results = 1;
  static Vectors<1> apply(const Vectors<2>& in, Numbers<1> n) { return {in[0] - in[1] * n[0]}; }
};

template <bool nesterov>
struct Momentum {
  static constexpr const char* name = nesterov ? "NesterovStep_float" : "MomentumStep_float";
  static constexpr const char* name_of_several = nesterov ? "NesterovSteps#_float" : "MomentumSteps#_float";
  static constexpr std::size_t tensors = 3, scalars = 2, results = 2;

  static Vectors<2> apply(const Vectors<3>& in, Numbers<2> n) {
    const auto& [w, g, b] = in;
    const vfloat b_new = b * n[1] + g, change = nesterov ? g + b_new * n[1] : b_new;
    return {w - change * n[0], b_new};
  }
};

struct Adagrad {
  static constexpr const char* name = "AdagradStep_float";
  static constexpr const char* name_of_several = "AdagradSteps#_float";
  static constexpr std::size_t tensors = 3, scalars = 2, results = 2;

  static Vectors<2> apply(const Vectors<3>& in, Numbers<2> n) {
    const auto& [w, g, s] = in;
    const vfloat s_new = s + g * g;
    return {w - g / (sqrt(s_new) + n[1]) * n[0], s_new};
  }
};

struct Lion {
  static constexpr const char* name = "LionStep_float";
  static constexpr const char* name_of_several = "LionSteps#_float";
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
  static constexpr const char* name_of_several =
      centered ? (momentum ? "CenteredRMSpropMomentumSteps#_float" : "CenteredRMSpropSteps#_float")
               : (momentum ? "RMSpropMomentumSteps#_float" : "RMSpropSteps#_float");
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

// Adds the step of a formula for one parameter, and for several.
template <class Formula>
void add_steps(Domain& domain) {
  domain.add<Step<Formula>>();
  domain.add_numbered<Steps<Formula>>(1);
}

}  // namespace

void add_optimizers(Domain& domain) {
  add_steps<Adam<false, false>>(domain);
  add_steps<Adam<true, false>>(domain);
  add_steps<Adam<false, true>>(domain);
  add_steps<Adam<true, true>>(domain);
  add_steps<SGD>(domain);
  add_steps<Momentum<false>>(domain);
  add_steps<Momentum<true>>(domain);
  add_steps<Adagrad>(domain);
  add_steps<Lion>(domain);
  add_steps<RMSprop<false, false>>(domain);
  add_steps<RMSprop<false, true>>(domain);
  add_steps<RMSprop<true, false>>(domain);
  add_steps<RMSprop<true, true>>(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
