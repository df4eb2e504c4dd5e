// The gradient of attention. With P the probabilities, which the scores and the logarithms of their sums give again:
// dV = Pᵀ dY, dS = P (dP - sum(P dP)) of dP = dY Vᵀ, dQ = scale dS K, dK = scale dSᵀ Q.
#include "attention/family.h"
#include "attention/scores.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// One head: what it is given, and its gradients. Those of keys and values are sums over the queries of a piece.
struct Head {
  const float *ct, *q, *k, *v, *log_sums;
  Mask mask;
  float *dq, *dk, *dv;
};

template <Masking masking>
class Backward {
 public:
  Backward(const Sizes& sizes, float scale) : sizes_(sizes), scale_(scale) {}

  // Queries [first, end) of one head.
  void piece(const Head& head, size_t first, size_t end) const {
    const auto& [batch, heads, queries, keys, depth, width] = sizes_;
    std::fill(head.dk, head.dk + keys * depth, 0.f);
    std::fill(head.dv, head.dv + keys * width, 0.f);
    const Matrix k = rows_of(head.k, depth), v = rows_of(head.v, width);
    const Buffer by_key(packed_size(depth, keys)), by_value(packed_size(width, keys)), packed_k(packed_size(keys, depth));
    pack(Threads(), k.transposed(), depth, keys, by_key.data());
    pack(Threads(), v.transposed(), width, keys, by_value.data());
    pack(Threads(), k, keys, depth, packed_k.data());
    const size_t block = sizes_.block(), stride = sizes_.stride();
    const Buffer p(block * stride), ds(block * stride), rows_packed(packed_size(block, std::max(depth, width)));
    for (size_t row = first; row < end; row += block) {
      const size_t rows = std::min(block, end - row), taken = keys_of<masking>(row + rows - 1, keys);
      const size_t panels = divided_up(taken, tile_columns);
      const Matrix q = rows_of(head.q + row * depth, depth), ct = rows_of(head.ct + row * width, width);
      gemm_block(rows, taken, depth, q, packed_panels(by_key.data(), depth), 0, panels, p.data(), stride, false);
      gemm_block(rows, taken, width, ct, packed_panels(by_value.data(), width), 0, panels, ds.data(), stride, false);
      for (size_t i = 0; i < rows; ++i)
        of_scores(p.data() + i * stride, ds.data() + i * stride, taken, head.mask, row + i, head.log_sums[row + i]);
      gemm_block(rows, depth, taken, rows_of(ds.data(), stride), packed_panels(packed_k.data(), keys), 0, divided_up(depth, tile_columns),
                 head.dq + row * depth, depth, false);
      add_product(taken, rows, ds.data(), q, depth, rows_packed.data(), head.dk);
      add_product(taken, rows, p.data(), ct, width, rows_packed.data(), head.dv);
    }
  }

 private:
  // Of one query: products with keys become probabilities, and those of cotangents with values the scaled gradients of
  // scores; zero where nothing is attended to.
  void of_scores(float* p, float* ds, size_t taken, const Mask& mask, size_t query, float log_sum) const {
    const size_t attended = keys_of<masking>(query, sizes_.keys);
    vfloat sums{};
    scores_of<masking>(p, attended, scale_, mask, query, [&](size_t i, auto extent, vfloat score) {
      const vfloat own = exp(score - log_sum);
      store(p + i, own, extent);
      sums += load(p + i, extent) * load(ds + i, extent);
    });
    const float mean = sum(sums);
    vectors(attended, [&](size_t i, auto extent) {
      store(ds + i, load(p + i, extent) * (load(ds + i, extent) - mean) * scale_, extent);
    });
    std::fill(p + attended, p + taken, 0.f);
    std::fill(ds + attended, ds + taken, 0.f);
  }

  // to [count, columns] += factorsᵀ B of so many rows.
  void add_product(size_t count, size_t rows, const float* factors, Matrix b, size_t columns, float* packed, float* to) const {
    pack(Threads(), b, rows, columns, packed);
    gemm_block(count, columns, rows, rows_of(factors, sizes_.stride()).transposed(), packed_panels(packed, rows), 0,
               divided_up(columns, tile_columns), to, columns, true);
  }

  Sizes sizes_;
  float scale_;
};

