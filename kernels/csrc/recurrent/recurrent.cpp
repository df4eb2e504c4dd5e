// Recurrent layers over the whole sequence, forward and backward.
#include "core/op.h"
#include "families.h"
#include "recurrent/gru.h"
#include "recurrent/lstm.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

bool is(const Shape& shape, std::initializer_list<size_t> dims) {
  return shape.size() == dims.size() &&
         std::equal(dims.begin(), dims.end(), shape.begin(), [](size_t a, int64_t b) { return static_cast<int64_t>(a) == b; });
}

Shape shape_of(std::initializer_list<size_t> dims) { return Shape(dims.begin(), dims.end()); }

// Memory for outputs that nothing reads, but that the computation goes through.
class Outputs {
 public:
  explicit Outputs(Context& context) : context_(context) {}
  float* operator()(size_t index, std::initializer_list<size_t> dims) {
    const Shape shape = shape_of(dims);
    float* data = context_.output<float>(index, shape).data;
    return data ? data : spare(count(shape));
  }

 private:
  float* spare(size_t size) { return spare_.emplace_back(size).data(); }
  Context& context_;
  std::vector<Buffer> spare_;
};

template <bool reverse>
struct Lstm {
  static constexpr const char* name = reverse ? "LSTMReverse_float" : "LSTM_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float, Type::Float, Type::Float};

  void compute(Context& context) const {
    const auto x = context.input<float>(0), w = context.input<float>(1), r = context.input<float>(2);
    const auto b = context.input<float>(3), h0 = context.input<float>(4), c0 = context.input<float>(5);
    require(x.shape.size() == 3 && r.shape.size() == 3, "x and r must have three axes");
    const Sequence s{size_t(x.shape[0]), size_t(x.shape[1]), size_t(x.shape[2]), size_t(r.shape[2]), reverse};
    const size_t H = s.hidden;
    require(is(w.shape, {1, 4 * H, s.input}) && is(r.shape, {1, 4 * H, H}) && is(b.shape, {1, 8 * H}),
            "w, r and b must be [1, 4 hidden, input], [1, 4 hidden, hidden] and [1, 8 hidden]");
    require(is(h0.shape, {1, s.batch, H}) && is(c0.shape, {1, s.batch, H}), "initial states must be [1, batch, hidden]");
    Outputs output(context);
    float* y = output(0, {s.time, 1, s.batch, H});
    float *last_h = output(1, {1, s.batch, H}), *last_c = output(2, {1, s.batch, H});
    float *gates = output(3, {s.time, s.batch, 4 * H}), *cells = output(4, {s.time, s.batch, H});
    lstm_forward(context.threads(), s, {x.data, w.data, r.data, b.data, h0.data, c0.data}, y, last_h, last_c, gates, cells);
  }
};

template <bool reverse>
struct LstmGradient {
  static constexpr const char* name = reverse ? "LSTMReverseGradient_float" : "LSTMGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float,
                                    Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float};

  void compute(Context& context) const {
    const auto ct_y = context.input<float>(0), ct_h = context.input<float>(1), ct_c = context.input<float>(2);
    const auto gates = context.input<float>(3), cells = context.input<float>(4);
    const auto c0 = context.input<float>(5), r = context.input<float>(6);
    require(cells.shape.size() == 3, "cells must have three axes");
    const Sequence s{size_t(cells.shape[0]), size_t(cells.shape[1]), 0, size_t(cells.shape[2]), reverse};
    const size_t H = s.hidden;
    require(is(gates.shape, {s.time, s.batch, 4 * H}) && is(r.shape, {1, 4 * H, H}) && is(ct_y.shape, {s.time, 1, s.batch, H}),
            "gates, r and ct_y must be [time, batch, 4 hidden], [1, 4 hidden, hidden] and [time, 1, batch, hidden]");
    for (const Shape& shape : {ct_h.shape, ct_c.shape, c0.shape})
      require(is(shape, {1, s.batch, H}), "states must be [1, batch, hidden]");
    Outputs output(context);
    float* ct_gates = output(0, {s.time, s.batch, 4 * H});
    float *ct_h0 = output(1, {1, s.batch, H}), *ct_c0 = output(2, {1, s.batch, H});
    lstm_backward(context.threads(), s, ct_y.data, ct_h.data, ct_c.data, gates.data, cells.data, c0.data, r.data, ct_gates,
                  ct_h0, ct_c0);
  }
};

template <bool reverse>
struct Gru {
  static constexpr const char* name = reverse ? "GRUReverse_float" : "GRU_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float, Type::Float};

