// GRU: h' = (1 - z) h + z h_before with h = tanh(x_h + r (h_before R_hᵀ + b_h)), and gates z and r by the logistic function.
#pragma once

#include "recurrent/sequence.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {

struct GruLayer {
  const float *x, *w, *r, *b;  // [time, batch, input], [3 hidden, input], [3 hidden, hidden], [6 hidden]
  const float* h0;             // [batch, hidden]
};

// y [time, batch, hidden] and the last state, and for the gradient the gates z, r, h [time, batch, 3 hidden] and what r is
// multiplied with [time, batch, hidden].
inline void gru_forward(const Threads& threads, const Sequence& s, const GruLayer& layer, float* y, float* last_h,
                        float* gates, float* inner) {
  const size_t H = s.hidden, n = 3 * H, states = s.batch * H, panels = divided_up(n, tile_columns);
  const auto with_bias = [&](vfloat value, size_t, size_t column, size_t count) {
    return value + load_some(layer.b + column, count);
  };
  gemm(threads, s.time * s.batch, n, s.input, rows_of(layer.x, s.input), rows_of(layer.w, s.input).transposed(), gates, n,
       false, with_bias);
  const Buffer packed(packed_size(H, n));
  pack(threads, rows_of(layer.r, H).transposed(), H, n, packed.data());

  s.share_batch(threads, H * n, [&](size_t begin, size_t end) {
    const float *h = layer.h0 + begin * H, *bias = layer.b + n;
    const Buffer products((end - begin) * n);
    for (size_t step = 0; step < s.time; ++step) {
      const size_t t = s.at(step), first = t * states + begin * H;
      gemm_block(end - begin, n, H, rows_of(h, H), packed_panels(packed.data(), H), 0, panels, products.data(), n, false);
      for (size_t row = 0; row < end - begin; ++row) {
        const float *pz = products.data() + row * n, *pr = pz + H, *ph = pr + H;
        float *gz = gates + (t * s.batch + begin + row) * n, *gr = gz + H, *gh = gr + H;
        vectors(H, [&](size_t u, size_t count) {
          const size_t at = row * H + u;
          const auto sum = [&](const float* own, const float* other, const float* b) {
            return load_some(own + u, count) + (load_some(other + u, count) + load_some(b + u, count));
          };
          const vfloat z = sigmoid(sum(gz, pz, bias)), r = sigmoid(sum(gr, pr, bias + H));
          const vfloat hidden = load_some(ph + u, count) + load_some(bias + 2 * H + u, count);
          const vfloat g = tanh(load_some(gh + u, count) + r * hidden);
          store_some(gz + u, z, count), store_some(gr + u, r, count), store_some(gh + u, g, count);
          store_some(inner + first + at, hidden, count);
          store_some(y + first + at, (1.f - z) * g + z * load_some(h + at, count), count);
        });
      }
      h = y + first;
    }
    std::copy(h, h + (end - begin) * H, last_h + begin * H);
  });
}

// Cotangents of the two parts of the gates before their activations and of the initial state, from those of y and of the
// last state.
inline void gru_backward(const Threads& threads, const Sequence& s, const float* ct_y, const float* ct_h,
                         const float* gates, const float* inner, const float* y, const float* h0, const float* r,
                         float* ct_input, float* ct_hidden, float* ct_h0) {
  const size_t H = s.hidden, n = 3 * H, states = s.batch * H, panels = divided_up(H, tile_columns);
  const Buffer packed(packed_size(n, H));
  pack(threads, rows_of(r, H), n, H, packed.data());

  s.share_batch(threads, H * n, [&](size_t begin, size_t end) {
    const size_t offset = begin * H;
    float* dh = ct_h0 + offset;  // the cotangent of the state on its way back
    std::copy(ct_h + offset, ct_h + end * H, dh);
    for (size_t step = s.time; step-- > 0;) {
      const size_t t = s.at(step), now = t * states + offset;
      const float* before = step ? y + s.at(step - 1) * states + offset : h0 + offset;
      for (size_t row = 0; row < end - begin; ++row) {
        const size_t first = (t * s.batch + begin + row) * n;
        const float *gz = gates + first, *gr = gz + H, *gh = gr + H;
        float *iz = ct_input + first, *ir = iz + H, *ih = ir + H;
        float *hz = ct_hidden + first, *hr = hz + H, *hh = hr + H;
        vectors(H, [&](size_t u, size_t count) {
          const size_t at = row * H + u;
          const vfloat z = load_some(gz + u, count), reset = load_some(gr + u, count), h = load_some(gh + u, count);
          const vfloat ct = load_some(dh + at, count) + load_some(ct_y + now + at, count);
          const vfloat dz = ct * (load_some(before + at, count) - h) * z * (1.f - z);
          const vfloat dg = ct * (1.f - z) * (1.f - h * h);
          const vfloat dr = dg * load_some(inner + now + at, count) * reset * (1.f - reset);
          store_some(iz + u, dz, count), store_some(ir + u, dr, count), store_some(ih + u, dg, count);
          store_some(hz + u, dz, count), store_some(hr + u, dr, count), store_some(hh + u, dg * reset, count);
          store_some(dh + at, ct * z, count);
        });
      }
      const Matrix own = rows_of(ct_hidden + (t * s.batch + begin) * n, n);
      gemm_block(end - begin, H, n, own, packed_panels(packed.data(), n), 0, panels, dh, H, true);
    }
  });
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
