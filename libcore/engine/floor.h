// The least time that a decode round can take: what it must read and decode, over what the device can.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "libcore/format/model_config.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

// One operation of a round.
struct CostTerm {
  std::string name;   // of the layer's family, without "layers.*." and what stands before it
  double bytes = 0;   // of weights and state, each read (and state also written) once
  double values = 0;  // trellis values decoded
};

// Of a device; in units a nanosecond, which are GB/s and 1e9 values/s.
struct Ceilings {
  double read = 0, decode = 0;
};

// The operations of the trunk and the head for one row of each of `sequences`, of `context` tokens each. Weights are
// read and decoded once for all rows; of the routed experts as many as rows are expected to choose when all are equally
// popular. Keys and values count as BF16. Throws Input as describe_linear does.
std::vector<CostTerm> decode_cost(const TensorSource& source, const ModelConfig& config, int64_t sequences,
                                  int64_t context);

// Sum over operations of the larger of bytes over read and values over decode, in nanoseconds.
double floor_ns(std::span<const CostTerm> terms, const Ceilings& ceilings);

// From a receipt of fnx-kernel-bench: its read ceiling and the fastest of its decode ceilings. Throws Input.
Ceilings load_ceilings(const std::filesystem::path& receipt);

}  // namespace fnx
