// Reads and writes checkpoints: safetensors files, see docs/contracts.md, "The checkpoint".
#pragma once

#include <filesystem>
#include <string>

#include "json.h"
#include "ort.h"

std::string read_file(const std::filesystem::path& path);

struct Checkpoint {
  Json metadata;    // an object of texts, some of them JSON
  Tensors tensors;  // by their keys, e.g. "parameter/fc.weight"

  // Throws std::runtime_error if the file is missing, damaged, or no checkpoint of the manifest's model.
  static Checkpoint load(const std::filesystem::path& path, const Json& manifest);

  // Writes a file beside its place and renames it, so that a process that is killed leaves the old file or the new one.
  void save(const std::filesystem::path& path) const;
};
