// The part of ONNX Runtime's C interface that a training loop needs.
//
// No package ships the header. The interface is append-only and versioned: slots of `OrtApi` keep their places, so what
// stands in ort.cpp is right for every ONNX Runtime from 1.18 (API 18) on.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <vector>

// Values of ONNXTensorElementDataType by the names that manifests use.
struct ElementType {
  const char* name;         // "float32"
  const char* safetensors;  // "F32"
  int onnx;
  size_t bytes;
};

const ElementType& element_type(const std::string& name);
const ElementType& element_type_of_safetensors(const std::string& code);

// A tensor: an array of this program, or one that ONNX Runtime has computed. Copies share the memory.
class Tensor {
 public:
  Tensor() = default;
  // Copies `bytes`, little-endian; their number must be that of the shape.
  Tensor(const ElementType& type, std::vector<int64_t> shape, const void* bytes, size_t count);

  template <class Number>
  static Tensor of(const char* type, std::vector<int64_t> shape, const std::vector<Number>& numbers) {
    return Tensor(element_type(type), std::move(shape), numbers.data(), numbers.size() * sizeof(Number));
  }

  const ElementType& type() const;
  std::vector<int64_t> shape() const;
  const char* data() const;
  size_t bytes() const;

 private:
  friend class Session;
  struct Memory;
  std::shared_ptr<Memory> memory_;
};

using Tensors = std::map<std::string, Tensor>;

// Number of elements of a shape; throws if it is too large for memory.
size_t elements_of(const std::vector<int64_t>& shape);

class Session {
 public:
  // Throws std::runtime_error with ONNX Runtime's message if the model cannot be loaded.
  explicit Session(const std::filesystem::path& model);

  // Feeds the named inputs from `values` and returns the named outputs.
  Tensors run(const std::vector<std::string>& inputs, const std::vector<std::string>& outputs, const Tensors& values);

 private:
  std::filesystem::path model_;
  std::shared_ptr<void> session_;
};
