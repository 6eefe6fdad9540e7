#include "tests/fuzz/format_target.h"

#include <cstdio>
#include <cstdlib>
#include <set>

#include "kernels/error.h"
#include "libcore/format/checkpoint_index.h"
#include "libcore/format/json_text.h"
#include "libcore/format/model_config.h"
#include "libcore/format/safetensors.h"

namespace fnx::fuzz {
namespace {

void promise(bool kept, const char* what) {
  if (kept) return;
  std::fprintf(stderr, "broken promise: %s\n", what);
  std::abort();
}

void check_header(const SafetensorsHeader& header, uint64_t file_bytes) {
  std::set<std::string> names;
  uint64_t end = 0;
  for (const TensorInfo& t : header.tensors) {
    promise(names.insert(t.name).second, "names are unique");
    promise(t.offset + t.bytes >= t.offset, "ends do not wrap");
    promise(t.bytes == 0 || t.offset >= end, "tensors do not overlap");
    if (t.bytes > 0) end = t.offset + t.bytes;
    promise(!header.incomplete.empty() || t.offset + t.bytes <= file_bytes, "tensors lie in a whole file");
    const int64_t elements = t.elements();
    promise(elements >= 0, "element counts do not overflow");
    if (t.dtype)
      promise(static_cast<uint64_t>(elements) * dtype_size(*t.dtype) == t.bytes, "bytes fit dtype and shape");
  }
}

void check_config(const ModelConfig& c) {
  promise(c.problems().empty(), "an accepted config has no problems");
  promise(c.layers() > 0 && c.rotary_dim > 0, "sizes are positive");
  // Derived sizes: the sanitizer sees any overflow.
  promise(c.gdn_conv_width() >= 0 && c.index_blocks() >= 0 && c.ngram_dim() >= 0, "derived sizes are sound");
  promise(c.experts * (c.expert_size * c.hidden_size) > 0, "matrix sizes are sound");
  promise(c.gdn_value_heads * c.gdn_value_dim * c.gdn_key_dim >= 0, "state sizes are sound");
}

}  // namespace

std::string run_format_input(const uint8_t* data, size_t size) {
  if (size == 0) return "empty";
  const auto reader = static_cast<Reader>(data[0] % static_cast<int>(Reader::kCount));
  const auto bytes = std::as_bytes(std::span(data + 1, size - 1));
  try {
    switch (reader) {
      case Reader::File:
        check_header(parse_safetensors(bytes, "f"), bytes.size());
        break;
      case Reader::Header: {
        const uint64_t file_bytes = uint64_t{1} << (data[0] / 4);
        check_header(parse_safetensors_header(bytes, 8 + bytes.size(), file_bytes, "f"), file_bytes);
        break;
      }
      case Reader::Index: {
        const CheckpointIndex index = parse_checkpoint_index(bytes, "f");
        for (const auto& [name, shard] : index.weight_map) promise(shard < index.shards.size(), "shard numbers exist");
        for (const auto& shard : index.shards)
          promise(shard.find('/') == std::string::npos, "shards lie in the folder");
        break;
      }
      default: {
        const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
        check_config(ModelConfig::parse(parse_json(text, "f")));
      }
    }
  } catch (const Error& e) {
    promise(e.kind() == ErrorKind::Input, "a bad file is an Input error");
    return e.what();
  }
  return "accepted";
}

}  // namespace fnx::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fnx::fuzz::run_format_input(data, size);
  return 0;
}
