// Writes a safetensors file: whole or not at all.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "kernels/view.h"

namespace fnx {

struct NamedArray {
  std::string name;
  View data;  // host memory
};

// Arrays in the given order, the data area aligned to 64 bytes; throws Output.
void write_safetensors(const std::filesystem::path& file, const std::vector<NamedArray>& arrays);

}  // namespace fnx
