// The mean of the losses of class labels, and gradients of the cross entropy, scale (exp(log_prob) - onehot(labels)).
#include <algorithm>
#include <array>

#include "core/op.h"
#include "core/rows.h"
#include "families.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// log_prob [batch, classes, inner...] with labels [batch, inner...].
struct Scores {
  Scores(const Tensor<const float>& log_prob, const Tensor<const int64_t>& labels) {
    require(log_prob.shape.size() >= 2, "log_prob must have a batch and classes");
    batch = log_prob.shape[0], classes = log_prob.shape[1];
    for (std::size_t axis = 2; axis < log_prob.shape.size(); ++axis) inner *= log_prob.shape[axis];
    require(labels.size() == batch * inner, "one label per position");
  }
  // As GatherElements of the bodies: from the back where negative, and nothing beyond the classes.
  std::size_t place(int64_t label) const {
    const int64_t place = label < 0 ? label + static_cast<int64_t>(classes) : label;
    require(0 <= place && place < static_cast<int64_t>(classes), "a label is not one of the classes");
    return static_cast<std::size_t>(place);
  }

  std::size_t batch, classes, inner = 1;
};

std::size_t number_of_others(const Tensor<const int64_t>& labels, int64_t ignored) {
  return labels.size() - static_cast<std::size_t>(std::count(labels.data, labels.data + labels.size(), ignored));
}

// Writes scale(position) (exp(log_prob) - onehot), where label(position) is the place of the one; a scale may be zero.
template <class Scale, class Label>
void gradient(const Threads& threads, const Scores& s, const float* log_prob, float* to, Scale&& scale, Label&& label) {
  threads.ranges(s.batch, 1 + 8192 / (s.classes * s.inner), [&](std::size_t b, std::size_t end) {
    thread_local std::vector<float> scales;
    scales.resize(s.inner);
    for (; b < end; ++b) {
      const float* from = log_prob + b * s.classes * s.inner;
      float* out = to + b * s.classes * s.inner;
      for (std::size_t i = 0; i < s.inner; ++i) scales[i] = scale(b * s.inner + i);
      if (s.inner == 1) {
        vectors(s.classes, [&](std::size_t i, auto extent) { store(out + i, exp(load(from + i, extent)) * scales[0], extent); });
      } else {
        for (std::size_t c = 0; c < s.classes; ++c)
          vectors(s.inner, [&](std::size_t i, auto extent) {
            store(out + c * s.inner + i, exp(load(from + c * s.inner + i, extent)) * load(scales.data() + i, extent), extent);
          });
      }
      for (std::size_t i = 0; i < s.inner; ++i) out[label(b * s.inner + i) * s.inner + i] -= scales[i];
    }
  });
}

struct SoftmaxCrossEntropyGradient {
  static constexpr const char* name = "SoftmaxCrossEntropyGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Float};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr int in_place[] = {0};

  void compute(Context& context) const {
    const auto log_prob = context.input<float>(0), scale = context.input<float>(2);
    const auto labels = context.input<int64_t>(1);
    const Scores scores(log_prob, labels);
    const auto to = context.output<float>(0, log_prob.shape);
    if (to.data == nullptr || log_prob.size() == 0) return;
    require(scale.size() == labels.size(), "one scale per position");
    gradient(context.threads(), scores, log_prob.data, to.data, [&](std::size_t i) { return scale.data[i]; },
             [&](std::size_t i) { return scores.place(labels.data[i]); });
  }
};

// Of the mean over all labels but one that is ignored.
struct MeanCrossEntropyGradient {
  static constexpr const char* name = "MeanCrossEntropyGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64, Type::Float};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr int in_place[] = {0};

  explicit MeanCrossEntropyGradient(const Attributes& attributes) : ignored_(attributes.integer("ignore_index")) {}

  void compute(Context& context) const {
    const auto log_prob = context.input<float>(0);
    const auto labels = context.input<int64_t>(1);
    const float ct = context.number<float>(2);
    const Scores scores(log_prob, labels);
    const auto to = context.output<float>(0, log_prob.shape);
    if (to.data == nullptr || log_prob.size() == 0) return;
    const float share = ct * (1.f / static_cast<float>(number_of_others(labels, ignored_)));
    gradient(context.threads(), scores, log_prob.data, to.data,
             [&](std::size_t i) { return labels.data[i] == ignored_ ? 0.f : share; },
             [&](std::size_t i) { return labels.data[i] == ignored_ ? 0 : scores.place(labels.data[i]); });
  }

 private:
  int64_t ignored_;
};

// The mean of -log_prob at the labels, over all but one that is ignored.
struct MeanNegativeLogLikelihood {
  static constexpr const char* name = "MeanNegativeLogLikelihood_float";
  static constexpr Type inputs[] = {Type::Float, Type::Int64};
  static constexpr Type outputs[] = {Type::Float};

  explicit MeanNegativeLogLikelihood(const Attributes& attributes) : ignored_(attributes.integer("ignore_index")) {}

  void compute(Context& context) const {
    const auto log_prob = context.input<float>(0);
    const auto labels = context.input<int64_t>(1);
    const Scores scores(log_prob, labels);
    const auto to = context.output<float>(0, {});
    if (to.data == nullptr) return;
    // Positions lie far apart, and each is read from memory.
    const std::size_t count = labels.size(), parts = std::clamp<std::size_t>(count / 256, 1, most_parts);
    std::array<double, most_parts> sums{};
    context.threads().run(parts, [&](std::size_t part) {
      double sum = 0;
      for (std::size_t i = count * part / parts; i < count * (part + 1) / parts; ++i) {
        if (labels.data[i] == ignored_) continue;
        const std::size_t row = i / scores.inner * scores.classes + scores.place(labels.data[i]);
        sum += log_prob.data[row * scores.inner + i % scores.inner];
      }
      sums[part] = sum;
    });
    double total = 0;
    for (std::size_t part = 0; part < parts; ++part) total += sums[part];
    *to.data = static_cast<float>(-(total / static_cast<double>(number_of_others(labels, ignored_))));
  }

 private:
  int64_t ignored_;
};

}  // namespace

void add_losses(Domain& domain) {
  domain.add<SoftmaxCrossEntropyGradient>();
  domain.add<MeanCrossEntropyGradient>();
  domain.add<MeanNegativeLogLikelihood>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
