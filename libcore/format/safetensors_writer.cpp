#include "libcore/format/safetensors_writer.h"

#include <nlohmann/json.hpp>

#include "libcore/receipt/receipt.h"

namespace fnx {

void write_safetensors(const std::filesystem::path& file, const std::vector<NamedArray>& arrays) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  int64_t end = 0;
  for (const NamedArray& a : arrays) {
    const std::vector<int64_t> shape(a.data.shape.begin(), a.data.shape.begin() + a.data.rank);
    header[a.name] = {
        {"dtype", dtype_name(a.data.dtype)}, {"shape", shape}, {"data_offsets", {end, end + a.data.bytes()}}};
    end += a.data.bytes();
  }
  std::string text = header.dump();
  text.append((64 - (8 + text.size()) % 64) % 64, ' ');
  std::string out;
  out.reserve(8 + text.size() + end);
  for (int i = 0; i < 8; ++i) out += static_cast<char>(uint64_t{text.size()} >> (8 * i));
  out += text;
  for (const NamedArray& a : arrays) out.append(reinterpret_cast<const char*>(a.data.data), a.data.bytes());
  write_file_atomic(file, out);
}

}  // namespace fnx
