// The gradient of the cross entropy of class labels: scale (exp(log_prob) - onehot(labels)).
#include "core/op.h"
#include "core/rows.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct SoftmaxCrossEntropyGradient {
  static constexpr const char* name = "SoftmaxCrossEntropyGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Float};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr int in_place[] = {0};

  void compute(Context& context) const {
    const auto log_prob = context.input<float>(0), scale = context.input<float>(2);
    const auto labels = context.input<int64_t>(1);
    require(log_prob.shape.size() >= 2, "log_prob must have a batch and classes");
    const auto to = context.output<float>(0, log_prob.shape);
    if (to.data == nullptr || log_prob.size() == 0) return;
    const std::size_t batch = log_prob.shape[0], classes = log_prob.shape[1], inner = log_prob.size() / (batch * classes);
    require(labels.size() == batch * inner && scale.size() == batch * inner, "one label and scale per position");

    context.threads().ranges(batch, 1 + 8192 / (classes * inner), [&](std::size_t b, std::size_t end) {
      for (; b < end; ++b) {
        const float *from = log_prob.data + b * classes * inner, *scales = scale.data + b * inner;
        float* out = to.data + b * classes * inner;
        if (inner == 1) {
          vectors(classes, [&](std::size_t i, auto extent) { store(out + i, exp(load(from + i, extent)) * scales[0], extent); });
        } else {
          for (std::size_t c = 0; c < classes; ++c)
            vectors(inner, [&](std::size_t i, auto extent) {
              store(out + c * inner + i, exp(load(from + c * inner + i, extent)) * load(scales + i, extent), extent);
            });
        }
        for (std::size_t i = 0; i < inner; ++i) out[label(labels.data[b * inner + i], classes) * inner + i] -= scales[i];
      }
    });
  }

 private:
  // As ScatterElements of the body: from the back where negative, and nothing beyond the classes.
  static std::size_t label(int64_t label, std::size_t classes) {
    const int64_t place = label < 0 ? label + static_cast<int64_t>(classes) : label;
    require(0 <= place && place < static_cast<int64_t>(classes), "a label is not one of the classes");
    return static_cast<std::size_t>(place);
  }
};

}  // namespace

void add_losses(Domain& domain) { domain.add<SoftmaxCrossEntropyGradient>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
