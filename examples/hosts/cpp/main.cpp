// Trains artifacts of onnxtrain, as their manifest says; see docs/devices/own-host.md.
//
// onnxtrain_host ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta] prints one loss per step. FEEDS holds
// feeds.json, {"steps", "learning_rate", "feeds": [{"name", "dtype", "shape"}]} and perhaps "seed", and feeds.bin: for
// each step the inputs and targets in the manifest's order, raw little-endian. --from starts from this checkpoint, or from
// this delta on top of what was loaded before. --delta writes a delta: the trained parameters only.
#include <cmath>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <stdexcept>
#include <string>
#include <vector>

#include "checkpoint.h"
#include "data_files.h"
#include "feeds.h"
#include "json.h"
#include "ort.h"

namespace {

using Names = std::vector<std::string>;
using Path = std::filesystem::path;

// The training loop, from what the manifest says.
class Trainer {
 public:
  Trainer(const Path& artifacts, const Json& manifest)
      : checkpoint(manifest),
        manifest_(manifest),
        training_(artifacts / manifest.at("files").at("training_model").text()),
        optimizer_(artifacts / manifest.at("files").at("optimizer_model").text()) {
    const Json& spec = manifest.at("optimizer");
    optimizer_inputs_ = {spec.at("learning_rate").text(), spec.at("step").text()};
    training_outputs_ = {manifest.at("loss").text()};
    for (const char* group : {"inputs", "targets", "parameters", "statistics", "host_inputs"}) {
      for (const Json& entry : manifest.at(group).list()) training_inputs_.push_back(entry.at("name").text());
    }
    for (const Json& parameter : manifest.at("parameters").list()) add_parameter(parameter);
    for (const Json& statistic : manifest.at("statistics").list()) {
      training_outputs_.push_back(statistic.at("output").text());
    }
    for (const Json& state : spec.at("states").list()) {
      add_updated(state.at("parameter").text() + "_" + state.at("moment").text());
    }
    checkpoint.load(artifacts / manifest.at("files").at("checkpoint").text());
  }

  // Takes one step, counted from 0 in the feeds, and returns its loss.
  double step(const Feeds& feeds, int64_t index) {
    Tensors& values = checkpoint.values;
    feeds.put(index, values);
    for (const Json& input : manifest_.at("host_inputs").list()) {
      std::vector<int64_t> numbers;
      for (const Json& held : input.at("holds").list()) numbers.push_back(host_value(held.text(), feeds.seed()));
      const auto size = static_cast<int64_t>(numbers.size());
      values[input.at("name").text()] = Tensor::of("int64", {size}, numbers);
    }
    Tensors results = training_.run(training_inputs_, training_outputs_, values);
    const double loss = number_of(results.at(training_outputs_[0]));
    if (!std::isfinite(loss)) {
      throw std::runtime_error("the loss is " + std::to_string(loss) + ": lower the learning rate, or leave this batch out");
    }
    for (const auto& [output, input] : gradients_) {
      values[input] = results.at(output);
      // A finite loss may have gradients of NaN, above all where inputs are infinite.
      if (is_finite(values[input])) continue;
      throw std::runtime_error("the gradient '" + output + "' is NaN or infinite: lower the learning rate, or leave this batch out");
    }
    for (const Json& statistic : manifest_.at("statistics").list()) {
      values[statistic.at("name").text()] = results.at(statistic.at("output").text());
    }
    ++checkpoint.step;
    values[optimizer_inputs_[0]] = Tensor::of<float>("float32", {}, {static_cast<float>(feeds.learning_rate())});
    values[optimizer_inputs_[1]] = Tensor::of<int64_t>("int64", {}, {checkpoint.step});
    const Tensors updated = optimizer_.run(optimizer_inputs_, optimizer_outputs_, values);
    // Outputs are `<input>_updated`: they are the inputs of the next step.
    const std::string ending = "_updated";
    for (const auto& [name, tensor] : updated) values[name.substr(0, name.size() - ending.size())] = tensor;
    return loss;
  }

  // Its values are also the place of batches and gradients, by the names of the models' inputs.
  Checkpoint checkpoint;

 private:
  static double number_of(const Tensor& loss) {
    if (loss.type().bytes == sizeof(double)) return *reinterpret_cast<const double*>(loss.data());
    return static_cast<double>(*reinterpret_cast<const float*>(loss.data()));
  }

