#include "safetensors.h"

#include <algorithm>
#include <fstream>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

#include "atomic_file.h"

namespace {

void require(bool condition, const std::string& message) {
  if (!condition) throw std::runtime_error(message);
}

uint64_t read_length(const std::string& data) {
  uint64_t length = 0;
  for (int byte = 7; byte >= 0; --byte) length = length << 8 | static_cast<unsigned char>(data[byte]);
  return length;
}

}  // namespace

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream content;
  content << file.rdbuf();
  require(file.is_open() && !std::filesystem::is_directory(path), "cannot read '" + path.string() + "'");
  return content.str();
}

TensorFile TensorFile::read(const std::filesystem::path& path) {
  const std::string data = read_file(path);
  require(data.size() >= 8 && read_length(data) <= data.size() - 8, "it is truncated, or no safetensors file");
  const size_t start = 8 + static_cast<size_t>(read_length(data));
  const Json header = Json::parse(data.substr(8, start - 8));
  TensorFile file;
  std::vector<std::pair<size_t, size_t>> places;
  for (const auto& [key, entry] : header.object()) {
    if (key == "__metadata__") {
      file.metadata = entry;
      continue;
    }
    const std::vector<int64_t> offsets = entry.at("data_offsets").shape();
    require(offsets.size() == 2 && offsets[0] <= offsets[1], "the place of '" + key + "' is wrong");
    const size_t begin = static_cast<size_t>(offsets[0]), end = static_cast<size_t>(offsets[1]);
    require(end <= data.size() - start, "it is truncated in the tensor '" + key + "'");
    const ElementType& type = element_type_of_safetensors(entry.at("dtype").text());
    file.tensors[key] = Tensor(type, entry.at("shape").shape(), data.data() + start + begin, end - begin);
    places.emplace_back(begin, end);
  }
  // The tensors fill the rest of the file without gaps: a damaged offset would give numbers of another tensor.
  std::sort(places.begin(), places.end());
  size_t end = 0;
  for (const auto& place : places) {
    require(place.first == end, "its tensors overlap or have gaps");
    end = place.second;
  }
  require(start + end == data.size(), "there are bytes behind its last tensor");
  return file;
}

void TensorFile::write(const std::filesystem::path& path) const {
  Json header;
  header.set("__metadata__", metadata);
  size_t end = 0;
  for (const auto& [key, tensor] : tensors) {
    Json entry, offsets;
    offsets.append(Json(static_cast<int64_t>(end)));
    end += tensor.bytes();
    offsets.append(Json(static_cast<int64_t>(end)));
    entry.set("dtype", Json(std::string(tensor.type().safetensors)));
    entry.set("shape", Json::of(tensor.shape()));
    entry.set("data_offsets", offsets);
    header.set(key, entry);
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string length;
  for (int byte = 0; byte < 8; ++byte) length += static_cast<char>(text.size() >> (8 * byte) & 0xFF);
  AtomicFile file(path);
  file.write(length.data(), length.size());
  file.write(text.data(), text.size());
  for (const auto& [key, tensor] : tensors) file.write(tensor.data(), tensor.bytes());
  file.commit();
}
