// The state of a run, which checkpoints and deltas hold: see docs/reference/file-formats.md, "The checkpoint".
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "json.h"
#include "ort.h"
#include "safetensors.h"

class Checkpoint {
 public:
  explicit Checkpoint(const Json& manifest);

  // Takes over a checkpoint, or a delta on top of the present values. Throws std::runtime_error, and changes nothing, if the
  // file is missing, damaged, or does not fit the model.
  void load(const std::filesystem::path& path);

  // Writes a checkpoint, or a delta: the trained parameters, the statistics and the moments only.
  void save(const std::filesystem::path& path, double learning_rate, bool delta) const;

  Tensors values;    // parameters, statistics and moments by the inputs of the models, e.g. "fc.weight_momentum0"
  int64_t step = 0;  // optimizer steps taken

 private:
  struct Spec {
    std::string input;  // of the models: "fc.weight", "fc.weight_momentum0"
    std::string dtype;
    std::vector<int64_t> shape;
    double initial = 0;  // of a moment
  };
  using Specs = std::map<std::string, Spec>;  // by the keys of the file, e.g. "momentum0/fc.weight"

  TensorFile read(const std::filesystem::path& path, bool& delta, Json& progress) const;
  void check(const Tensors& tensors, bool delta, bool optimizer) const;
  std::string frozen_digest() const;

  Json manifest_, metadata_, progress_;
  Specs specs_;    // of parameters and statistics
  Specs frozen_;   // those of them that are not trained
  Specs moments_;
};
