// The gradient of attention. With P the probabilities, which the scores and the logarithms of their sums give again:
// dV = Pᵀ dY, dS = P (dP - sum(P dP)) of dP = dY Vᵀ, dQ = scale dS K, dK = scale dSᵀ Q.
#include "attention/family.h"
#include "attention/scores.h"
#include "core/scratch.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// One head: what it is given, and its gradients. Those of keys and values are sums over the queries of a piece.
struct Head {
  Matrix ct, q, k, v;
  const float* log_sums;
  Mask mask;
  float *dq, *dk, *dv;
  size_t dq_row, dk_row, dv_row;  // how far apart rows are
};

// Rows of a matrix, copied beside one another unless they are so already.
Matrix adjacent(Matrix from, size_t rows, size_t columns, float* memory) {
  if (from.row == static_cast<ptrdiff_t>(columns)) return from;
  for (size_t row = 0; row < rows; ++row) std::copy_n(from.at(row, 0), columns, memory + row * columns);
  return rows_of(memory, columns);
}

template <Masking masking>
class Backward {
 public:
  Backward(const Sizes& sizes, float scale) : sizes_(sizes), scale_(scale) {}

  // Queries [first, end) of one head.
  void piece(const Head& head, size_t first, size_t end) const {
    const auto& [batch, heads, queries, keys, depth, width] = sizes_;
    const size_t block = sizes_.block(), stride = sizes_.stride();
    const bool adds_to_k = head.dk_row == depth, adds_to_v = head.dv_row == width;
    thread_local Scratch memory;
    const auto [by_key, by_value, packed_k, p, ds, rows_packed, own_q, own_ct, own_k, own_v] = memory.pieces({
        packed_size(depth, keys), packed_size(width, keys), packed_size(keys, depth), block * stride, block * stride,
        packed_size(block, std::max(depth, width)), block * depth, block * width, adds_to_k ? 0 : keys * depth,
        adds_to_v ? 0 : keys * width});
    float *const dk = adds_to_k ? head.dk : own_k, *const dv = adds_to_v ? head.dv : own_v;
    std::fill_n(dk, keys * depth, 0.f);
    std::fill_n(dv, keys * width, 0.f);
    pack(Threads(), head.k.transposed(), depth, keys, by_key);
    pack(Threads(), head.v.transposed(), width, keys, by_value);
    pack(Threads(), head.k, keys, depth, packed_k);
    for (size_t row = first; row < end; row += block) {
      const size_t rows = std::min(block, end - row), taken = keys_of<masking>(row + rows - 1, keys);
      const size_t panels = divided_up(taken, tile_columns);
      const Matrix q = adjacent(head.q.from(row, 0), rows, depth, own_q);
      const Matrix ct = adjacent(head.ct.from(row, 0), rows, width, own_ct);
      gemm_block(rows, taken, depth, q, packed_panels(by_key, depth), 0, panels, p, stride, false);
      gemm_block(rows, taken, width, ct, packed_panels(by_value, width), 0, panels, ds, stride, false);
      for (size_t i = 0; i < rows; ++i)
        of_scores(p + i * stride, ds + i * stride, taken, head.mask, row + i, head.log_sums[row + i]);
      gemm_block(rows, depth, taken, rows_of(ds, stride), packed_panels(packed_k, keys), 0, divided_up(depth, tile_columns),
                 head.dq + row * head.dq_row, head.dq_row, false);
      add_product(taken, rows, ds, q, depth, rows_packed, dk);
      add_product(taken, rows, p, ct, width, rows_packed, dv);
    }
    for (size_t key = 0; key < keys; ++key) {
      if (!adds_to_k) std::copy_n(dk + key * depth, depth, head.dk + key * head.dk_row);
      if (!adds_to_v) std::copy_n(dv + key * width, width, head.dv + key * head.dv_row);
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

// What a head is cut into has sums of its own, [heads, pieces, positions, width], which are added up in the end.
void add_pieces(const Threads& threads, const float* parts, const Sizes& sizes, size_t width, Rows<float> to) {
  const size_t pieces = sizes.pieces(), size = sizes.keys * width;
  threads.ranges(sizes.all_heads(), 1 + 16384 / std::max<size_t>(size, 1), [&](size_t begin, size_t end) {
    for (size_t head = begin; head < end; ++head) {
      float* const own = to.of(head, sizes.heads);
      for (size_t piece = 0; piece < pieces; ++piece) {
        const float* const from = parts + (head * pieces + piece) * size;
        for (size_t key = 0; key < sizes.keys; ++key) {
          float* const row = own + key * to.row;
          const float* const term = from + key * width;
          if (piece == 0)
            std::copy_n(term, width, row);
          else
            vectors(width, [&](size_t i, auto extent) { store(row + i, load(row + i, extent) + load(term + i, extent), extent); });
        }
      }
    }
  });
}

// Gradients may be null.
template <Masking masking>
void pull_back(const Threads& threads, const Sizes& sizes, float scale, Rows<const float> ct, Rows<const float> q,
               Rows<const float> k, Rows<const float> v, const float* log_sums, const Masks& masks, Rows<float> dq,
               Rows<float> dk, Rows<float> dv) {
  const auto& [batch, heads, queries, keys, depth, width] = sizes;
  const size_t pieces = sizes.pieces(), all = sizes.all_heads();
  // Outputs that nothing reads, and sums of pieces, have memory here.
  const Buffer own_q(dq.data ? 0 : all * queries * depth);
  const Buffer parts_k(dk.data && pieces == 1 ? 0 : all * pieces * keys * depth);
  const Buffer parts_v(dv.data && pieces == 1 ? 0 : all * pieces * keys * width);
  const Rows<float> to_q = dq.data ? dq : rows_in_order(own_q.data(), heads, queries, depth);
  const Backward<masking> backward(sizes, scale);
  for_pieces(threads, sizes, [&, heads = heads, queries = queries, keys = keys, depth = depth, width = width](
                                 size_t head, size_t piece, size_t first, size_t end) {
    const size_t part = head * pieces + piece;
    const bool own_k = parts_k.size() > 0, own_v = parts_v.size() > 0;
    backward.piece({ct.matrix(head, heads), q.matrix(head, heads), k.matrix(head, heads), v.matrix(head, heads),
                    log_sums + head * queries, masks.of(head / heads, head % heads), to_q.of(head, heads),
                    own_k ? parts_k.data() + part * keys * depth : dk.of(head, heads),
                    own_v ? parts_v.data() + part * keys * width : dv.of(head, heads), to_q.row, own_k ? depth : dk.row,
                    own_v ? width : dv.row},
                   first, end);
  });
  if (dk.data && parts_k.size()) add_pieces(threads, parts_k.data(), sizes, depth, dk);
  if (dv.data && parts_v.size()) add_pieces(threads, parts_v.data(), sizes, width, dv);
}

template <Masking masking>
struct AttentionGradient {
  static constexpr const char* name =
      name_for(masking, "AttentionGradient_float", "CausalAttentionGradient_float", "MaskedAttentionGradient_float");
  static constexpr Floats<is_added(masking) ? 6 : 5> inputs{};
  static constexpr Floats<3> outputs{};
  float scale;

  explicit AttentionGradient(const Attributes& attributes) : scale(attributes.number("scale")) {}

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
    const auto& [batch, heads, queries, keys, depth, width] = sizes;
    pull_back<masking>(context.threads(), sizes, scale, rows_in_order(ct.data, heads, queries, width),
                       rows_in_order(q.data, heads, queries, depth), rows_in_order(k.data, heads, keys, depth),
                       rows_in_order(v.data, heads, keys, width), log_sums.data, masks, rows_in_order(dq.data, heads, queries, depth),
                       rows_in_order(dk.data, heads, keys, depth), rows_in_order(dv.data, heads, keys, width));
  }
};

// The same with queries, keys and values, and their gradients, in one tensor.
template <Masking masking>
struct QkvAttentionGradient {
  static constexpr const char* name =
      name_for(masking, "QkvAttentionGradient_float", "QkvCausalAttentionGradient_float", "QkvMaskedAttentionGradient_float");
  static constexpr Floats<is_added(masking) ? 4 : 3> inputs{};
  static constexpr Type outputs[] = {Type::Float};
  float scale;
  std::vector<int64_t> perm;

  explicit QkvAttentionGradient(const Attributes& attributes)
      : scale(attributes.number("scale")), perm(attributes.integers("perm")) {}

  void compute(Context& context) const {
    const auto ct = context.input<float>(0), x = context.input<float>(1), log_sums = context.input<float>(2);
    const Packed packed(x.shape, perm);
    const Sizes sizes = packed.sizes();
    require(ct.shape == packed.y_shape(), "cotangents must be of the result's shape");
    require(log_sums.size() == sizes.all_heads() * sizes.queries, "one sum of exponentials per query");
    const Masks masks = is_added(masking) ? Masks(context.input<float>(3), sizes) : Masks();
    const auto dx = context.output<float>(0, x.shape);
    if (sizes.keys == 0 || dx.data == nullptr) return;
    pull_back<masking>(context.threads(), sizes, scale, packed.y(ct.data), packed.part(x.data, 0), packed.part(x.data, 1),
                       packed.part(x.data, 2), log_sums.data, masks, packed.part(dx.data, 0), packed.part(dx.data, 1),
                       packed.part(dx.data, 2));
  }
};

template <Masking masking>
void add(Domain& domain) {
  domain.add<AttentionGradient<masking>>();
  domain.add<QkvAttentionGradient<masking>>();
}

}  // namespace

void add_attention_gradient(Domain& domain) {
  add<Masking::None>(domain);
  add<Masking::Causal>(domain);
  add<Masking::Added>(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
