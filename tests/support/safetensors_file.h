// Writes safetensors files for tests, right ones and wrong ones.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "tests/support/temp_dir.h"

namespace fnx::test {

struct FileTensor {
  std::string name, dtype;  // dtype as the file spells it
  std::vector<int64_t> shape;
  std::string bytes;
};

// A tensor of the elements' own bytes: tensor("a", DType::F32, {2}, std::vector<float>{1, 2}).
template <class T>
FileTensor tensor(std::string name, DType dtype, std::vector<int64_t> shape, const std::vector<T>& values) {
  return {std::move(name), dtype_name(dtype), std::move(shape),
          std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T))};
}

// Length, header as given, data.
inline std::string safetensors_bytes(const std::string& header, std::string_view data) {
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(uint64_t{header.size()} >> (8 * i));
  return (out + header).append(data);
}

// Tensors in this order, each aligned to 8 bytes in the data area; the header is padded to 8 bytes, plus `odd` spaces.
inline void write_safetensors(const std::filesystem::path& path, const std::vector<FileTensor>& tensors, int odd = 0) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  std::string data;
  for (const FileTensor& t : tensors) {
    data.resize((data.size() + 7) / 8 * 8);
    header[t.name] = {
        {"dtype", t.dtype}, {"shape", t.shape}, {"data_offsets", {data.size(), data.size() + t.bytes.size()}}};
    data += t.bytes;
  }
  std::string text = header.dump();
  text.append((8 - text.size() % 8) % 8 + static_cast<size_t>(odd), ' ');
  write_file(path, safetensors_bytes(text, data));
}

}  // namespace fnx::test
