// Loads a library of kernels where no ONNX Runtime is to be had, and compares two of its ops with sums in float64:
//
//   zig-c++ -target x86_64-linux-musl -std=c++17 -I../csrc probe.cpp -o probe && ./probe onnxtrain_kernels.so
//
// It is the ops' host: it has the functions of OrtApi that these two ops call. It does so for each level that the processor
// has, and expects an error, made by an exception inside the library, where shapes do not fit.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "abi/ort.h"

#if defined(_WIN32)
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace {

// An OrtValue is a Tensor here, and so is what tells of its shape.
struct Tensor {
  std::vector<int64_t> dims;
  std::vector<float> data;
};

// An OrtKernelContext.
struct Run {
  std::vector<Tensor*> inputs;
  Tensor output;
};

std::map<std::string, const OrtCustomOp*> ops;  // that the library has added
std::string message;                            // of the last status
int domain;                                     // OrtCustomOpDomain, OrtStatus: an address that is not null

void* create_status(int, const char* text) { return message = text, &domain; }
void* create_domain(const char*, void** made) { return *made = &domain, nullptr; }
void* add_op(void*, const OrtCustomOp* op) { return ops[op->GetName(op)] = op, nullptr; }
void* add_domain(void*, void*) { return nullptr; }
void* tensor_data(Tensor* value, void** data) { return *data = value->data.data(), nullptr; }
void* rank_of(const Tensor* value, size_t* rank) { return *rank = value->dims.size(), nullptr; }
void* dims_of(const Tensor* value, int64_t* dims, size_t) {
  return std::memcpy(dims, value->dims.data(), value->dims.size() * sizeof *dims), nullptr;
}
void* info_of(const Tensor* value, const Tensor** info) { return *info = value, nullptr; }
void* integer(const void*, const char*, int64_t* value) { return *value = 0, nullptr; }
void* inputs_of(const Run* run, size_t* count) { return *count = run->inputs.size(), nullptr; }
void* input_of(const Run* run, size_t index, const Tensor** value) { return *value = run->inputs[index], nullptr; }
void* output_of(Run* run, size_t, const int64_t* dims, size_t rank, Tensor** value) {
  size_t count = 1;
  for (size_t axis = 0; axis < rank; ++axis) count *= static_cast<size_t>(dims[axis]);
  run->output = {std::vector<int64_t>(dims, dims + rank), std::vector<float>(count)};
  return *value = &run->output, nullptr;
}
void release(void*) {}
void* no_entry(const void*, const char*, int* there) { return *there = 0, nullptr; }
void* parallel(const void*, void (*task)(void*, size_t), size_t total, size_t, void* user) {
  std::thread other([&] {
    for (size_t part = 1; part < total; part += 2) task(user, part);
  });
  for (size_t part = 0; part < total; part += 2) task(user, part);
  return other.join(), nullptr;
}

template <class Function>
void* address(Function* function) {
  return reinterpret_cast<void*>(function);
}

const OrtApi* api(uint32_t) {
  static std::vector<void*> slots(400);
  const std::map<size_t, void*> known = {
      {0, address(create_status)}, {26, address(create_domain)}, {27, address(add_op)},     {28, address(add_domain)},
      {51, address(tensor_data)},  {61, address(rank_of)},       {62, address(dims_of)},    {65, address(info_of)},
      {86, address(integer)},      {88, address(inputs_of)},     {90, address(input_of)},   {91, address(output_of)},
      {93, address(release)},      {99, address(release)},       {237, address(no_entry)},  {274, address(parallel)},
  };
  for (const auto& [slot, function] : known) slots[slot] = function;
  return reinterpret_cast<const OrtApi*>(slots.data());
}
const char* version() { return "0"; }

[[noreturn]] void fail(const std::string& text) {
  std::fprintf(stderr, "%s\n", text.c_str());
  std::exit(1);
}

// Runs an op of two inputs; returns whether it succeeded.
bool run(const std::string& name, Tensor& a, Tensor& b, Tensor& result) {
  if (ops.count(name) == 0) fail(name + " was not added");
  const OrtCustomOp* op = ops[name];
  void* kernel = nullptr;
  if (op->CreateKernelV2(op, api(0), nullptr, &kernel) != nullptr) fail(name + ": " + message);
  Run context{{&a, &b}, {}};
  const bool failed = op->KernelComputeV2(kernel, reinterpret_cast<OrtKernelContext*>(&context)) != nullptr;
  op->KernelDestroy(kernel);
  result = context.output;
  return !failed;
}

Tensor random(std::vector<int64_t> dims) {
  static uint32_t state = 1;
  size_t count = 1;
  for (const int64_t dim : dims) count *= static_cast<size_t>(dim);
  Tensor tensor{std::move(dims), std::vector<float>(count)};
  for (float& x : tensor.data) x = static_cast<float>((state = state * 1664525u + 1013904223u) >> 8) / (1 << 23) - 1.f;
  return tensor;
}

void compare(const std::string& name, double value, double expected) {
  if (!(std::abs(value - expected) < 1e-5 * (1 + std::abs(expected)))) {
    fail(name + " gave " + std::to_string(value) + " for " + std::to_string(expected));
  }
}

void check_ops() {
  Tensor x = random({3, 40001}), ct = random({3, 40001}), y;
  if (!run("GeluGradient_float", x, ct, y)) fail(message);
  for (size_t i = 0; i < x.data.size(); ++i) {
    const double t = x.data[i], s = std::sqrt(0.5) * t;
    const double slope = 0.5 * (1 + std::erf(s)) + t * std::exp(-s * s) * std::sqrt(0.5 / std::acos(-1.0));
    compare("GeluGradient_float", y.data[i], ct.data[i] * slope);
  }
  const int64_t rows = 131, depth = 67, columns = 93;
  Tensor a = random({rows, depth}), b = random({depth, columns}), c;
  if (!run("MatrixProduct_float", a, b, c)) fail(message);
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < depth; ++k) sum += static_cast<double>(a.data[i * depth + k]) * b.data[k * columns + j];
      compare("MatrixProduct_float", c.data[i * columns + j], sum);
    }
  }
  if (run("MatrixProduct_float", b, b, c) || message.find("the rows of B must be as many") == std::string::npos) {
    fail("factors that do not fit gave no error");
  }
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 2) fail(std::string("usage: ") + arguments[0] + " LIBRARY");
#if defined(_WIN32)
  HMODULE library = LoadLibraryA(arguments[1]);
  const auto symbol = [&](const char* name) { return reinterpret_cast<void*>(GetProcAddress(library, name)); };
  const auto ask_for = [](const char* level) { return _putenv_s("ONNXTRAIN_KERNELS_LEVEL", level); };
#else
  void* library = dlopen(arguments[1], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) fail(dlerror());
  const auto symbol = [&](const char* name) { return dlsym(library, name); };
  const auto ask_for = [](const char* level) { return setenv("ONNXTRAIN_KERNELS_LEVEL", level, 1); };
#endif
  if (library == nullptr) fail(std::string(arguments[1]) + " cannot be loaded");
  const auto level_for = reinterpret_cast<const char* (*)(const char*, const char*)>(symbol("onnxtrain_kernels_level"));
  const auto add = reinterpret_cast<OrtStatus* (*)(OrtSessionOptions*, const OrtApiBase*)>(symbol("RegisterCustomOps"));
  if (level_for == nullptr || add == nullptr) fail("the library lacks an entry point");
  const OrtApiBase base{api, version};
  for (const std::string level : {"baseline", "avx2", "avx512"}) {
    if (level != level_for(level.c_str(), nullptr)) continue;
    ask_for(level.c_str());
    ops.clear();
    int options = 0;
    if (add(reinterpret_cast<OrtSessionOptions*>(&options), &base) != nullptr) fail(message);
    check_ops();
    std::printf("%s: %zu ops, two of them as in float64\n", level.c_str(), ops.size());
  }
  return 0;
}
