// What of a checkpoint lies where when its routed experts are offloaded, and the least time that their misses take.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libcore/engine/state.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

// Bytes of the buffers that a StatePool of these options makes, on the device and in pinned host memory.
struct StateBytes {
  uint64_t device = 0, host = 0;
};
StateBytes state_bytes(const ModelConfig& config, const StateOptions& options);
// Of one token's keys and values, in all caches.
uint64_t kv_token_bytes(const ModelConfig& config, const StateOptions& options);

enum class Place : uint8_t { Device, Host, Mapped };  // mapped: read from the file as needed, through the page cache
constexpr const char* place_name(Place p) {
  return p == Place::Device ? "device" : p == Place::Host ? "host" : "mapped";
}

struct PlanTerm {
  std::string name;
  Place place = Place::Device;
  uint64_t bytes = 0;  // as stored; of states as allocated
};

struct PlanInput {
  uint64_t vram_bytes = 0, ram_bytes = 0;
  uint64_t reserve_bytes = 0;  // of the device, for activations, recorded rounds and the driver
  StateOptions state;
  double hit_ratio = 0;         // of the pools, in decoding
  double link_bytes_per_s = 0;  // from host to device
};

struct PoolPlan {
  std::vector<PlanTerm> terms;  // without the pools
  int64_t lines = 0;            // a layer, draft head included; 0 when not even one fits
  uint64_t line_bytes = 0;      // of one line in every layer, each as large as the layer's largest expert
  uint64_t device_bytes = 0, host_bytes = 0, mapped_bytes = 0;  // device: with the pools
  double token_expert_bytes = 0;                                // that a token's experts have in the trunk
  double token_miss_bytes = 0;  // of these the misses: none when every expert has a line
  double token_link_ns = 0;
  // Empty when it fits; else what does not, by how much, and what would shrink the largest term.
  std::string problem;
};

PoolPlan plan_pools(const TensorSource& source, const ModelConfig& config, const PlanInput& input);

}  // namespace fnx
