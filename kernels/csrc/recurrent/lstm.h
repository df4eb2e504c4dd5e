// LSTM: c = f c_before + i g, h = o tanh(c), with gates i, o, f by the logistic function and g by tanh, in this order.
#pragma once

#include "recurrent/sequence.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

struct LstmLayer {
  const float *x, *w, *r, *b;  // [time, batch, input], [4 hidden, input], [4 hidden, hidden], [8 hidden]
  const float *h0, *c0;        // [batch, hidden]
};

// y [time, batch, hidden] and the last states, and for the gradient the gates [time, batch, 4 hidden] and the cell
// states [time, batch, hidden].
inline void lstm_forward(const Threads& threads, const Sequence& s, const LstmLayer& layer, float* y, float* last_h,
                         float* last_c, float* gates, float* cells) {
  const size_t H = s.hidden, n = 4 * H, states = s.batch * H, panels = divided_up(n, tile_columns);
  const auto with_bias = [&](vfloat value, size_t, size_t column, size_t count) {
    return value + load_some(layer.b + column, count) + load_some(layer.b + n + column, count);
  };
  gemm(threads, s.time * s.batch, n, s.input, rows_of(layer.x, s.input), rows_of(layer.w, s.input).transposed(), gates, n,
       false, with_bias);
  const Buffer packed(packed_size(H, n));
  pack(threads, rows_of(layer.r, H).transposed(), H, n, packed.data());

  s.share_batch(threads, H * n, [&](size_t begin, size_t end) {
    const float *h = layer.h0 + begin * H, *c = layer.c0 + begin * H;
    for (size_t step = 0; step < s.time; ++step) {
      const size_t t = s.at(step);
      float* own = gates + (t * s.batch + begin) * n;
      float* new_h = y + t * states + begin * H;
      float* new_c = cells + t * states + begin * H;
      gemm_block(end - begin, n, H, rows_of(h, H), packed_panels(packed.data(), H), 0, panels, own, n, true);
      for (size_t row = 0; row < end - begin; ++row) {
        float *gi = own + row * n, *go = gi + H, *gf = go + H, *gg = gf + H;
        vectors(H, [&](size_t u, size_t count) {
          const vfloat i = sigmoid(load_some(gi + u, count)), o = sigmoid(load_some(go + u, count));
          const vfloat f = sigmoid(load_some(gf + u, count)), g = tanh(load_some(gg + u, count));
          const vfloat cell = f * load_some(c + row * H + u, count) + i * g;
          store_some(gi + u, i, count), store_some(go + u, o, count);
          store_some(gf + u, f, count), store_some(gg + u, g, count);
          store_some(new_c + row * H + u, cell, count);
          store_some(new_h + row * H + u, o * tanh(cell), count);
        });
      }
      h = new_h, c = new_c;
    }
    std::copy(h, h + (end - begin) * H, last_h + begin * H);
    std::copy(c, c + (end - begin) * H, last_c + begin * H);
  });
}

// Cotangents of the gates before their activations and of the initial states, from those of y and of the last states.
inline void lstm_backward(const Threads& threads, const Sequence& s, const float* ct_y, const float* ct_h,
                          const float* ct_c, const float* gates, const float* cells, const float* c0, const float* r,
                          float* ct_gates, float* ct_h0, float* ct_c0) {
  const size_t H = s.hidden, n = 4 * H, states = s.batch * H, panels = divided_up(H, tile_columns);
  const Buffer packed(packed_size(n, H));
  pack(threads, rows_of(r, H), n, H, packed.data());

  s.share_batch(threads, H * n, [&](size_t begin, size_t end) {
    // The results hold the cotangents of the states on their way back.
    const size_t offset = begin * H, size = (end - begin) * H;
    float *dh = ct_h0 + offset, *dc = ct_c0 + offset;
    std::copy(ct_h + offset, ct_h + offset + size, dh);
    std::copy(ct_c + offset, ct_c + offset + size, dc);
    for (size_t step = s.time; step-- > 0;) {
      const size_t t = s.at(step);
      const float* before = step ? cells + s.at(step - 1) * states + offset : c0 + offset;
      const float* after = cells + t * states + offset;
      const float* dy = ct_y + t * states + offset;
      for (size_t row = 0; row < end - begin; ++row) {
        const size_t first = (t * s.batch + begin + row) * n;
        const float *gi = gates + first, *go = gi + H, *gf = go + H, *gg = gf + H;
        float *di = ct_gates + first, *d_o = di + H, *df = d_o + H, *dg = df + H;
        vectors(H, [&](size_t u, size_t count) {
          const size_t at = row * H + u;
          const vfloat i = load_some(gi + u, count), o = load_some(go + u, count);
          const vfloat f = load_some(gf + u, count), g = load_some(gg + u, count);
          const vfloat tanh_c = tanh(load_some(after + at, count));
          const vfloat ct = load_some(dh + at, count) + load_some(dy + at, count);
          const vfloat cell = load_some(dc + at, count) + ct * o * (1.f - tanh_c * tanh_c);
          store_some(di + u, cell * g * i * (1.f - i), count);
          store_some(d_o + u, ct * tanh_c * o * (1.f - o), count);
          store_some(df + u, cell * load_some(before + at, count) * f * (1.f - f), count);
          store_some(dg + u, cell * i * (1.f - g * g), count);
          store_some(dc + at, cell * f, count);
        });
      }
      const Matrix own = rows_of(ct_gates + (t * s.batch + begin) * n, n);
      gemm_block(end - begin, H, n, own, packed_panels(packed.data(), n), 0, panels, dh, H, false);
    }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
