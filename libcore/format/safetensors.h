// The safetensors container: 8 bytes of little-endian header length, a JSON header, then the data area.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "libcore/format/tensor_source.h"

namespace fnx {

inline constexpr uint64_t kMaxHeaderBytes = uint64_t{256} << 20;

struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // by offset; TensorInfo::file is 0
  std::string incomplete;           // how far the file is cut short, with the numbers; empty for a whole file
};

// Reads the header of a mapped file and never touches the data area. `name` is what errors call the file. Throws Input
// naming the tensor and the numbers, except that a file which only ends too early is returned with `incomplete` set
// (and without tensors when the header itself is cut).
SafetensorsHeader parse_safetensors(std::span<const std::byte> file, std::string_view name);

// The header's JSON alone, of a file of `file_bytes` bytes whose data area starts at `data_start`.
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> json, uint64_t data_start, uint64_t file_bytes,
                                           std::string_view name);

}  // namespace fnx
