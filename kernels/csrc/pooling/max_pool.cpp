// MaxPool, with the indices of the maxima, which its gradient needs.
#include "core/scratch.h"
#include "families.h"
#include "pooling/pool.h"

namespace onnxtrain::ONNXTRAIN_LEVEL {
namespace {

struct MaxPool {
  static constexpr const char* name = "MaxPool_float";
  static constexpr Floats<1> inputs{};
  static constexpr Type outputs[] = {Type::Float, Type::Int64};

  explicit MaxPool(const Attributes& a)
      : kernel_(a.integers("kernel_shape")), strides_(a.integers("strides")), pads_(a.integers("pads")) {}

  void compute(Context& context) const {
    const auto x = context.input<const float>(0);
    Pool pool(x.shape, kernel_, strides_, pads_);
    pool.floor = -__builtin_inff();
    const Shape result = pool.result(x.shape);
    const auto y = context.output<float>(0, result);
    const auto places = context.output<int64_t>(1, result);
    const std::size_t size = static_cast<std::size_t>(volume(pool.in)), windows = static_cast<std::size_t>(volume(pool.out));
    context.threads().ranges(x.shape[0] * x.shape[1], 1 + 16384 / (1 + size), [&](std::size_t plane, std::size_t end) {
      thread_local Scratch result_memory;
      thread_local std::vector<int64_t> unread;
      if (!places.data) unread.resize(windows);
      for (; plane < end; ++plane)
        pool.run(x.data + plane * size, static_cast<int64_t>(plane * size),
                 y.data ? y.data + plane * windows : result_memory.floats(windows),
                 places.data ? places.data + plane * windows : unread.data());
    });
  }

 private:
  std::vector<int64_t> kernel_, strides_, pads_;
};

}  // namespace

void add_max_pool(Domain& domain) { domain.add<MaxPool>(); }

}  // namespace onnxtrain::ONNXTRAIN_LEVEL
