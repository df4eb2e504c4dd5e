#include "ort.h"

#include <cstdlib>
#include <cstring>
#include <stdexcept>

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace {

struct ApiBase {
  const void* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

constexpr uint32_t kApiVersion = 18;
constexpr int kWarning = 2;  // OrtLoggingLevel

constexpr ElementType kTypes[] = {
    {"float32", "F32", 1, 4}, {"uint8", "U8", 2, 1},    {"int8", "I8", 3, 1},   {"int16", "I16", 5, 2}, {"int32", "I32", 6, 4},
    {"int64", "I64", 7, 8},   {"bool", "BOOL", 9, 1},   {"float16", "F16", 10, 2}, {"float64", "F64", 11, 8},
};

ApiBase* open_library() {
  const char* chosen = std::getenv("ONNXRUNTIME_LIBRARY");
  const std::string path = chosen != nullptr ? chosen : ONNXRUNTIME_LIBRARY;
#if defined(_WIN32)
  HMODULE library = LoadLibraryA(path.c_str());
  void* entry = library == nullptr ? nullptr : reinterpret_cast<void*>(GetProcAddress(library, "OrtGetApiBase"));
#else
  void* library = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  void* entry = library == nullptr ? nullptr : dlsym(library, "OrtGetApiBase");
#endif
  if (entry == nullptr) throw std::runtime_error("'" + path + "' is no shared library of ONNX Runtime");
  return reinterpret_cast<ApiBase* (*)()>(entry)();
}

// Slots of OrtApi, in the order of onnxruntime_c_api.h.
enum Slot {
  kGetErrorMessage = 2,
  kCreateEnv = 3,
  kCreateSession = 7,
  kRun = 9,
  kCreateSessionOptions = 10,
  kRegisterCustomOpsLibrary = 29,
  kCreateTensorWithDataAsOrtValue = 49,
  kGetTensorMutableData = 51,
  kGetTensorElementType = 60,
  kGetDimensionsCount = 61,
  kGetDimensions = 62,
  kGetTensorTypeAndShape = 65,
  kCreateCpuMemoryInfo = 69,
  kReleaseStatus = 93,
  kReleaseSession = 95,
  kReleaseValue = 96,
  kReleaseTensorTypeAndShapeInfo = 99,
};

class Api {
 public:
  static const Api& get() {
    static const Api api;
    return api;
  }

  // Calls a function that returns an OrtStatus*, and throws what it reports.
  template <class... Arguments>
  void call(Slot slot, Arguments... arguments) const {
    void* status = at<void*>(slot, arguments...);
    if (status == nullptr) return;
    const std::string message = at<const char*>(kGetErrorMessage, status);
    at<void>(kReleaseStatus, status);
    throw std::runtime_error("ONNX Runtime: " + message);
  }

  void release(Slot slot, void* object) const { at<void>(slot, object); }

  void* environment = nullptr;
  void* options = nullptr;
  void* memory_info = nullptr;

 private:
  Api() {
    const ApiBase* base = open_library();
    slots_ = static_cast<void* const*>(base->GetApi(kApiVersion));
    if (slots_ == nullptr) {
      throw std::runtime_error(std::string("ONNX Runtime ") + base->GetVersionString() + " is too old; 1.20 suffices");
    }
    call(kCreateEnv, kWarning, "onnxtrain_host", &environment);
    call(kCreateSessionOptions, &options);
    // The library of the package onnxtrain-kernels, whose ops ONNX Runtime takes in place of the functions in models.
    if (const char* kernels = std::getenv("ONNXTRAIN_KERNELS_LIBRARY")) {
      void* library = nullptr;  // ONNX Runtime keeps it open
      call(kRegisterCustomOpsLibrary, options, kernels, &library);
    }
    call(kCreateCpuMemoryInfo, 0 /* OrtDeviceAllocator */, 0 /* OrtMemTypeDefault */, &memory_info);
  }

  template <class Result, class... Arguments>
  Result at(Slot slot, Arguments... arguments) const {
    return reinterpret_cast<Result (*)(Arguments...)>(slots_[slot])(arguments...);
  }

  void* const* slots_ = nullptr;
};

}  // namespace

const ElementType& element_type(const std::string& name) {
  for (const ElementType& type : kTypes) {
    if (name == type.name) return type;
  }
  throw std::runtime_error("the dtype '" + name + "' is not supported");
}

const ElementType& element_type_of_safetensors(const std::string& code) {
  for (const ElementType& type : kTypes) {
    if (code == type.safetensors) return type;
  }
  throw std::runtime_error("the dtype '" + code + "' is not supported");
}

size_t elements_of(const std::vector<int64_t>& shape) {
  size_t count = 1;
  for (int64_t size : shape) {
    if (size < 0 || (size != 0 && count > (size_t{1} << 40) / static_cast<size_t>(size))) {
      throw std::runtime_error("a tensor is too large");
    }
    count *= static_cast<size_t>(size);
  }
  return count;
}

struct Tensor::Memory {
  ~Memory() {
    if (value != nullptr) Api::get().release(kReleaseValue, value);
  }

  std::vector<char> bytes;  // empty if ONNX Runtime owns the numbers
  void* value = nullptr;    // OrtValue
};

Tensor::Tensor(const ElementType& type, std::vector<int64_t> shape, const void* bytes, size_t count)
    : memory_(std::make_shared<Memory>()) {
  if (count != elements_of(shape) * type.bytes) throw std::runtime_error("a tensor has another size than its shape");
  // One byte more: ONNX Runtime takes no null pointer for a tensor without elements.
  memory_->bytes.resize(count + 1);
  if (count != 0) std::memcpy(memory_->bytes.data(), bytes, count);
  Api::get().call(kCreateTensorWithDataAsOrtValue, Api::get().memory_info, static_cast<void*>(memory_->bytes.data()), count,
                  static_cast<const int64_t*>(shape.data()), shape.size(), type.onnx, &memory_->value);
}

const ElementType& Tensor::type() const {
  void* info = nullptr;
  int onnx = 0;
  Api::get().call(kGetTensorTypeAndShape, static_cast<const void*>(memory_->value), &info);
  Api::get().call(kGetTensorElementType, static_cast<const void*>(info), &onnx);
  Api::get().release(kReleaseTensorTypeAndShapeInfo, info);
  for (const ElementType& type : kTypes) {
    if (type.onnx == onnx) return type;
  }
  throw std::runtime_error("a tensor has a dtype that is not supported");
}

std::vector<int64_t> Tensor::shape() const {
  void* info = nullptr;
  size_t rank = 0;
  Api::get().call(kGetTensorTypeAndShape, static_cast<const void*>(memory_->value), &info);
  Api::get().call(kGetDimensionsCount, static_cast<const void*>(info), &rank);
  std::vector<int64_t> sizes(rank);
  Api::get().call(kGetDimensions, static_cast<const void*>(info), sizes.data(), rank);
  Api::get().release(kReleaseTensorTypeAndShapeInfo, info);
  return sizes;
}

const char* Tensor::data() const {
  void* data = nullptr;
  Api::get().call(kGetTensorMutableData, memory_->value, &data);
  return static_cast<const char*>(data);
}

size_t Tensor::bytes() const { return elements_of(shape()) * type().bytes; }

Session::Session(const std::filesystem::path& model) : model_(model) {
  void* session = nullptr;
  // The path is of wchar_t on Windows and of char elsewhere, as ORTCHAR_T is.
  Api::get().call(kCreateSession, static_cast<const void*>(Api::get().environment), model.c_str(),
                  static_cast<const void*>(Api::get().options), &session);
  session_ = std::shared_ptr<void>(session, [](void* owned) { Api::get().release(kReleaseSession, owned); });
}

Tensors Session::run(
    const std::vector<std::string>& inputs, const std::vector<std::string>& outputs, const Tensors& values) {
  std::vector<const char*> input_names, output_names;
  std::vector<const void*> given;
  std::vector<void*> results(outputs.size(), nullptr);
  for (const std::string& name : inputs) {
    const auto value = values.find(name);
    if (value == values.end()) throw std::runtime_error("nothing to feed to the input '" + name + "'");
    input_names.push_back(name.c_str());
    given.push_back(value->second.memory_->value);
  }
  for (const std::string& name : outputs) output_names.push_back(name.c_str());
  try {
    Api::get().call(kRun, session_.get(), static_cast<const void*>(nullptr) /* OrtRunOptions */,
                    static_cast<const char* const*>(input_names.data()), static_cast<const void* const*>(given.data()),
                    given.size(), static_cast<const char* const*>(output_names.data()), output_names.size(), results.data());
  } catch (const std::exception& error) {
    throw std::runtime_error(model_.string() + ": " + error.what());
  }
  Tensors named;
  for (size_t index = 0; index < outputs.size(); ++index) {
    named[outputs[index]].memory_ = std::make_shared<Tensor::Memory>();
    named[outputs[index]].memory_->value = results[index];
  }
  return named;
}
