// Reads and writes safetensors files: the length of the header, the header as JSON, then the tensors.
#pragma once

#include <filesystem>
#include <string>

#include "json.h"
#include "ort.h"

// Throws std::runtime_error if the file cannot be read.
std::string read_file(const std::filesystem::path& path);

struct TensorFile {
  Json metadata;    // an object of texts, some of them JSON
  Tensors tensors;  // by their keys, e.g. "parameter/fc.weight"

  // Throws std::runtime_error if the file is missing or damaged.
  static TensorFile read(const std::filesystem::path& path);

  // Writes the file by AtomicFile: a process that is killed, or a loss of power, leaves the old file or the new one.
  void write(const std::filesystem::path& path) const;
};
