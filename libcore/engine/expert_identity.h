// What counts and traces of routing belong to: one checkpoint, one rank, one geometry.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libcore/format/model_config.h"
#include "libcore/format/tensor_source.h"
#include "libcore/receipt/receipt.h"

namespace fnx {

struct ExpertIdentity {
  std::string checkpoint;  // digest of the checkpoint's fingerprint (libcore/format/fingerprint.h)
  int64_t world = 1, rank = 0;
  int64_t layers = 0, draft_layers = 0;  // draft layers are numbered after the trunk's
  int64_t experts = 0, experts_per_token = 0;

  static ExpertIdentity of(const ModelConfig& config, const std::string& checkpoint);
  int64_t all_layers() const { return layers + draft_layers; }

  void write(Json& header) const;
  // Throws Input naming `file` and the key when one is absent or out of range.
  static ExpertIdentity read(const Json& header, const std::string& file);
  // "experts 512, not 32; rank 1, not 0" of this one against `wanted`; empty when they are equal.
  std::string difference(const ExpertIdentity& wanted) const;
};

// An integer of a sealed header; throws Input naming `file` and the key unless it is there and in low .. high.
int64_t header_integer(const Json& header, const char* key, int64_t low, int64_t high, const std::string& file);

// Bytes of each routed expert's weights, [all layers * experts]: the trellis (or plain) tensors that a copy to a pool
// line moves; scales stay on the device and do not count. 0 for a draft head that the source lacks.
std::vector<uint32_t> expert_copy_bytes(const TensorSource& source, const ModelConfig& config);

}  // namespace fnx
