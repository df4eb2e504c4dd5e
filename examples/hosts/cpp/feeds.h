// The batches of a run, from the two files of a folder: see docs/devices/test-your-host.md.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "json.h"
#include "ort.h"

// Throws std::runtime_error, which names the file, if it is missing or no JSON.
Json read_json(const std::filesystem::path& path);

// False if a floating-point tensor has NaN or infinity.
bool is_finite(const Tensor& tensor);

class Feeds {
 public:
  // Throws std::runtime_error if the files do not fit the manifest.
  Feeds(const std::filesystem::path& folder, const Json& manifest);

  int64_t steps() const { return run_.at("steps").integer(); }
  double learning_rate() const { return run_.at("learning_rate").number(); }
  int64_t seed() const { return run_.has("seed") ? run_.at("seed").integer() : 0; }

  // Puts the arrays of a step, counted from 0, among the values. Throws std::runtime_error, and puts nothing, if the batch
  // has NaN, or labels that are no class.
  void put(int64_t step, Tensors& values) const;

 private:
  static size_t bytes_of(const Json& feed);
  void check_shapes() const;

  std::vector<Json> specs_;  // of the manifest: inputs, then targets
  Json run_;
  std::string data_;
  size_t step_bytes_ = 0;
};
