#include "checkpoint.h"

#include <cmath>
#include <stdexcept>

#include "sha256.h"

namespace {

const char kFormat[] = "onnxtrain-checkpoint";
const char kDeltaFormat[] = "onnxtrain-checkpoint-delta";

void require(bool condition, const std::string& message) {
  if (!condition) throw std::runtime_error(message);
}

std::string entry_of(const Json& metadata, const std::string& key, const std::string& otherwise = "") {
  return metadata.has(key) ? metadata.at(key).text() : otherwise;
}

std::string show(const std::string& dtype, const std::vector<int64_t>& shape) { return dtype + Json::of(shape).dump(); }

// Reads step and learning rates of an optimizer; null if the file has no optimizer state.
Json read_progress(const std::string& text) {
  Json progress = Json::parse(text);
  if (progress.is_null()) return progress;
  const int64_t step = progress.at("step").integer();
  require(step >= 0 && step < int64_t{1} << 62, "its optimizer is at " + text);
  for (const char* key : {"learning_rate", "initial_learning_rate"}) {
    const double rate = progress.at(key).number();
    require(std::isfinite(rate) && rate >= 0, "its optimizer is at " + text);
  }
  return progress;
}

Tensor filled(const std::string& dtype, const std::vector<int64_t>& shape, double value) {
  if (dtype == "float64") return Tensor::of("float64", shape, std::vector<double>(elements_of(shape), value));
  require(dtype == "float32", "moments of " + dtype + " are not supported");
  return Tensor::of("float32", shape, std::vector<float>(elements_of(shape), static_cast<float>(value)));
}

}  // namespace

Checkpoint::Checkpoint(const Json& manifest) : manifest_(manifest) {
  for (const std::string kind : {"parameter", "statistic"}) {
    for (const Json& entry : manifest.at(kind + "s").list()) {
      const std::string& name = entry.at("name").text();
      const Spec spec{name, entry.at("dtype").text(), entry.at("shape").shape()};
      specs_[kind + "/" + name] = spec;
      if (kind == "parameter" && !entry.at("trainable").truth()) frozen_[kind + "/" + name] = spec;
    }
  }
  std::map<std::string, double> initial;
  const Json& optimizer = manifest.at("optimizer");
  for (size_t index = 0; index < optimizer.at("moments").list().size(); ++index) {
    initial[optimizer.at("moments").list()[index].text()] = optimizer.at("initial_values").list().at(index).number();
  }
  for (const Json& entry : optimizer.at("states").list()) {
    const std::string &moment = entry.at("moment").text(), &parameter = entry.at("parameter").text();
    moments_[moment + "/" + parameter] =
        Spec{parameter + "_" + moment, entry.at("dtype").text(), entry.at("shape").shape(), initial.at(moment)};
  }
}

// Throws unless the file has the tensors of the model, of its optimizer if there is optimizer state, and no others.
void Checkpoint::check(const Tensors& tensors, bool delta, bool optimizer) const {
  size_t expected = 0;
  for (const Specs* specs : {&specs_, &moments_}) {
    if (specs == &moments_ && !optimizer) continue;
    for (const auto& [key, spec] : *specs) {
      if (delta && frozen_.count(key) != 0) continue;
      const auto tensor = tensors.find(key);
      require(tensor != tensors.end(), "it lacks '" + key + "'");
      const std::string received = show(tensor->second.type().name, tensor->second.shape());
      const std::string wanted = show(spec.dtype, spec.shape);
      require(received == wanted, "'" + key + "' is " + received + " in the file and " + wanted + " in the model");
      ++expected;
    }
  }
  for (const auto& [key, tensor] : tensors) {
    const bool known = (specs_.count(key) != 0 && !(delta && frozen_.count(key) != 0)) || (optimizer && moments_.count(key) != 0);
    require(known, "the model has no '" + key + "'; perhaps it had another optimizer");
  }
}

TensorFile Checkpoint::read(const std::filesystem::path& path, bool& delta, Json& progress) const {
  const TensorFile file = TensorFile::read(path);
  const std::string format = entry_of(file.metadata, "format"), version = entry_of(file.metadata, "version");
  delta = format == kDeltaFormat;
  require(delta || format == kFormat, "it is no checkpoint of onnxtrain");
  require(version == "1", "it has version " + version + ", not 1");
  require(entry_of(file.metadata, "fingerprint") == manifest_.at("fingerprint").text(), "it belongs to another model");
  require(!delta || !values.empty(), "it is a delta, which goes on top of a checkpoint");
  progress = read_progress(entry_of(file.metadata, "optimizer", "null"));
  check(file.tensors, delta, !progress.is_null());
  require(!delta || entry_of(file.metadata, "frozen") == frozen_digest(),
          "it was trained on top of other values of the frozen parameters");
  return file;
}

void Checkpoint::load(const std::filesystem::path& path) {
  bool delta = false;
  TensorFile file;
  Json progress;
  try {
    file = read(path, delta, progress);
  } catch (const std::exception& error) {
    throw std::runtime_error("the checkpoint '" + path.string() + "' cannot be used: " + error.what());
  }
  // Nothing has changed up to here.
  for (const auto& [key, spec] : specs_) {
    if (file.tensors.count(key) != 0) values[spec.input] = file.tensors.at(key);
  }
  for (const auto& [key, spec] : moments_) {
    values[spec.input] = progress.is_null() ? filled(spec.dtype, spec.shape, spec.initial) : file.tensors.at(key);
  }
  for (const auto& [key, text] : file.metadata.object()) {
    if (key != "format" && key != "frozen") metadata_.set(key, text);
  }
  progress_ = progress;
  step = progress.is_null() ? 0 : progress.at("step").integer();
}

void Checkpoint::save(const std::filesystem::path& path, double learning_rate, bool delta) const {
  TensorFile file;
  for (const Specs* specs : {&specs_, &moments_}) {
    for (const auto& [key, spec] : *specs) {
      if (!delta || frozen_.count(key) == 0) file.tensors[key] = values.at(spec.input);
    }
  }
  Json progress = progress_, order = Json::of({}), trainable = Json::of({});
  if (progress.is_null()) progress.set("initial_learning_rate", Json(learning_rate));
  progress.set("learning_rate", Json(learning_rate));
  progress.set("step", Json(step));
  for (const Json& parameter : manifest_.at("parameters").list()) {
    order.append(parameter.at("name"));
    if (parameter.at("trainable").truth()) trainable.append(parameter.at("name"));
  }
  for (const auto& [key, text] : metadata_.object()) {
    if (!delta || (key != "order" && key != "nominal")) file.metadata.set(key, text);
  }
  file.metadata.set("format", Json(std::string(delta ? kDeltaFormat : kFormat)));
  file.metadata.set("optimizer", Json(progress.dump()));
  file.metadata.set("trainable", Json(trainable.dump()));
  if (delta) {
    file.metadata.set("frozen", Json(frozen_digest()));
  } else {
    file.metadata.set("order", Json(order.dump()));
    file.metadata.set("nominal", Json(std::string("false")));
  }
  file.write(path);
}

// The digest by which a delta recognises its base. The map is in the order of names, as UTF-8 sorts by code points.
std::string Checkpoint::frozen_digest() const {
  Sha256 digest;
  for (const auto& [key, spec] : frozen_) {
    const Tensor& value = values.at(spec.input);
    const std::string name = Json(spec.input).dump(), dtype = Json(spec.dtype).dump();
    digest.update("[" + name + "," + dtype + "," + Json::of(spec.shape).dump() + "]").update(value.data(), value.bytes());
  }
  return digest.hex();
}
