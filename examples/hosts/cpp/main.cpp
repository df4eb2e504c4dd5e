// Trains artifacts of onnxtrain, as their manifest says; see docs/own-host.md.
//
// onnxtrain_host ARTIFACTS FEEDS [CHECKPOINT_OUT] prints one loss per step. FEEDS holds feeds.json,
// {"steps", "learning_rate", "feeds": [{"name", "dtype", "shape"}]} and perhaps "seed", and feeds.bin: for each step the
// inputs and targets in the manifest's order, raw little-endian.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "json.h"
#include "ort.h"

namespace {

using Names = std::vector<std::string>;

Json read_json(const std::filesystem::path& path) {
  const std::string text = read_file(path);
  try {
    return Json::parse(text);
  } catch (const std::exception& error) {
    throw std::runtime_error("'" + path.string() + "' is " + error.what());
  }
}

// The batches of a run, from the two files of a folder.
class Feeds {
 public:
  Feeds(const std::filesystem::path& folder, const Json& manifest)
      : run_(read_json(folder / "feeds.json")), data_(read_file(folder / "feeds.bin")) {
    std::vector<Json> wanted = manifest.at("inputs").list();
    for (const Json& target : manifest.at("targets").list()) wanted.push_back(target);
    const std::vector<Json>& given = run_.at("feeds").list();
    bool fits = wanted.size() == given.size();
    for (size_t index = 0; fits && index < wanted.size(); ++index) {
      for (const char* key : {"name", "dtype"}) fits &= wanted[index].at(key).text() == given[index].at(key).text();
    }
    if (!fits) {
      std::string names;
      for (const Json& spec : wanted) names += " " + spec.at("name").text() + " (" + spec.at("dtype").text() + ")";
      throw std::runtime_error("'" + folder.string() + "': feeds.json must list, in this order:" + names);
    }
    for (const Json& feed : given) step_bytes_ += bytes_of(feed);
    if (data_.size() != step_bytes_ * static_cast<size_t>(steps())) {
      throw std::runtime_error("'" + folder.string() + "': feeds.bin has " + std::to_string(data_.size()) + " bytes, " +
                               std::to_string(steps()) + " steps of " + std::to_string(step_bytes_) + " are wanted");
    }
  }

  int64_t steps() const { return run_.at("steps").integer(); }
  double learning_rate() const { return run_.at("learning_rate").number(); }
  int64_t seed() const { return run_.has("seed") ? run_.at("seed").integer() : 0; }

  // Puts the arrays of a step, counted from 0, among the values.
  void put(int64_t step, Tensors& values) const {
    const char* place = data_.data() + static_cast<size_t>(step) * step_bytes_;
    for (const Json& feed : run_.at("feeds").list()) {
      const size_t bytes = bytes_of(feed);
      const ElementType& type = element_type(feed.at("dtype").text());
      values[feed.at("name").text()] = Tensor(type, feed.at("shape").shape(), place, bytes);
      place += bytes;
    }
  }

 private:
  static size_t bytes_of(const Json& feed) {
    return elements_of(feed.at("shape").shape()) * element_type(feed.at("dtype").text()).bytes;
  }

  Json run_;
  std::string data_;
  size_t step_bytes_ = 0;
};

// Names that the models and the checkpoint use for one tensor of the state.
struct Held {
  std::string input;  // of the models: "fc.weight", "fc.weight_momentum0"
  std::string key;    // of the checkpoint: "parameter/fc.weight", "momentum0/fc.weight"
};

// The training loop, from what the manifest says.
class Trainer {
 public:
  Trainer(const std::filesystem::path& artifacts, const Json& manifest)
      : manifest_(manifest),
        training_(artifacts / manifest.at("files").at("training_model").text()),
        optimizer_(artifacts / manifest.at("files").at("optimizer_model").text()),
        checkpoint_(Checkpoint::load(artifacts / manifest.at("files").at("checkpoint").text(), manifest)) {
    const Json& spec = manifest.at("optimizer");
    optimizer_inputs_ = {spec.at("learning_rate").text(), spec.at("step").text()};
    training_outputs_ = {manifest.at("loss").text()};
    for (const char* group : {"inputs", "targets", "parameters", "statistics", "host_inputs"}) {
      for (const Json& entry : manifest.at(group).list()) training_inputs_.push_back(entry.at("name").text());
    }
    for (const Json& parameter : manifest.at("parameters").list()) add_parameter(parameter);
    for (const Json& statistic : manifest.at("statistics").list()) {
      const std::string& name = statistic.at("name").text();
      held_.push_back({name, "statistic/" + name});
      training_outputs_.push_back(statistic.at("output").text());
    }
    for (const Held& tensor : held_) values_[tensor.input] = checkpoint_.tensors.at(tensor.key);
    progress_ = Json::parse(checkpoint_.metadata.at("optimizer").text());
    step_ = progress_.is_null() ? 0 : progress_.at("step").integer();
    for (const Json& state : spec.at("states").list()) add_moment(state);
  }

