// The entry points: the one that ONNX Runtime calls for SessionOptions.register_custom_ops_library, one that says which
// level of ops it takes, and one that draws random numbers.
#include <cstdlib>
#include <map>
#include <mutex>

#include "core/op.h"
#include "processor.h"

#if defined(_WIN32)
#define ONNXTRAIN_EXPORT extern "C" __declspec(dllexport)
#else
#define ONNXTRAIN_EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace onnxtrain {

// What each level offers (level.cpp).
#define ONNXTRAIN_OF_LEVEL(level)  \
  void add_##level(Domain& domain); \
  void draw_bernoulli_##level(unsigned char* generator, double p, uint8_t* to, size_t n);
ONNXTRAIN_OF_LEVEL(baseline)
ONNXTRAIN_OF_LEVEL(avx2)
ONNXTRAIN_OF_LEVEL(avx512)

namespace {

struct Functions {
  void (*add)(Domain&) = nullptr;
  void (*draw_bernoulli)(unsigned char*, double, uint8_t*, size_t) = nullptr;
};

const char* asked_level() { return std::getenv("ONNXTRAIN_KERNELS_LEVEL"); }

// Those of the best level that this processor has, or of the one that ONNXTRAIN_KERNELS_LEVEL names; null pointers if it
// has none.
Functions functions() {
  switch (level_for(asked_level())) {
#if defined(ONNXTRAIN_HAS_AVX512)
    case Level::Avx512:
      return {add_avx512, draw_bernoulli_avx512};
#endif
#if defined(ONNXTRAIN_HAS_AVX2)
    case Level::Avx2:
      return {add_avx2, draw_bernoulli_avx2};
#endif
#if defined(ONNXTRAIN_HAS_BASELINE)
    case Level::Baseline:
      return {add_baseline, draw_bernoulli_baseline};
#endif
    default:
      return {};
  }
}

// The domain that options were given last: where sessions need more numbers, these are added to it, as ONNX Runtime takes
// no second domain of a name.
class Domains {
 public:
  OrtCustomOpDomain*& of(const OrtSessionOptions* options) { return domains_[options]; }
  std::mutex mutex;

 private:
  std::map<const OrtSessionOptions*, OrtCustomOpDomain*> domains_;
};

Domains& domains() {
  static Domains all;
  return all;
}

}  // namespace
}  // namespace onnxtrain

ONNXTRAIN_EXPORT OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* table = base->GetApi(ORT_API_VERSION);
  if (table == nullptr) return nullptr;  // too old a runtime: function bodies run instead
  const onnxtrain::Api api(table);
  try {
    const onnxtrain::Numbers numbers = onnxtrain::Numbers::of(api, options);
    const std::lock_guard<std::mutex> lock(onnxtrain::domains().mutex);
    OrtCustomOpDomain*& handle = onnxtrain::domains().of(options);
    if (!numbers.only_more())
      if (OrtStatus* failed = api.CreateCustomOpDomain("onnxtrain", &handle)) return failed;
    onnxtrain::Domain domain(api, handle, numbers);
    // Otherwise function bodies run.
    if (const auto add = onnxtrain::functions().add) add(domain);
    return numbers.only_more() ? nullptr : api.AddCustomOpDomain(options, handle);  // the session keeps it
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  }
}

// The level whose ops sessions get, "" for none. asked: null, or instead of ONNXTRAIN_KERNELS_LEVEL; without: null, or
// instructions that count as missing, separated by commas.
ONNXTRAIN_EXPORT const char* onnxtrain_kernels_level(const char* asked, const char* without) {
  using namespace onnxtrain;
  return name_of(level_for(asked ? asked : asked_level(), without ? without : ""));
}

// Draws as PyTorch's CPU generator does (random/bernoulli.h); returns whether this processor can.
ONNXTRAIN_EXPORT bool onnxtrain_draw_bernoulli(unsigned char* generator, double p, uint8_t* to, size_t n) {
  const auto draw = onnxtrain::functions().draw_bernoulli;
  if (draw) draw(generator, p, to, n);
  return draw != nullptr;
}
