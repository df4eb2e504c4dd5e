// softmax(scale Q Kᵀ + mask) V, and the logarithm of what the exponentials add up to, from which the gradient has the
// probabilities again.
#include "attention/family.h"
#include "attention/scores.h"
#include "core/scratch.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

template <Masking masking>
class Forward {
 public:
  Forward(const Sizes& sizes, float scale) : sizes_(sizes), scale_(scale) {}

  // Queries [first, end) of one head; rows of y are `y_row` apart.
  void piece(Matrix q, Matrix k, Matrix v, const Mask& mask, size_t first, size_t end, float* y, size_t y_row,
             float* log_sums) const {
    const auto& [batch, heads, queries, keys, depth, width] = sizes_;
    const size_t block = sizes_.block(), stride = sizes_.stride();
    thread_local Scratch memory;
    const auto [packed_k, packed_v, scores, inverses] =
        memory.pieces({packed_size(depth, keys), packed_size(keys, width), block * stride, block});
    pack(Threads(), k.transposed(), depth, keys, packed_k);
    pack(Threads(), v, keys, width, packed_v);
    for (size_t row = first; row < end; row += block) {
      const size_t rows = std::min(block, end - row), taken = keys_of<masking>(row + rows - 1, keys);
      gemm_block(rows, taken, depth, q.from(row, 0), packed_panels(packed_k, depth), 0, divided_up(taken, tile_columns),
                 scores, stride, false);
      for (size_t i = 0; i < rows; ++i) {
        float* own = scores + i * stride;
        const size_t attended = keys_of<masking>(row + i, keys);
        log_sums[row + i] = exponentials(own, attended, mask, row + i, inverses + i);
        std::fill(own + attended, own + taken, 0.f);
      }
      const auto normalized = [inverses = inverses](vfloat sum, size_t i, size_t, size_t) { return sum * inverses[i]; };
      gemm_block(rows, width, taken, rows_of(scores, stride), packed_panels(packed_v, keys), 0, divided_up(width, tile_columns),
                 y + row * y_row, y_row, false, 0, normalized);
    }
  }

 private:
  // Products become exponentials; returns the logarithm of their sum, and the inverse of that.
  float exponentials(float* products, size_t count, const Mask& mask, size_t query, float* inverse) const {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    vfloat most = splat(-infinity), sum{};
    scores_of<masking>(products, count, scale_, mask, query, [&](size_t i, auto extent, vfloat score) {
      store(products + i, score, extent);
      most = max(select(within(extent), score, most), most);
    });
    float largest = -infinity;
    for (size_t lane = 0; lane < lanes; ++lane) largest = std::max(largest, most[lane]);
    if (masking == Masking::AddedSafely && largest == -infinity && !has_nan(products, count)) {
      std::fill(products, products + count, 0.f);
      *inverse = 0;
      return infinity;
    }
    vectors(count, [&](size_t i, auto extent) {
      const vfloat e = select(within(extent), exp(load(products + i, extent) - largest), vfloat{});
      store(products + i, e, extent);
      sum += e;
    });
    const float total = onnxtrain::ONNXTRAIN_LEVEL::sum(sum);
    *inverse = 1 / total;
    return largest + std::log(total);
  }

  static bool has_nan(const float* values, size_t count) {
    return std::any_of(values, values + count, [](float value) { return value != value; });
  }

  static vint within(Full) { return vint{} == 0; }
  static vint within(Part part) {
    return indices([](int i) { return i; }) < static_cast<int>(part.count);
  }

  Sizes sizes_;
  float scale_;
};

