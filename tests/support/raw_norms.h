// A copy of a checkpoint whose norms were stored as gamma itself, as some conversions do.
#pragma once

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <string>
#include <vector>

#include "kernels/float16.h"
#include "libcore/format/checkpoint.h"
#include "libcore/format/tensor_names.h"

namespace fnx::test {

// Adds 1 to every centred norm whose name `choose` accepts, in the folder's files.
inline void add_one_to_norms(const std::filesystem::path& folder,
                             const std::function<bool(const std::string&)>& choose) {
  const Checkpoint pack(folder);
  for (const TensorInfo& t : pack.tensors()) {
    if (!is_centred_norm(t.name) || !choose(t.name)) continue;
    std::vector<uint16_t> values(t.bytes / 2);
    std::fstream file(folder / pack.files()[t.file].name, std::ios::in | std::ios::out | std::ios::binary);
    file.seekg(static_cast<std::streamoff>(t.offset));
    file.read(reinterpret_cast<char*>(values.data()), static_cast<std::streamsize>(t.bytes));
    for (uint16_t& v : values)
      v = t.dtype == DType::BF16 ? f32_to_bf16(bf16_to_f32(v) + 1) : f32_to_f16(f16_to_f32(v) + 1);
    file.seekp(static_cast<std::streamoff>(t.offset));
    file.write(reinterpret_cast<const char*>(values.data()), static_cast<std::streamsize>(t.bytes));
    REQUIRE(file.good());
  }
}

}  // namespace fnx::test
