// Custom ops as classes.
//
//     struct Scale {
//       static constexpr const char* name = "Scale_float";
//       static constexpr Type inputs[] = {Type::Float, Type::Float};
//       static constexpr Type outputs[] = {Type::Float};
//       explicit Scale(const Attributes& attributes) : power_(attributes.integer("power")) {}
//       void compute(Context& context) const;
//     };
//
// `compute` may throw: what it says becomes the error of the run.
#pragma once

#include <cstdint>
#include <exception>
#include <iterator>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi/ort.h"
#include "core/threads.h"

namespace onnxtrain {

enum class Type : int { Float = ORT_FLOAT, Double = ORT_DOUBLE, Int64 = ORT_INT64, Bool = ORT_BOOL };

// The types of `count` inputs or outputs that are all float.
template <std::size_t count>
struct Floats {
  constexpr Type operator[](std::size_t) const { return Type::Float; }
  constexpr std::size_t size() const { return count; }
};

using Shape = std::vector<int64_t>;

inline std::size_t count(Shape::const_iterator begin, Shape::const_iterator end) {
  std::size_t product = 1;
  for (; begin != end; ++begin) product *= static_cast<std::size_t>(*begin);
  return product;
}
inline std::size_t count(const Shape& shape) { return count(shape.begin(), shape.end()); }

template <class T>
struct Tensor {
  T* data = nullptr;
  Shape shape;

  bool given() const { return data != nullptr || !shape.empty(); }
  std::size_t size() const { return count(shape); }
};

namespace detail {
inline void check(const Api& api, OrtStatus* status, const char* what) {
  if (status == nullptr) return;
  api.ReleaseStatus(status);
  throw std::runtime_error(std::string("ONNX Runtime refused to ") + what);
}
}  // namespace detail

// Attributes of a node; read once, when a session is made.
class Attributes {
 public:
  Attributes(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  int64_t integer(const char* name) const {
    int64_t value = 0;
    detail::check(api_, api_.KernelInfoGetAttribute_int64(info_, name, &value), name);
    return value;
  }
  float number(const char* name) const {
    float value = 0;
    detail::check(api_, api_.KernelInfoGetAttribute_float(info_, name, &value), name);
    return value;
  }
  std::vector<int64_t> integers(const char* name) const {
    std::size_t size = 0;
    detail::check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size), name);
    std::vector<int64_t> values(size);
    if (size) detail::check(api_, api_.KernelInfoGetAttributeArray_int64(info_, name, values.data(), &size), name);
    return values;
  }

 private:
  const Api& api_;
  const OrtKernelInfo* info_;
};

// Inputs, outputs and threads of one run of an op.
class Context {
 public:
  Context(const Api& api, OrtKernelContext* context) : api_(api), context_(context) {}

  Threads threads() const { return Threads(api_, context_); }

  // An input; without data and shape where an optional one is left out.
  template <class T>
  Tensor<const T> input(std::size_t index) const {
    const OrtValue* value = nullptr;
    detail::check(api_, api_.KernelContext_GetInput(context_, index, &value), "give an input");
    if (value == nullptr) return {};
    return {static_cast<const T*>(data(const_cast<OrtValue*>(value))), shape(value)};
  }

  // How many outputs the node has, those that nothing reads among them.
  std::size_t outputs() const {
    std::size_t count = 0;
    detail::check(api_, api_.KernelContext_GetOutputCount(context_, &count), "count the outputs");
    return count;
  }

  // Allocates an output; without data where nothing reads it.
  template <class T>
  Tensor<T> output(std::size_t index, const Shape& shape) {
    OrtValue* value = nullptr;
    detail::check(
        api_, api_.KernelContext_GetOutput(context_, index, shape.data(), shape.size(), &value), "give an output");
    if (value == nullptr) return {};
    return {static_cast<T*>(data(value)), shape};
  }

 private:
  void* data(OrtValue* value) const {
    void* pointer = nullptr;
    detail::check(api_, api_.GetTensorMutableData(value, &pointer), "give the data of a tensor");
    return pointer;
  }
  Shape shape(const OrtValue* value) const {
    OrtTensorTypeAndShapeInfo* info = nullptr;
    detail::check(api_, api_.GetTensorTypeAndShape(value, &info), "give the shape of a tensor");
    std::size_t rank = 0;
    OrtStatus* failed = api_.GetDimensionsCount(info, &rank);
    Shape dims(rank);
    if (failed == nullptr && rank) failed = api_.GetDimensions(info, dims.data(), rank);
    api_.ReleaseTensorTypeAndShapeInfo(info);
    detail::check(api_, failed, "give the shape of a tensor");
    return dims;
  }

  const Api& api_;
  OrtKernelContext* context_;
};