// What a head is cut into has sums of its own, which are added up in the end.
void add_pieces(const Threads& threads, const float* parts, size_t heads, size_t pieces, size_t size, float* to) {
  threads.ranges(heads, 1 + 16384 / std::max<size_t>(size, 1), [&](size_t begin, size_t end) {
    for (size_t head = begin; head < end; ++head) {
      std::copy(parts + head * pieces * size, parts + (head * pieces + 1) * size, to + head * size);
      for (size_t piece = 1; piece < pieces; ++piece) {
        const float* from = parts + (head * pieces + piece) * size;
        float* own = to + head * size;
        vectors(size, [&](size_t i, auto extent) { store(own + i, load(own + i, extent) + load(from + i, extent), extent); });
      }
    }
  });
}

template <Masking masking>
struct AttentionGradientOp {
  static constexpr Floats<is_added(masking) ? 6 : 5> inputs{};
  static constexpr Floats<3> outputs{};
  float scale;

  explicit AttentionGradientOp(const Attributes& attributes) : scale(attributes.number("scale")) {}

  void compute(Context& context) const {
    const auto ct = context.input<float>(0), q = context.input<float>(1), k = context.input<float>(2);
    const auto v = context.input<float>(3), log_sums = context.input<float>(4);
    const Sizes sizes(q.shape, k.shape, v.shape);
    require(ct.shape == Shape{q.shape[0], q.shape[1], q.shape[2], v.shape[3]}, "cotangents must be of the result's shape");
    require(log_sums.size() == sizes.all_heads() * sizes.queries, "one sum of exponentials per query");
    const Masks masks = is_added(masking) ? Masks(context.input<float>(5), sizes) : Masks();
    const auto dq = context.output<float>(0, q.shape), dk = context.output<float>(1, k.shape);
    const auto dv = context.output<float>(2, v.shape);
    if (sizes.keys == 0) {
      if (dq.data) std::fill_n(dq.data, dq.size(), 0.f);
      return;
    }
    const Threads threads = context.threads();
    const size_t pieces = sizes.pieces(), heads = sizes.all_heads();
    const size_t of_k = sizes.keys * sizes.depth, of_v = sizes.keys * sizes.width;
    // Outputs that nothing reads, and sums of pieces, have memory here.
    const Buffer own_q(dq.data ? 0 : q.size());
    const Buffer parts_k(dk.data && pieces == 1 ? 0 : heads * pieces * of_k);
    const Buffer parts_v(dv.data && pieces == 1 ? 0 : heads * pieces * of_v);
    float* const to_q = dq.data ? dq.data : own_q.data();
    float* const to_k = parts_k.size() ? parts_k.data() : dk.data;
    float* const to_v = parts_v.size() ? parts_v.data() : dv.data;
    const Backward<masking> backward(sizes, scale);
    for_pieces(threads, sizes, [&](size_t head, size_t piece, size_t first, size_t end) {
      const size_t of_q = sizes.queries * sizes.depth, of_y = sizes.queries * sizes.width;
      backward.piece({ct.data + head * of_y, q.data + head * of_q, k.data + head * of_k, v.data + head * of_v,
                      log_sums.data + head * sizes.queries, masks.of(head / sizes.heads, head % sizes.heads),
                      to_q + head * of_q, to_k + (head * pieces + piece) * of_k, to_v + (head * pieces + piece) * of_v},
                     first, end);
    });
    if (dk.data && parts_k.size()) add_pieces(threads, parts_k.data(), heads, pieces, of_k, dk.data);
    if (dv.data && parts_v.size()) add_pieces(threads, parts_v.data(), heads, pieces, of_v, dv.data);
  }
};

struct AttentionGradient : AttentionGradientOp<Masking::None> {
  static constexpr const char* name = "AttentionGradient_float";
  using AttentionGradientOp::AttentionGradientOp;
};
struct CausalAttentionGradient : AttentionGradientOp<Masking::Causal> {
  static constexpr const char* name = "CausalAttentionGradient_float";
  using AttentionGradientOp::AttentionGradientOp;
};
struct MaskedAttentionGradient : AttentionGradientOp<Masking::Added> {
  static constexpr const char* name = "MaskedAttentionGradient_float";
  using AttentionGradientOp::AttentionGradientOp;
};

}  // namespace

void add_attention_gradient(Domain& domain) {
  domain.add<AttentionGradient>();
  domain.add<CausalAttentionGradient>();
  domain.add<MaskedAttentionGradient>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
