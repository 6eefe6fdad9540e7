// model.safetensors.index.json: which shard holds which tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

namespace fnx {

struct CheckpointIndex {
  std::vector<std::string> shards;                       // file names, in order of first mention
  std::unordered_map<std::string, uint32_t> weight_map;  // tensor name to a number in `shards`
};

// `name` is what errors call the file. Throws Input on malformed JSON, duplicate keys and shards outside the folder.
CheckpointIndex parse_checkpoint_index(std::span<const std::byte> text, std::string_view name);

}  // namespace fnx
