// What a run will need of device memory, from headers alone.
#pragma once

#include <cstdint>
#include <string>

#include "libcore/engine/engine.h"

namespace fnx {

struct MemoryPlan {
  uint64_t weights = 0;     // linears, expert banks or their scales, norms, embedding
  uint64_t pools = 0;       // lines of offloaded experts
  uint64_t states = 0;      // recurrent states, keys and values
  uint64_t scratch = 0;     // activations, inputs and logits of the largest forward
  uint64_t workspaces = 0;  // of the operations of that forward
  uint64_t exchange = 0;    // what ranks talk through
  uint64_t limit = 0;       // 0: unknown
  uint64_t host = 0;        // pinned, of offloaded experts: no part of the total
  uint64_t host_pages = 0;  // likewise, of keys and values
  int64_t lines = 0;        // a layer

  uint64_t total() const { return weights + pools + states + scratch + workspaces + exchange; }
};

// Loads and sets up as a run does, on a cuda backend that counts and allocates nothing; graphs come on top, they are
// measured when they are recorded. Weights are not read. `exchange` is what the communicator was measured to hold.
// Throws what loading would.
MemoryPlan plan_memory(const TensorSource& source, const ModelConfig& config, const LoadOptions& load,
                       const EngineOptions& engine, uint64_t limit, uint64_t exchange = 0);

// Of the device, for the driver's context, the kernels' code and recorded rounds, which a plan of lines leaves free.
inline constexpr uint64_t kPlanReserve = uint64_t{3} << 29;

// The plan with the most expert lines a layer that leave kPlanReserve of the limit free: with none, every expert on the
// device, when that fits or the limit is unknown. One line a layer when not even that fits.
MemoryPlan plan_lines(const TensorSource& source, const ModelConfig& config, const LoadOptions& load,
                      const EngineOptions& engine, uint64_t limit, uint64_t exchange = 0);

// One line a term, in GiB, with the limit.
std::string plan_text(const MemoryPlan& plan);
// Throws Unsupported, naming the largest term and the option that shrinks it, when the plan exceeds its limit.
void require_fit(const MemoryPlan& plan);

}  // namespace fnx
