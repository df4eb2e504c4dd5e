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

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <exception>
#include <iterator>
#include <mutex>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "abi/ort.h"
#include "core/threads.h"

namespace onnxtrain {

enum class Type : int {
  Float = ORT_FLOAT,
  Double = ORT_DOUBLE,
  Int64 = ORT_INT64,
  Bool = ORT_BOOL,
  Uint8 = ORT_UINT8,
  Uint4 = ORT_UINT4,  // two in a byte, the first one in the low half
};

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

// What inputs must satisfy; `compute` below adds which op was given inputs of which shapes.
inline void require(bool holds, const char* message) {
  if (!holds) throw std::invalid_argument(message);
}

// Where an axis lies: `n` elements, `inner` apart, `outer` times `inner` of them. Negative axes count from the last one.
struct Along {
  Along(const Shape& shape, int64_t given) {
    const int64_t rank = static_cast<int64_t>(shape.size()), own = given < 0 ? given + rank : given;
    require(0 <= own && own < rank, "the axis must be one of the tensor");
    const auto place = shape.begin() + own;
    axis = static_cast<std::size_t>(own), n = static_cast<std::size_t>(*place);
    outer = count(shape.begin(), place), inner = count(place + 1, shape.end());
  }

  std::size_t axis, outer, n, inner;
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
  std::vector<int64_t> integers_if_given(const char* name) const {
    std::size_t size = 0;
    if (OrtStatus* absent = api_.KernelInfoGetAttributeArray_int64(info_, name, nullptr, &size)) {
      api_.ReleaseStatus(absent);
      return {};
    }
    return integers(name);
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
  // Inputs from `optional_from` on may be left out.
  Context(const Api& api, OrtKernelContext* context, std::size_t optional_from)
      : api_(api), context_(context), optional_from_(optional_from) {}

  Threads threads() const { return Threads(api_, context_); }

  // An input; without data and shape where an optional one is left out.
  template <class T>
  Tensor<const T> input(std::size_t index) const {
    const OrtValue* value = nullptr;
    detail::check(api_, api_.KernelContext_GetInput(context_, index, &value), "give an input");
    require(value != nullptr || index >= optional_from_, "an input that must be given is left out");
    if (value == nullptr) return {};
    return {static_cast<const T*>(data(const_cast<OrtValue*>(value))), shape(value)};
  }

  // The one element of an input.
  template <class T>
  T number(std::size_t index) const {
    const Tensor<const T> tensor = input<T>(index);
    require(tensor.size() == 1, "an input that must be one number has another size");
    return *tensor.data;
  }

  // The shapes of all inputs, as messages show them.
  std::string shapes() const {
    std::string text;
    for (std::size_t index = 0; index < inputs(); ++index) {
      const OrtValue* value = nullptr;
      detail::check(api_, api_.KernelContext_GetInput(context_, index, &value), "give an input");
      text += index ? ", " : "";
      if (value == nullptr) {
        text += "none";
        continue;
      }
      text += '[';
      for (const int64_t dim : shape(value)) text += std::to_string(dim) + ", ";
      if (text.back() == ' ') text.resize(text.size() - 2);
      text += ']';
    }
    return text;
  }

  // How many inputs the node has, those that are left out among them.
  std::size_t inputs() const {
    std::size_t count = 0;
    detail::check(api_, api_.KernelContext_GetInputCount(context_, &count), "count the inputs");
    return count;
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
  std::size_t optional_from_;
};

// Which numbers ops with numbered names get. The session config entry `onnxtrain.numbered` gives for each name the first
// one and the one behind the last, as in "ConvolutionGradient=0:65,ConvolutionWeightGradient=0:2"; a name that is not there
// gets none. Without the entry, names have a default of their own. Options that have been given ops get more numbers, and
// no other ops, by entries `onnxtrain.numbered.1`, `.2`, ..., of which the last counts: ONNX Runtime warns where an entry
// is set anew.
class Numbers {
 public:
  static Numbers of(const Api& api, const OrtSessionOptions* options) {
    const std::string first = "onnxtrain.numbered";
    const auto is_there = [&](const std::string& key) {
      int there = 0;
      detail::check(api, api.HasSessionConfigEntry(options, key.c_str(), &there), "look for a config entry");
      return there != 0;
    };
    Numbers numbers;
    std::string key = first;
    for (int more = 1; is_there(first + "." + std::to_string(more)); ++more) {
      key = first + "." + std::to_string(more);
      numbers.only_more_ = true;
    }
    if (!is_there(key)) return numbers;
    std::size_t size = 0;
    detail::check(api, api.GetSessionConfigEntry(options, key.c_str(), nullptr, &size), "give a config entry");
    std::string value(size, '\0');
    detail::check(api, api.GetSessionConfigEntry(options, key.c_str(), value.data(), &size), "give a config entry");
    value.resize(std::min(value.find('\0'), value.size()));
    numbers.given_ = true;
    numbers.entry_ = "," + value;
    return numbers;
  }

  // Whether options have been given all other ops before.
  bool only_more() const { return only_more_; }

  struct Range {
    std::size_t begin, end;
  };

  // The numbers of names whose part before them is `stem`.
  Range range(const std::string& stem, std::size_t by_default) const {
    if (!given_) return {0, by_default};
    const std::string key = "," + stem + "=";
    const std::size_t at = entry_.find(key);
    if (at == std::string::npos) return {0, 0};
    const std::size_t colon = entry_.find(':', at);
    if (colon == std::string::npos) throw std::invalid_argument("onnxtrain.numbered: expected name=begin:end");
    return {std::stoul(entry_.substr(at + key.size())), std::stoul(entry_.substr(colon + 1))};
  }

 private:
  bool given_ = false, only_more_ = false;
  std::string entry_;
};

// The ops of one session's domain.
class Domain {
 public:
  Domain(const Api& api, OrtCustomOpDomain* domain, const Numbers& numbers) : api_(api), domain_(domain), numbers_(numbers) {}

  template <class Op>
  void add();

  // Adds an op under many names: its own with a number in place of the `#`. They differ in the bodies of their functions
  // only. Without the session config entry numbers are those below `by_default`.
  template <class Op>
  void add_numbered(std::size_t by_default);

 private:
  const Api& api_;
  OrtCustomOpDomain* domain_;
  const Numbers& numbers_;
};

namespace detail {

template <class Op>
struct Kernel {
  Api api;
  Op op;
};

// True if the last entry of `Op::inputs` stands for any number of inputs, one or more, and that of `Op::outputs` for any
// number of outputs: `Op::variadic`, where an op has it.
template <class Op, class = void>
constexpr bool variadic = false;
template <class Op>
constexpr bool variadic<Op, std::void_t<decltype(Op::variadic)>> = Op::variadic;

// From which input on they may be left out: `Op::optional_from`, where an op has it.
template <class Op, class = void>
constexpr std::size_t first_optional = variadic<Op> ? SIZE_MAX : std::size(Op::inputs);
template <class Op>
constexpr std::size_t first_optional<Op, std::void_t<decltype(Op::optional_from)>> = Op::optional_from;

// The inputs whose memory output 0 may take, the preferred one first: `Op::in_place`, where an op has it. ONNX Runtime does
// so where an input has the output's shape, as the model says, and nothing reads it later. Each element of these inputs
// must have been read for the last time when its place is written.
template <class Op, class = void>
struct InPlace {
  static std::size_t pairs(int**, int**) { return 0; }
};
template <class Op>
struct InPlace<Op, std::void_t<decltype(Op::in_place)>> {
  static std::size_t pairs(int** inputs, int** outputs) {
    using Indices = std::array<int, std::size(Op::in_place)>;
    static Indices from = [] {
      Indices copy{};
      std::copy(std::begin(Op::in_place), std::end(Op::in_place), copy.begin());
      return copy;
    }();
    static Indices to{};  // all zero
    *inputs = from.data(), *outputs = to.data();
    return from.size();
  }
};

inline OrtStatus* as_status(const Api& api, std::string op, const std::string& message) {
  op.erase(std::remove(op.begin(), op.end(), '#'), op.end());
  return api.CreateStatus(ORT_FAIL, (op + ": " + message).c_str());
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
    Context run(api, context, first_optional<Op>);
    try {
      op.compute(run);
    } catch (const std::invalid_argument& error) {
      throw std::invalid_argument(std::string(error.what()) + " (inputs: " + run.shapes() + ")");
    }
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
      if (variadic<Op> && i + 1 == std::size(Op::inputs)) return ORT_VARIADIC;
      return i < first_optional<Op> ? ORT_REQUIRED : ORT_OPTIONAL;
    };
    t.GetOutputCharacteristic = [](const OrtCustomOp*, size_t i) {
      return variadic<Op> && i + 1 == std::size(Op::outputs) ? ORT_VARIADIC : ORT_OPTIONAL;
    };
    t.GetInputMemoryType = [](const OrtCustomOp*, size_t) { return 0; };
    t.GetVariadicInputMinArity = [](const OrtCustomOp*) { return 1; };
    t.GetVariadicInputHomogeneity = [](const OrtCustomOp*) { return 1; };
    t.GetVariadicOutputMinArity = [](const OrtCustomOp*) { return 1; };
    t.GetVariadicOutputHomogeneity = [](const OrtCustomOp*) { return 1; };
    t.CreateKernelV2 = create<Op>;
    t.KernelComputeV2 = compute<Op>;
    t.GetStartVersion = [](const OrtCustomOp*) { return 1; };
    t.GetEndVersion = [](const OrtCustomOp*) { return INT32_MAX; };
    t.GetMayInplace = InPlace<Op>::pairs;
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
  if (numbers_.only_more()) return;
  detail::check(api_, api_.CustomOpDomain_Add(domain_, &detail::table<Op>()), "take a custom op");
}

template <class Op>
void Domain::add_numbered(std::size_t by_default) {
  struct Named : OrtCustomOp {
    std::string name;
  };
  static std::mutex mutex;
  static std::deque<Named> ops;  // for the life of the process, at the same places
  const std::lock_guard<std::mutex> lock(mutex);
  const std::string name = Op::name;
  const std::size_t place = name.find('#');
  const auto [begin, end] = numbers_.range(name.substr(0, place), by_default);
  while (ops.size() < end) {
    Named& op = ops.emplace_back();
    static_cast<OrtCustomOp&>(op) = detail::table<Op>();
    op.name = std::string(name).replace(place, 1, std::to_string(ops.size() - 1));
    op.GetName = [](const OrtCustomOp* own) { return static_cast<const Named*>(own)->name.c_str(); };
  }
  for (std::size_t number = begin; number < end; ++number)
    detail::check(api_, api_.CustomOpDomain_Add(domain_, &ops[number]), "take a custom op");
}

}  // namespace onnxtrain