// What an op's inputs must satisfy; says which op was given what.
inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// The ops of one session's domain.
class Domain {
 public:
  Domain(const Api& api, OrtCustomOpDomain* domain) : api_(api), domain_(domain) {}

  template <class Op>
  void add();

  // Adds an op under many names: its own with a number in place of the `#`, from 0 on. They differ in the bodies of
  // their functions only.
  template <class Op, std::size_t Count>
  void add_numbered();

 private:
  const Api& api_;
  OrtCustomOpDomain* domain_;
};

namespace detail {

template <class Op>
struct Kernel {
  Api api;
  Op op;
};

// From which input on they may be left out: `Op::optional_from`, where an op has it.
template <class Op, class = void>
constexpr std::size_t first_optional = std::size(Op::inputs);
template <class Op>
constexpr std::size_t first_optional<Op, std::void_t<decltype(Op::optional_from)>> = Op::optional_from;

inline OrtStatus* as_status(const Api& api, const char* op, const char* message) {
  return api.CreateStatus(ORT_FAIL, (std::string(op) + ": " + message).c_str());
}

// An op without attributes needs no constructor.
template <class Op>
Op made(const Attributes& attributes) {
  if constexpr (std::is_constructible_v<Op, const Attributes&>) {
    return Op(attributes);
  } else {
    return Op();
  }
}

template <class Op>
OrtStatus* create(const OrtCustomOp*, const OrtApi* table, const OrtKernelInfo* info, void** kernel) {
  const Api api(table);
  try {
    *kernel = new Kernel<Op>{api, made<Op>(Attributes(api, info))};
    return nullptr;
  } catch (const std::exception& error) {
    return as_status(api, Op::name, error.what());
  }
}

template <class Op>
OrtStatus* compute(void* kernel, OrtKernelContext* context) {
  const auto& [api, op] = *static_cast<const Kernel<Op>*>(kernel);
  try {
    Context run(api, context);
    op.compute(run);
    return nullptr;
  } catch (const std::exception& error) {
    return as_status(api, Op::name, error.what());
  }
}

// One table of functions per op class, for the life of the process.
template <class Op>
const OrtCustomOp& table() {
  static const OrtCustomOp op = [] {
    OrtCustomOp t{};
    t.version = ORT_API_VERSION;
    t.GetName = [](const OrtCustomOp*) { return Op::name; };
    t.GetExecutionProviderType = [](const OrtCustomOp*) { return "CPUExecutionProvider"; };
    t.GetInputType = [](const OrtCustomOp*, size_t i) { return static_cast<OrtElementType>(Op::inputs[i]); };
    t.GetInputTypeCount = [](const OrtCustomOp*) { return std::size(Op::inputs); };
    t.GetOutputType = [](const OrtCustomOp*, size_t i) { return static_cast<OrtElementType>(Op::outputs[i]); };
    t.GetOutputTypeCount = [](const OrtCustomOp*) { return std::size(Op::outputs); };
    t.KernelDestroy = [](void* kernel) { delete static_cast<Kernel<Op>*>(kernel); };
    t.GetInputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return i < first_optional<Op> ? ORT_REQUIRED : ORT_OPTIONAL;
    };
    t.GetOutputCharacteristic = [](const OrtCustomOp*, size_t) { return ORT_OPTIONAL; };
    t.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
    t.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 0; };
    t.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 0; };
    t.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 0; };
    t.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 0; };
    t.CreateKernelV2 = create<Op>;
    t.KernelComputeV2 = compute<Op>;
    t.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    t.GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
    t.GetMayInplace = [](int**, int**) -> size_t { return 0; };
    t.ReleaseMayInplace = [](int*, int*) {};
    t.GetAliasMap = [](int**, int**) -> size_t { return 0; };
    t.ReleaseAliasMap = [](int*, int*) {};
    return t;
  }();
  return op;
}

}  // namespace detail

template <class Op>
void Domain::add() {
  detail::check(api_, api_.CustomOpDomain_Add(domain_, &detail::table<Op>()), "take a custom op");
}

template <class Op, std::size_t Count>
void Domain::add_numbered() {
  struct Named : OrtCustomOp {
    std::string name;
  };
  static const std::vector<Named> ops = [] {
    std::vector<Named> all(Count);
    for (std::size_t number = 0; number < Count; ++number) {
      static_cast<OrtCustomOp&>(all[number]) = detail::table<Op>();
      all[number].name = Op::name;
      all[number].name.replace(all[number].name.find('#'), 1, std::to_string(number));
      all[number].GetName = [](const OrtCustomOp* op) { return static_cast<const Named*>(op)->name.c_str(); };
    }
    return all;
  }();
  for (const Named& op : ops) detail::check(api_, api_.CustomOpDomain_Add(domain_, &op), "take a custom op");
}

}  // namespace onnxtrain