  // Takes one step and returns its loss; the batch is among the values already.
  float step(const Feeds& feeds, int64_t index) {
    feeds.put(index, values_);
    for (const Json& input : manifest_.at("host_inputs").list()) {
      std::vector<int64_t> numbers;
      for (const Json& held : input.at("holds").list()) numbers.push_back(host_value(held.text(), feeds.seed()));
      const auto size = static_cast<int64_t>(numbers.size());
      values_[input.at("name").text()] = Tensor::of("int64", {size}, numbers);
    }
    Tensors results = training_.run(training_inputs_, training_outputs_, values_);
    for (const auto& [output, input] : gradients_) values_[input] = results.at(output);
    for (const Json& statistic : manifest_.at("statistics").list()) {
      values_[statistic.at("name").text()] = results.at(statistic.at("output").text());
    }
    ++step_;
    values_[optimizer_inputs_[0]] = Tensor::of<float>("float32", {}, {static_cast<float>(feeds.learning_rate())});
    values_[optimizer_inputs_[1]] = Tensor::of<int64_t>("int64", {}, {step_});
    const Tensors updated = optimizer_.run(optimizer_inputs_, optimizer_outputs_, values_);
    // Outputs are `<input>_updated`: they are the inputs of the next step.
    const std::string ending = "_updated";
    for (const auto& [name, tensor] : updated) values_[name.substr(0, name.size() - ending.size())] = tensor;
    const Tensor& loss = results.at(training_outputs_[0]);
    // A loss of float64 has eight bytes.
    if (loss.type().bytes == 8) return static_cast<float>(*reinterpret_cast<const double*>(loss.data()));
    return *reinterpret_cast<const float*>(loss.data());
  }

  void save(const std::filesystem::path& path, double learning_rate) {
    if (progress_.is_null()) progress_.set("initial_learning_rate", Json(learning_rate));
    progress_.set("learning_rate", Json(learning_rate));
    progress_.set("step", Json(static_cast<double>(step_)));
    checkpoint_.metadata.set("optimizer", Json(progress_.dump()));
    for (const Held& tensor : held_) checkpoint_.tensors[tensor.key] = values_.at(tensor.input);
    checkpoint_.save(path);
  }

 private:
  void add_parameter(const Json& parameter) {
    const std::string& name = parameter.at("name").text();
    held_.push_back({name, "parameter/" + name});
    if (!parameter.at("trainable").truth()) return;
    optimizer_inputs_.push_back(name);
    optimizer_outputs_.push_back(name + "_updated");
    add_gradient(parameter.at("gradient").text(), name + "_grad");
    // A table of which a batch reads only some rows: its gradient is these rows, and their numbers come with it.
    if (parameter.has("gradient_indices")) add_gradient(parameter.at("gradient_indices").text(), name + "_grad_indices");
  }

  void add_gradient(const std::string& output, const std::string& input) {
    training_outputs_.push_back(output);
    optimizer_inputs_.push_back(input);
    gradients_.emplace_back(output, input);
  }

  void add_moment(const Json& state) {
    const std::string& moment = state.at("moment").text();
    const std::string& parameter = state.at("parameter").text();
    const Held held{parameter + "_" + moment, moment + "/" + parameter};
    held_.push_back(held);
    optimizer_inputs_.push_back(held.input);
    optimizer_outputs_.push_back(held.input + "_updated");
    const auto saved = checkpoint_.tensors.find(held.key);
    if (!progress_.is_null()) {
      if (saved == checkpoint_.tensors.end() || saved->second.shape() != state.at("shape").shape()) {
        throw std::runtime_error("the checkpoint has the moments of another optimizer: '" + held.key + "' does not fit");
      }
      values_[held.input] = saved->second;
      return;
    }
    const std::vector<Json>& names = manifest_.at("optimizer").at("moments").list();
    const std::vector<Json>& initial = manifest_.at("optimizer").at("initial_values").list();
    for (size_t index = 0; index < names.size(); ++index) {
      if (names[index].text() == moment) values_[held.input] = filled(state, initial.at(index).number());
    }
  }

  static Tensor filled(const Json& state, double value) {
    const std::vector<int64_t> shape = state.at("shape").shape();
    if (state.at("dtype").text() == "float64") {
      return Tensor::of("float64", shape, std::vector<double>(elements_of(shape), value));
    }
    return Tensor::of("float32", shape, std::vector<float>(elements_of(shape), static_cast<float>(value)));
  }

  int64_t host_value(const std::string& name, int64_t seed) const {
    if (name == "seed") return seed;
    if (name == "step") return step_;
    // Runs of the training model since the last optimizer step: this loop takes a step after each.
    if (name == "run") return 0;
    throw std::runtime_error("the model wants the number '" + name + "', which this program does not know");
  }

  Json manifest_;
  Session training_, optimizer_;
  Checkpoint checkpoint_;
  Tensors values_;  // batch, state and gradients by the names of the models' inputs
  std::vector<Held> held_;
  Names training_inputs_, training_outputs_, optimizer_inputs_, optimizer_outputs_;
  std::vector<std::pair<std::string, std::string>> gradients_;  // output of one model, input of the other
  Json progress_;
  int64_t step_ = 0;
};

void train(const std::filesystem::path& artifacts, const std::filesystem::path& folder, const char* checkpoint_out) {
  const Json manifest = read_json(artifacts / "manifest.json");
  if (!manifest.has("format") || manifest.at("format").text() != "onnxtrain" || manifest.at("version").integer() > 2) {
    throw std::runtime_error("'" + artifacts.string() + "': manifest.json is none of onnxtrain, or of a newer version");
  }
  if (manifest.at("optimizer").is_null()) throw std::runtime_error("'" + artifacts.string() + "' has no optimizer model");
  Trainer trainer(artifacts, manifest);
  const Feeds feeds(folder, manifest);
  for (int64_t step = 0; step < feeds.steps(); ++step) {
    std::printf("%.9g\n", static_cast<double>(trainer.step(feeds, step)));
    std::fflush(stdout);
  }
  if (checkpoint_out != nullptr) trainer.save(checkpoint_out, feeds.learning_rate());
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 3 || count > 4) {
    std::fprintf(stderr, "usage: %s ARTIFACTS FEEDS [CHECKPOINT_OUT]\n", arguments[0]);
    return 2;
  }
  try {
    train(arguments[1], arguments[2], count == 4 ? arguments[3] : nullptr);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "onnxtrain_host: %s\n", error.what());
    return 1;
  }
  return 0;
}
