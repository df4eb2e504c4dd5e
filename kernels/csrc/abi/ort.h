// The part of ONNX Runtime's C interface that custom ops need.
//
// No package ships the header itself. The interface is append-only and versioned: slots of `OrtApi` and fields of
// `OrtCustomOp` keep their places, so what stands here is right for every ONNX Runtime from 1.18 (API 18) on.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

constexpr uint32_t ORT_API_VERSION = 18;

struct OrtStatus;
struct OrtSessionOptions;
struct OrtCustomOpDomain;
struct OrtKernelInfo;
struct OrtKernelContext;
struct OrtTensorTypeAndShapeInfo;
struct OrtValue;
struct OrtShapeInferContext;
struct OrtApi;  // an array of functions; see `Api`

struct OrtApiBase {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

enum OrtErrorCode : int { ORT_FAIL = 1 };

// Values of ONNXTensorElementDataType that ops use.
enum OrtElementType : int {
  ORT_FLOAT = 1,
  ORT_UINT8 = 2,
  ORT_INT64 = 7,
  ORT_BOOL = 9,
  ORT_FLOAT16 = 10,
  ORT_DOUBLE = 11,
  ORT_BFLOAT16 = 16,
  ORT_UINT4 = 21,
};

enum OrtCharacteristic : int { ORT_REQUIRED = 0, ORT_OPTIONAL = 1, ORT_VARIADIC = 2 };

struct OrtCustomOp {
  uint32_t version;
  void* (*CreateKernel)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*);
  const char* (*GetName)(const OrtCustomOp*);
  const char* (*GetExecutionProviderType)(const OrtCustomOp*);
  OrtElementType (*GetInputType)(const OrtCustomOp*, size_t);
  size_t (*GetInputTypeCount)(const OrtCustomOp*);
  OrtElementType (*GetOutputType)(const OrtCustomOp*, size_t);
  size_t (*GetOutputTypeCount)(const OrtCustomOp*);
  void (*KernelCompute)(void*, OrtKernelContext*);
  void (*KernelDestroy)(void*);
  OrtCharacteristic (*GetInputCharacteristic)(const OrtCustomOp*, size_t);
  OrtCharacteristic (*GetOutputCharacteristic)(const OrtCustomOp*, size_t);
  int (*GetInputMemoryType)(const OrtCustomOp*, size_t);
  int (*GetVariadicInputMinArity)(const OrtCustomOp*);
  int (*GetVariadicInputHomogeneity)(const OrtCustomOp*);
  int (*GetVariadicOutputMinArity)(const OrtCustomOp*);
  int (*GetVariadicOutputHomogeneity)(const OrtCustomOp*);
  OrtStatus* (*CreateKernelV2)(const OrtCustomOp*, const OrtApi*, const OrtKernelInfo*, void**);
  OrtStatus* (*KernelComputeV2)(void*, OrtKernelContext*);
  OrtStatus* (*InferOutputShapeFn)(const OrtCustomOp*, OrtShapeInferContext*);
  int (*GetStartVersion)(const OrtCustomOp*);
  int (*GetEndVersion)(const OrtCustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // extern "C"

namespace onnxtrain {

// The functions of `OrtApi` by name.
class Api {
 public:
  explicit Api(const OrtApi* table) : slots_(reinterpret_cast<void* const*>(table)) {}

  OrtStatus* CreateStatus(OrtErrorCode code, const char* message) const {
    return call<OrtStatus*>(0, static_cast<int>(code), message);
  }
  OrtStatus* CreateCustomOpDomain(const char* name, OrtCustomOpDomain** domain) const {
    return call<OrtStatus*>(26, name, domain);
  }
  OrtStatus* CustomOpDomain_Add(OrtCustomOpDomain* domain, const OrtCustomOp* op) const {
    return call<OrtStatus*>(27, domain, op);
  }
  OrtStatus* AddCustomOpDomain(OrtSessionOptions* options, OrtCustomOpDomain* domain) const {
    return call<OrtStatus*>(28, options, domain);
  }
  OrtStatus* GetTensorMutableData(OrtValue* value, void** data) const {
    return call<OrtStatus*>(51, value, data);
  }
  OrtStatus* GetDimensionsCount(const OrtTensorTypeAndShapeInfo* info, size_t* count) const {
    return call<OrtStatus*>(61, info, count);
  }
  OrtStatus* GetDimensions(const OrtTensorTypeAndShapeInfo* info, int64_t* dims, size_t count) const {
    return call<OrtStatus*>(62, info, dims, count);
  }
  OrtStatus* GetTensorTypeAndShape(const OrtValue* value, OrtTensorTypeAndShapeInfo** info) const {
    return call<OrtStatus*>(65, value, info);
  }
  OrtStatus* KernelInfoGetAttribute_float(const OrtKernelInfo* info, const char* name, float* value) const {
    return call<OrtStatus*>(85, info, name, value);
  }
  OrtStatus* KernelInfoGetAttribute_int64(const OrtKernelInfo* info, const char* name, int64_t* value) const {
    return call<OrtStatus*>(86, info, name, value);
  }
  OrtStatus* KernelContext_GetInputCount(const OrtKernelContext* context, size_t* count) const {
    return call<OrtStatus*>(88, context, count);
  }
  OrtStatus* KernelContext_GetOutputCount(const OrtKernelContext* context, size_t* count) const {
    return call<OrtStatus*>(89, context, count);
  }
  OrtStatus* KernelContext_GetInput(const OrtKernelContext* context, size_t index, const OrtValue** value) const {
    return call<OrtStatus*>(90, context, index, value);
  }
  OrtStatus* KernelContext_GetOutput(
      OrtKernelContext* context, size_t index, const int64_t* dims, size_t rank, OrtValue** value) const {
    return call<OrtStatus*>(91, context, index, dims, rank, value);
  }
  void ReleaseStatus(OrtStatus* status) const { call<void>(93, status); }
  void ReleaseTensorTypeAndShapeInfo(OrtTensorTypeAndShapeInfo* info) const { call<void>(99, info); }
  // With data == nullptr it gives the number of elements.
  OrtStatus* KernelInfoGetAttributeArray_int64(
      const OrtKernelInfo* info, const char* name, int64_t* data, size_t* size) const {
    return call<OrtStatus*>(163, info, name, data, size);
  }
  OrtStatus* HasSessionConfigEntry(const OrtSessionOptions* options, const char* key, int* there) const {
    return call<OrtStatus*>(237, options, key, there);
  }
  // With value == nullptr it gives the size of the value, its final zero included.
  OrtStatus* GetSessionConfigEntry(const OrtSessionOptions* options, const char* key, char* value, size_t* size) const {
    return call<OrtStatus*>(238, options, key, value, size);
  }
  // Calls task(user, i) for i in [0, total) on the session's threads; batches == 0: one task a time.
  OrtStatus* KernelContext_ParallelFor(
      const OrtKernelContext* context, void (*task)(void*, size_t), size_t total, size_t batches, void* user) const {
    return call<OrtStatus*>(274, context, task, total, batches, user);
  }

 private:
  template <class Result, class... Arguments>
  Result call(size_t slot, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(slots_[slot])(arguments...);
  }

  void* const* slots_;
};

}  // namespace onnxtrain
