#include "data_files.h"

#include <fstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "sha256.h"

namespace {

std::string digest_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> chunk(1 << 20);
  Sha256 digest;
  do {
    file.read(chunk.data(), static_cast<std::streamsize>(chunk.size()));
    digest.update(chunk.data(), static_cast<size_t>(file.gcount()));
  } while (file);
  return digest.hex();
}

}  // namespace

void check_data_files(const std::filesystem::path& artifacts, const Json& manifest) {
  if (!manifest.has("data_files")) return;
  for (const auto& [name, entry] : manifest.at("data_files").object()) {
    const std::filesystem::path path = artifacts / std::filesystem::u8path(name);
    if (!std::filesystem::is_regular_file(path)) {
      throw std::runtime_error("'" + path.string() + "', which holds weights of the models, is missing");
    }
    // The size first: it tells most wrong files, and costs nothing.
    if (static_cast<int64_t>(std::filesystem::file_size(path)) != entry.at("bytes").integer() ||
        digest_of(path) != entry.at("sha256").text()) {
      throw std::runtime_error("'" + path.string() + "' is not the file with which these artifacts were written. Put the original "
                               "file there, or generate the artifacts again from the new one");
    }
  }
}
