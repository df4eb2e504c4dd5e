#include "feeds.h"

#include <stdexcept>
#include <vector>

#include "safetensors.h"

Json read_json(const std::filesystem::path& path) {
  const std::string text = read_file(path);
  try {
    return Json::parse(text);
  } catch (const std::exception& error) {
    throw std::runtime_error("'" + path.string() + "' is " + error.what());
  }
}

Feeds::Feeds(const std::filesystem::path& folder, const Json& manifest)
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

void Feeds::put(int64_t step, Tensors& values) const {
  const char* place = data_.data() + static_cast<size_t>(step) * step_bytes_;
  for (const Json& feed : run_.at("feeds").list()) {
    const size_t bytes = bytes_of(feed);
    const ElementType& type = element_type(feed.at("dtype").text());
    values[feed.at("name").text()] = Tensor(type, feed.at("shape").shape(), place, bytes);
    place += bytes;
  }
}

size_t Feeds::bytes_of(const Json& feed) {
  return elements_of(feed.at("shape").shape()) * element_type(feed.at("dtype").text()).bytes;
}
