// Products with weights that are stored as integers of 2, 4 or 8 bits, with a scale and a zero point for each block of a
// row.
//
// Weights become floats panel by panel, in memory that stays in the cache, on their way into the product of matrices: the
// same floats that DequantizeLinear gives, so that the sums are those of a float product.
#include <type_traits>

#include "core/gemm.h"
#include "core/op.h"
#include "product/codes.h"
#include "product/family.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

// Blocks of the sizes that MatMulNBits has: no vector, and no word of codes, reaches over the end of one.
size_t block_size_of(const Attributes& attributes) {
  const int64_t size = attributes.integer("block_size");
  require(size >= 16 && size % 16 == 0, "the size of a block must be a multiple of 16");
  return static_cast<size_t>(size);
}

// Zero points: floats, or codes as many bits long as those of the weight, each `pitch` of which begin with a new byte.
template <int bits, class Zero>
struct Zeros {
  const Zero* data;  // null: the middle of the range of codes
  size_t pitch;

  float at(size_t row, size_t block) const {
    if (data == nullptr) return 1 << (bits - 1);
    const size_t place = row * pitch + block;
    if constexpr (std::is_same_v<Zero, float>)
      return data[place];
    else
      return static_cast<float>(data[place * bits / 8] >> (place * bits % 8) & ((1 << bits) - 1));
  }
};

// A weight [rows, columns]: (code - zero point) * scale, with a scale and a zero point for each `size` codes of a row,
// which takes whole bytes.
template <int bits, class Zero>
struct Weight {
  const uint8_t* codes;
  const float* scales;
  Zeros<bits, Zero> zeros;
  size_t rows, blocks, size;

  static vfloat floats(vint vector, vfloat zero, vfloat scale) {
    return (__builtin_convertvector(vector, vfloat) - zero) * scale;
  }
  const uint8_t* at(size_t row, size_t column) const { return codes + (row * blocks * size + column) * bits / 8; }

  // Writes rows [k, k + deep) of the panels [first, end) of the weight.
  void make_panels(size_t k, size_t deep, size_t first, size_t end, float* to) const {
    const size_t until = std::min(blocks * size, end * tile_columns);
    for (size_t r = 0; r < deep; ++r, to += tile_columns) {
      const auto place = [&](size_t j) { return to + (j / tile_columns - first) * deep * tile_columns + j % tile_columns; };
      size_t j = first * tile_columns;
      // A block is a multiple of the lanes, so that each vector has one scale.
      for (size_t block = j / size; j < until; ++block) {
        const vfloat scale = splat(scales[(k + r) * blocks + block]), zero = splat(zeros.at(k + r, block));
        for (const size_t last = std::min(until, (block + 1) * size); j < last; j += lanes)
          store(place(j), floats(codes_at<bits>(at(k + r, j)), zero, scale));
      }
      for (; j < end * tile_columns; j += lanes) store(place(j), vfloat{});
    }
  }

  // Writes rows [k, k + deep) of the panels [first, end) of the transposed weight, whose columns are rows of codes. Where
  // there are no more rows the last one is repeated.
  void make_transposed_panels(size_t k, size_t deep, size_t first, size_t end, float* to) const {
    for (size_t column = first * tile_columns; column < end * tile_columns; column += tile_columns, to += deep * tile_columns)
      for (size_t v = 0; v < tile_vectors; ++v) make_transposed_vectors(k, deep, column + v * lanes, to + v * lanes);
  }

 private:
  // A word of codes of each row is a vector, of which shifts bring one code after the other to its place: nothing else is
  // needed to transpose.
  void make_transposed_vectors(size_t k, size_t deep, size_t column, float* to) const {
    constexpr size_t codes_of_word = 32 / bits;
    size_t row[lanes];
    for (size_t i = 0; i < lanes; ++i) row[i] = std::min(column + i, rows - 1);
    for (size_t begin = k; begin < k + deep;) {
      const size_t block = begin / size, last = std::min(k + deep, (block + 1) * size);
      float scale_of[lanes], zero_of[lanes];
      for (size_t i = 0; i < lanes; ++i) {
        scale_of[i] = scales[row[i] * blocks + block];
        zero_of[i] = zeros.at(row[i], block);
      }
      const vfloat scale = load(scale_of), zero = load(zero_of);
      for (; begin < last; begin += codes_of_word) {
        int32_t words_of[lanes];
        for (size_t i = 0; i < lanes; ++i) std::memcpy(words_of + i, at(row[i], begin), sizeof(int32_t));
        vint words;
        std::memcpy(&words, words_of, sizeof words);
        const size_t some = std::min(codes_of_word, last - begin);
        for (size_t c = 0; c < some; ++c, words >>= bits, to += tile_columns)
          store(to, floats(words & ((1 << bits) - 1), zero, scale));
      }
      begin = last;
    }
  }
};