  void compute(Context& context) const {
    const auto x = context.input<float>(0), w = context.input<float>(1), r = context.input<float>(2);
    const auto b = context.input<float>(3), h0 = context.input<float>(4);
    require(x.shape.size() == 3 && r.shape.size() == 3, "x and r must have three axes");
    const Sequence s{size_t(x.shape[0]), size_t(x.shape[1]), size_t(x.shape[2]), size_t(r.shape[2]), reverse};
    const size_t H = s.hidden;
    require(is(w.shape, {1, 3 * H, s.input}) && is(r.shape, {1, 3 * H, H}) && is(b.shape, {1, 6 * H}),
            "w, r and b must be [1, 3 hidden, input], [1, 3 hidden, hidden] and [1, 6 hidden]");
    require(is(h0.shape, {1, s.batch, H}), "the initial state must be [1, batch, hidden]");
    Outputs output(context);
    float *y = output(0, {s.time, 1, s.batch, H}), *last_h = output(1, {1, s.batch, H});
    float *gates = output(2, {s.time, s.batch, 3 * H}), *inner = output(3, {s.time, s.batch, H});
    gru_forward(context.threads(), s, {x.data, w.data, r.data, b.data, h0.data}, y, last_h, gates, inner);
  }
};

template <bool reverse>
struct GruGradient {
  static constexpr const char* name = reverse ? "GRUReverseGradient_float" : "GRUGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float,
                                    Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float};

  void compute(Context& context) const {
    const auto ct_y = context.input<float>(0), ct_h = context.input<float>(1), gates = context.input<float>(2);
    const auto inner = context.input<float>(3), y = context.input<float>(4);
    const auto h0 = context.input<float>(5), r = context.input<float>(6);
    require(inner.shape.size() == 3, "inner must have three axes");
    const Sequence s{size_t(inner.shape[0]), size_t(inner.shape[1]), 0, size_t(inner.shape[2]), reverse};
    const size_t H = s.hidden;
    require(is(gates.shape, {s.time, s.batch, 3 * H}) && is(r.shape, {1, 3 * H, H}),
            "gates and r must be [time, batch, 3 hidden] and [1, 3 hidden, hidden]");
    require(is(ct_y.shape, {s.time, 1, s.batch, H}) && y.shape == ct_y.shape, "y and ct_y must be [time, 1, batch, hidden]");
    require(is(ct_h.shape, {1, s.batch, H}) && h0.shape == ct_h.shape, "states must be [1, batch, hidden]");
    Outputs output(context);
    float *ct_input = output(0, {s.time, s.batch, 3 * H}), *ct_hidden = output(1, {s.time, s.batch, 3 * H});
    float* ct_h0 = output(2, {1, s.batch, H});
    gru_backward(context.threads(), s, ct_y.data, ct_h.data, gates.data, inner.data, y.data, h0.data, r.data, ct_input,
                 ct_hidden, ct_h0);
  }
};

template <bool reverse>
struct WeightGradient {
  static constexpr const char* name = reverse ? "RecurrentWeightReverseGradient_float" : "RecurrentWeightGradient_float";
  static constexpr Type inputs[] = {Type::Float, Type::Float, Type::Float, Type::Float, Type::Float};
  static constexpr Type outputs[] = {Type::Float, Type::Float, Type::Float};

  void compute(Context& context) const {
    const auto ct_input = context.input<float>(0), ct_hidden = context.input<float>(1), x = context.input<float>(2);
    const auto y = context.input<float>(3), h0 = context.input<float>(4);
    require(x.shape.size() == 3 && y.shape.size() == 4 && ct_input.shape.size() == 3, "x, y and ct_input have 3, 4 and 3 axes");
    const Sequence s{size_t(x.shape[0]), size_t(x.shape[1]), size_t(x.shape[2]), size_t(y.shape[3]), reverse};
    const size_t gates = size_t(ct_input.shape[2]), H = s.hidden;
    require(is(ct_input.shape, {s.time, s.batch, gates}) && ct_hidden.shape == ct_input.shape &&
                is(y.shape, {s.time, 1, s.batch, H}) && is(h0.shape, {1, s.batch, H}),
            "time, batch and hidden must be the same in all inputs");
    // Each of them may be unread.
    float* ct_w = context.output<float>(0, shape_of({1, gates, s.input})).data;
    float* ct_r = context.output<float>(1, shape_of({1, gates, H})).data;
    float* ct_b = context.output<float>(2, shape_of({1, 2 * gates})).data;
    weight_gradients(context.threads(), s, gates, ct_input.data, ct_hidden.data, x.data, y.data, h0.data, ct_w, ct_r, ct_b);
  }
};

}  // namespace

void add_recurrent(Domain& domain) {
  domain.add<Lstm<false>>();
  domain.add<Lstm<true>>();
  domain.add<LstmGradient<false>>();
  domain.add<LstmGradient<true>>();
  domain.add<Gru<false>>();
  domain.add<Gru<true>>();
  domain.add<GruGradient<false>>();
  domain.add<GruGradient<true>>();
  domain.add<WeightGradient<false>>();
  domain.add<WeightGradient<true>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
