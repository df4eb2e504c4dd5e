// Files with weights that the models of a run share: see docs/reference/file-formats.md, "data_files".
#pragma once

#include <filesystem>

#include "json.h"

// Throws std::runtime_error, which names the file, if one is missing or not the one that the artifacts were written with.
void check_data_files(const std::filesystem::path& artifacts, const Json& manifest);