  void add_parameter(const Json& parameter) {
    if (!parameter.at("trainable").truth()) return;
    const std::string& name = parameter.at("name").text();
    add_updated(name);
    add_gradient(parameter.at("gradient").text(), name + "_grad");
    // A table of which a batch reads only some rows: its gradient is these rows, and their numbers come with it.
    if (parameter.has("gradient_indices")) add_gradient(parameter.at("gradient_indices").text(), name + "_grad_indices");
  }

  void add_updated(const std::string& name) {
    optimizer_inputs_.push_back(name);
    optimizer_outputs_.push_back(name + "_updated");
  }

  void add_gradient(const std::string& output, const std::string& input) {
    training_outputs_.push_back(output);
    optimizer_inputs_.push_back(input);
    gradients_.emplace_back(output, input);
  }

  int64_t host_value(const std::string& name, int64_t seed) const {
    if (name == "seed") return seed;
    if (name == "step") return checkpoint.step;
    // Runs of the training model since the last optimizer step: this loop takes a step after each.
    if (name == "run") return 0;
    throw std::runtime_error("the model wants the number '" + name + "', which this program does not know");
  }

  Json manifest_;
  Session training_, optimizer_;
  Names training_inputs_, training_outputs_, optimizer_inputs_, optimizer_outputs_;
  std::vector<std::pair<std::string, std::string>> gradients_;  // output of one model, input of the other
};

struct Arguments {
  Names places;  // ARTIFACTS FEEDS [CHECKPOINT_OUT]
  Names from;
  bool delta = false;
};

// Returns false if the command line is wrong.
bool read_arguments(int count, char** texts, Arguments& arguments) {
  for (int index = 1; index < count; ++index) {
    const std::string text = texts[index];
    if (text == "--delta") {
      arguments.delta = true;
    } else if (text == "--from" && index + 1 < count) {
      arguments.from.emplace_back(texts[++index]);
    } else if (text.rfind("--", 0) == 0) {
      return false;
    } else {
      arguments.places.push_back(text);
    }
  }
  const size_t places = arguments.places.size();
  return places == 3 || (places == 2 && !arguments.delta);
}

void train(const Arguments& arguments) {
  const Path artifacts = arguments.places[0];
  const Json manifest = read_json(artifacts / "manifest.json");
  if (!manifest.has("format") || manifest.at("format").text() != "onnxtrain" || manifest.at("version").integer() > 2) {
    throw std::runtime_error("'" + artifacts.string() + "': manifest.json is none of onnxtrain, or of a newer version");
  }
  if (manifest.at("optimizer").is_null()) throw std::runtime_error("'" + artifacts.string() + "' has no optimizer model");
  check_data_files(artifacts, manifest);
  const Feeds feeds(arguments.places[1], manifest);
  Trainer trainer(artifacts, manifest);
  for (const std::string& file : arguments.from) trainer.checkpoint.load(file);
  for (int64_t step = 0; step < feeds.steps(); ++step) {
    std::printf("%.9g\n", trainer.step(feeds, step));
    std::fflush(stdout);
  }
  if (arguments.places.size() == 3) trainer.checkpoint.save(arguments.places[2], feeds.learning_rate(), arguments.delta);
}

}  // namespace

int main(int count, char** texts) {
  Arguments arguments;
  if (!read_arguments(count, texts, arguments)) {
    std::fprintf(stderr, "usage: %s ARTIFACTS FEEDS [CHECKPOINT_OUT] [--from FILE]... [--delta]\n", texts[0]);
    std::fprintf(stderr, "--from may be repeated: a delta goes on top of what was loaded before; --delta needs CHECKPOINT_OUT\n");
    return 2;
  }
  try {
    if (arguments.places.size() == 3) {
      // Before the training, whose result would be lost.
      const Path out = std::filesystem::absolute(arguments.places[2]);
      if (std::filesystem::is_directory(out) || !std::filesystem::is_directory(out.parent_path())) {
        std::fprintf(stderr, "'%s' is a folder, or in a folder that does not exist: give the path of a file\n", out.string().c_str());
        return 2;
      }
    }
    train(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "onnxtrain_host: %s\n", error.what());
    return 1;
  }
  return 0;
}
