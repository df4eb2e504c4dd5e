#include "feeds.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <map>
#include <stdexcept>
#include <vector>

#include "safetensors.h"

namespace {

void require(bool condition, const Json& spec, const std::string& problem) {
  if (!condition) throw std::runtime_error("input '" + spec.at("name").text() + "': " + problem);
}

template <class Number>
Number number_at(const char* data, size_t index) {
  Number number;
  std::memcpy(&number, data + index * sizeof number, sizeof number);
  return number;
}

bool is_nan(const std::string& dtype, const char* data, size_t index) {
  if (dtype == "float32") return std::isnan(number_at<float>(data, index));
  if (dtype == "float64") return std::isnan(number_at<double>(data, index));
  // An exponent of ones is infinity, or NaN if another bit follows.
  return dtype == "float16" && (number_at<uint16_t>(data, index) & 0x7FFF) > 0x7C00;
}

int64_t label_at(const std::string& dtype, const char* data, size_t index) {
  if (dtype == "int64") return number_at<int64_t>(data, index);
  if (dtype == "int32") return number_at<int32_t>(data, index);
  if (dtype == "int16") return number_at<int16_t>(data, index);
  if (dtype == "int8") return number_at<int8_t>(data, index);
  if (dtype == "uint8") return number_at<uint8_t>(data, index);
  throw std::runtime_error("labels of " + dtype + " are not supported");
}

// Throws if a number is NaN, or a label neither a class nor the ignored label. Infinity is allowed: masks hold it.
void check_values(const Json& spec, const char* data, size_t count) {
  const std::string& dtype = spec.at("dtype").text();
  for (size_t index = 0; index < count && dtype.rfind("float", 0) == 0; ++index) {
    require(!is_nan(dtype, data, index), spec,
            "NaN at position " + std::to_string(index) + "; leave out or fill such samples");
  }
  if (!spec.has("class_labels") || spec.at("class_labels").is_null()) return;
  const Json& labels = spec.at("class_labels");
  const auto number = [&labels](const char* key, int64_t otherwise) {
    return labels.has(key) && !labels.at(key).is_null() ? labels.at(key).integer() : otherwise;
  };
  // Without an ignored label, 0 takes its place, which is a class anyway.
  const int64_t most = std::numeric_limits<int64_t>::max(), classes = number("count", most), ignored = number("ignore_index", 0);
  for (size_t index = 0; index < count; ++index) {
    const int64_t label = label_at(dtype, data, index);
    if ((label >= 0 && label < classes) || label == ignored) continue;
    std::string allowed = classes == most ? "0 or more" : "0 to " + std::to_string(classes - 1);
    if (ignored < 0) allowed += ", or " + std::to_string(ignored) + " to ignore an element";
    require(false, spec, "received the label " + std::to_string(label) + "; labels are " + allowed);
  }
}

}  // namespace

bool is_finite(const Tensor& tensor) {
  const std::string dtype = tensor.type().name;
  for (size_t index = 0; index < tensor.bytes() / tensor.type().bytes; ++index) {
    if (dtype == "float32" && !std::isfinite(number_at<float>(tensor.data(), index))) return false;
    if (dtype == "float64" && !std::isfinite(number_at<double>(tensor.data(), index))) return false;
    if (dtype == "float16" && (number_at<uint16_t>(tensor.data(), index) & 0x7C00) == 0x7C00) return false;
  }
  return true;
}

Json read_json(const std::filesystem::path& path) {
  const std::string text = read_file(path);
  try {
    return Json::parse(text);
  } catch (const std::exception& error) {
    throw std::runtime_error("'" + path.string() + "' is " + error.what());
  }
}

Feeds::Feeds(const std::filesystem::path& folder, const Json& manifest)
    : specs_(manifest.at("inputs").list()), run_(read_json(folder / "feeds.json")), data_(read_file(folder / "feeds.bin")) {
  for (const Json& target : manifest.at("targets").list()) specs_.push_back(target);
  const std::vector<Json>& given = run_.at("feeds").list();
  bool fits = specs_.size() == given.size();
  for (size_t index = 0; fits && index < specs_.size(); ++index) {
    for (const char* key : {"name", "dtype"}) fits &= specs_[index].at(key).text() == given[index].at(key).text();
  }
  if (!fits) {
    std::string names;
    for (const Json& spec : specs_) names += " " + spec.at("name").text() + " (" + spec.at("dtype").text() + ")";
    throw std::runtime_error("'" + folder.string() + "': feeds.json must list, in this order:" + names);
  }
  check_shapes();
  for (const Json& feed : given) step_bytes_ += bytes_of(feed);
  if (steps() < 0 || data_.size() != step_bytes_ * static_cast<size_t>(steps())) {
    throw std::runtime_error("'" + folder.string() + "': feeds.bin has " + std::to_string(data_.size()) + " bytes, " +
                             std::to_string(steps()) + " steps of " + std::to_string(step_bytes_) + " are wanted");
  }
}

// Throws unless the shapes are those of the manifest, and no batch is empty.
void Feeds::check_shapes() const {
  std::map<std::string, int64_t> symbols;
  for (size_t index = 0; index < specs_.size(); ++index) {
    const Json& spec = specs_[index];
    const std::vector<int64_t> shape = run_.at("feeds").list()[index].at("shape").shape();
    require(shape.empty() || shape[0] > 0, spec, "the batch is empty; pass at least one sample");
    if (!spec.has("shape") || spec.at("shape").is_null()) continue;
    const std::vector<Json>& wanted = spec.at("shape").list();
    bool fits = wanted.size() == shape.size();
    for (size_t axis = 0; fits && axis < shape.size(); ++axis) {
      if (wanted[axis].is_null()) continue;
      // Texts are symbolic sizes: any number, but the same one in all inputs.
      if (!wanted[axis].is_text()) {
        fits = wanted[axis].integer() == shape[axis];
      } else if (!wanted[axis].text().empty()) {
        fits = symbols.emplace(wanted[axis].text(), shape[axis]).first->second == shape[axis];
      }
    }
    require(fits, spec, "received shape " + Json::of(shape).dump() + ", the model takes " + spec.at("shape").dump());
  }
}

void Feeds::put(int64_t step, Tensors& values) const {
  const char* place = data_.data() + static_cast<size_t>(step) * step_bytes_;
  Tensors batch;
  for (const Json& spec : specs_) {
    const Json& feed = run_.at("feeds").list()[batch.size()];
    const size_t bytes = bytes_of(feed);
    const ElementType& type = element_type(feed.at("dtype").text());
    check_values(spec, place, bytes / type.bytes);
    batch[feed.at("name").text()] = Tensor(type, feed.at("shape").shape(), place, bytes);
    place += bytes;
  }
  for (const auto& [name, tensor] : batch) values[name] = tensor;
}

size_t Feeds::bytes_of(const Json& feed) {
  return elements_of(feed.at("shape").shape()) * element_type(feed.at("dtype").text()).bytes;
}