// y and log_sums, [batch, heads, queries], may be null.
template <Masking masking>
void attend(const Threads& threads, const Sizes& sizes, float scale, Rows<const float> q, Rows<const float> k,
            Rows<const float> v, const Masks& masks, Rows<float> y, float* log_sums) {
  const size_t heads = sizes.heads;
  // Results that nothing reads have memory here.
  const Buffer own_y(y.data ? 0 : sizes.all_heads() * sizes.queries * sizes.width);
  const Buffer own_sums(log_sums ? 0 : sizes.all_heads() * sizes.queries);
  if (y.data == nullptr) y = rows_in_order(own_y.data(), heads, sizes.queries, sizes.width);
  float* const sums = log_sums ? log_sums : own_sums.data();
  const Forward<masking> forward(sizes, scale);
  for_pieces(threads, sizes, [&](size_t head, size_t, size_t first, size_t end) {
    forward.piece(q.matrix(head, heads), k.matrix(head, heads), v.matrix(head, heads), masks.of(head / heads, head % heads),
                  first, end, y.of(head, heads), y.row, sums + head * sizes.queries);
  });
}

template <Masking masking>
struct Attention {
  static constexpr const char* name = name_for(masking, "Attention_float", "CausalAttention_float", "MaskedAttention_float",
                                               "SafeMaskedAttention_float");
  static constexpr Floats<is_added(masking) ? 4 : 3> inputs{};
  static constexpr Floats<2> outputs{};
  float scale;

  explicit Attention(const Attributes& attributes) : scale(attributes.number("scale")) {}

  void compute(Context& context) const {
    const auto q = context.input<float>(0), k = context.input<float>(1), v = context.input<float>(2);
    const Sizes sizes(q.shape, k.shape, v.shape);
    const Masks masks = is_added(masking) ? Masks(context.input<float>(3), sizes) : Masks();
    const auto y = context.output<float>(0, {q.shape[0], q.shape[1], q.shape[2], v.shape[3]});
    const auto log_sums = context.output<float>(1, {q.shape[0], q.shape[1], q.shape[2]});
    if (sizes.keys == 0) {  // sums over nothing
      if (y.data) std::fill_n(y.data, y.size(), 0.f);
      if (log_sums.data) std::fill_n(log_sums.data, log_sums.size(), -std::numeric_limits<float>::infinity());
      return;
    }
    const auto& [batch, heads, queries, keys, depth, width] = sizes;
    attend<masking>(context.threads(), sizes, scale, rows_in_order(q.data, heads, queries, depth),
                    rows_in_order(k.data, heads, keys, depth), rows_in_order(v.data, heads, keys, width), masks,
                    rows_in_order(y.data, heads, queries, width), log_sums.data);
  }
};

// The same with queries, keys and values in one tensor.
template <Masking masking>
struct QkvAttention {
  static constexpr const char* name = name_for(masking, "QkvAttention_float", "QkvCausalAttention_float",
                                               "QkvMaskedAttention_float", "QkvSafeMaskedAttention_float");
  static constexpr Floats<is_added(masking) ? 2 : 1> inputs{};
  static constexpr Floats<2> outputs{};
  float scale;
  std::vector<int64_t> perm;

  explicit QkvAttention(const Attributes& attributes)
      : scale(attributes.number("scale")), perm(attributes.integers("perm")) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0);
    const Packed packed(x.shape, perm);
    const Sizes sizes = packed.sizes();
    const Masks masks = is_added(masking) ? Masks(context.input<float>(1), sizes) : Masks();
    const auto y = context.output<float>(0, packed.y_shape());
    const auto size = [](size_t n) { return static_cast<int64_t>(n); };
    const auto log_sums = context.output<float>(1, {size(sizes.batch), size(sizes.heads), size(sizes.queries)});
    if (sizes.keys == 0) return;
    attend<masking>(context.threads(), sizes, scale, packed.part(x.data, 0), packed.part(x.data, 1), packed.part(x.data, 2), masks,
                    packed.y(y.data), log_sums.data);
  }
};

template <Masking masking>
void add(Domain& domain) {
  domain.add<Attention<masking>>();
  domain.add<QkvAttention<masking>>();
}

}  // namespace

void add_attention(Domain& domain) {
  add<Masking::None>(domain);
  add<Masking::Causal>(domain);
  add<Masking::Added>(domain);
  add<Masking::AddedSafely>(domain);
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