// x W, for a weight W as DequantizeLinear takes it, or one with zero points in floating point.
template <int bits, class Zero>
struct Product {
  static constexpr bool float_zeros = std::is_same_v<Zero, float>;
  static constexpr const char* name = bits == 4 ? (float_zeros ? "Uint4ProductFloatZeros_float" : "Uint4Product_float")
                                                : (float_zeros ? "Uint8ProductFloatZeros_float" : "Uint8Product_float");
  static constexpr Type code = bits == 4 ? Type::Uint4 : Type::Uint8;
  static constexpr Type inputs[] = {Type::Float, code, Type::Float, float_zeros ? Type::Float : code};
  static constexpr Type outputs[] = {Type::Float};

  explicit Product(const Attributes& attributes) : size_(block_size_of(attributes)) {}

  void compute(Context& context) const {
    const auto x = context.input<float>(0), scales = context.input<float>(2);
    const auto codes = context.input<uint8_t>(1);
    const auto zeros = context.input<Zero>(3);
    require(!x.shape.empty() && codes.shape.size() == 2, "there must be rows, and a matrix of codes");
    const auto depth = static_cast<size_t>(codes.shape[0]), columns = static_cast<size_t>(codes.shape[1]);
    const size_t blocks = columns / size_;
    require(static_cast<size_t>(x.shape.back()) == depth, "the rows of codes must be as many as the columns of x");
    require(columns == blocks * size_, "a row of codes must be whole blocks");
    require(scales.size() == depth * blocks && zeros.size() == depth * blocks, "each block must have a scale and a zero point");
    Shape shape = x.shape;
    shape.back() = codes.shape[1];
    const auto y = context.output<float>(0, shape);
    if (y.data == nullptr) return;
    const Weight<bits, Zero> weight{codes.data, scales.data, {zeros.data, blocks}, depth, blocks, size_};
    const auto make = [&](size_t k, size_t deep, size_t first, size_t end, float* to) {
      weight.make_panels(k, deep, first, end, to);
    };
    const size_t rows = count(x.shape.begin(), x.shape.end() - 1);
    gemm_of_made(context.threads(), rows, columns, depth, rows_of(x.data, depth), make, y.data, columns);
  }

 private:
  size_t size_;
};

// x Wᵀ, for a weight W as MatMulNBits takes it.
template <class Zero>
struct PackedMatMul {
  static constexpr bool float_zeros = std::is_same_v<Zero, float>;
  static constexpr const char* name = float_zeros ? "PackedMatMulFloatZeros_float" : "PackedMatMul_float";
  static constexpr Type inputs[] = {Type::Float, Type::Uint8, Type::Float, float_zeros ? Type::Float : Type::Uint8};
  static constexpr Type outputs[] = {Type::Float};
  static constexpr size_t optional_from = 3;

  explicit PackedMatMul(const Attributes& attributes)
      : depth_(attributes.integer("K")),
        columns_(attributes.integer("N")),
        bits_(attributes.integer("bits")),
        size_(block_size_of(attributes)) {
    require(depth_ > 0 && columns_ > 0, "there must be rows and columns");
    require(bits_ == 2 || bits_ == 4 || bits_ == 8, "codes must have 2, 4 or 8 bits");
  }

  void compute(Context& context) const {
    if (bits_ == 2)
      multiply<2>(context);
    else if (bits_ == 4)
      multiply<4>(context);
    else
      multiply<8>(context);
  }

 private:
  template <int bits>
  void multiply(Context& context) const {
    const auto x = context.input<float>(0), scales = context.input<float>(2);
    const auto codes = context.input<uint8_t>(1);
    const auto zeros = context.input<Zero>(3);
    const auto depth = static_cast<size_t>(depth_), columns = static_cast<size_t>(columns_);
    const size_t blocks = divided_up(depth, size_), pitch = float_zeros ? blocks : divided_up(blocks * bits, 8) * 8 / bits;
    require(!x.shape.empty() && x.shape.back() == depth_, "the last axis of x must be K");
    require(codes.size() == columns * blocks * size_ * bits / 8, "there must be N rows of codes, of whole blocks");
    require(scales.size() == columns * blocks, "each block must have a scale");
    require(!zeros.given() || zeros.size() == columns * (float_zeros ? blocks : pitch * bits / 8),
            "each block must have a zero point");
    Shape shape = x.shape;
    shape.back() = columns_;
    const auto y = context.output<float>(0, shape);
    if (y.data == nullptr) return;
    const Weight<bits, Zero> weight{codes.data, scales.data, {zeros.data, pitch}, columns, blocks, size_};
    const auto make = [&](size_t k, size_t deep, size_t first, size_t end, float* to) {
      weight.make_transposed_panels(k, deep, first, end, to);
    };
    const size_t rows = count(x.shape.begin(), x.shape.end() - 1);
    gemm_of_made(context.threads(), rows, columns, depth, rows_of(x.data, depth), make, y.data, columns);
  }

  int64_t depth_, columns_, bits_;
  size_t size_;
};

}  // namespace

void add_quantized_products(Domain& domain) {
  domain.add<Product<4, uint8_t>>();
  domain.add<Product<4, float>>();
  domain.add<Product<8, uint8_t>>();
  domain.add<Product<8, float>>();
  domain.add<PackedMatMul<uint8_t>>();
  domain.add<PackedMatMul<float>>();
}

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
