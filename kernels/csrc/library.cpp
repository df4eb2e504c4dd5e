// The entry point that ONNX Runtime calls for SessionOptions.register_custom_ops_library.
#include <cstdlib>
#include <cstring>

#include "core/op.h"

namespace onnxtrain {

void add_baseline(Domain& domain);
#if defined(ONNXTRAIN_X86)
void add_avx2(Domain& domain);
void add_avx512(Domain& domain);
#endif

namespace {

// Adds the ops of the best level that this processor has, or of the one that ONNXTRAIN_KERNELS_LEVEL names.
void add_ops(Domain& domain) {
#if defined(ONNXTRAIN_X86)
  __builtin_cpu_init();
  const char* asked = std::getenv("ONNXTRAIN_KERNELS_LEVEL");
  const auto allows = [asked](const char* level) { return asked == nullptr || std::strcmp(asked, level) == 0; };
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
                      __builtin_cpu_supports("avx512vl");
  if (avx512 && allows("avx512")) return add_avx512(domain);
  if (avx2 && allows("avx2")) return add_avx2(domain);
#endif
  add_baseline(domain);
}

}  // namespace
}  // namespace onnxtrain

extern "C" __attribute__((visibility("default"))) OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const OrtApiBase* base) {
  const OrtApi* table = base->GetApi(ORT_API_VERSION);
  if (table == nullptr) return nullptr;  // too old a runtime: function bodies run instead
  const onnxtrain::Api api(table);
  try {
    OrtCustomOpDomain* handle = nullptr;
    if (OrtStatus* failed = api.CreateCustomOpDomain("onnxtrain", &handle)) return failed;
    onnxtrain::Domain domain(api, handle);
    onnxtrain::add_ops(domain);
    return api.AddCustomOpDomain(options, handle);  // the session keeps it
  } catch (const std::exception& error) {
    return api.CreateStatus(ORT_FAIL, error.what());
  }
}
