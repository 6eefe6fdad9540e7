// Recorded routing through a pool policy, and through the best that any policy could do.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/expert_planner.h"
#include "libcore/engine/expert_profile.h"
#include "libcore/engine/expert_trace.h"

namespace fnx {

// What one layer's pool was asked for in one trace.
struct LayerStream {
  struct Request {
    std::vector<int32_t> experts;  // distinct, in order of first appearance
    bool decode = false;           // of a forward of one row
  };
  int64_t layer = 0;
  std::vector<Request> requests;     // forwards without rows for this layer have none
  std::vector<uint32_t> copy_bytes;  // [experts]
};
std::vector<LayerStream> layer_streams(const RoutingTrace& trace);

struct Misses {
  uint64_t touches = 0, misses = 0, bytes = 0;  // bytes: of the misses
  double hit_ratio() const { return touches == 0 ? 0 : 1 - static_cast<double>(misses) / static_cast<double>(touches); }
};

struct ReplayTotals {
  Misses all, decode;       // decode: the requests of one-row forwards among them
  uint64_t warm_bytes = 0;  // copied before the first request
  PoolCounters counters;    // summed over pools; checked
};

// Each stream through a pool of its own that starts empty or, with a profile, warm.
ReplayTotals replay_policy(std::span<const LayerStream> streams, int32_t lines, PoolPolicy policy,
                           uint32_t decay_touches, const ExpertProfile* profile);

// The fewest misses of any policy from the same start (Belady): after each request the `lines` experts whose next use
// is nearest stay, of those that were there and those that it brought. A bound rather than a policy, because a pool
// must hold what it filled last.
ReplayTotals replay_best(std::span<const LayerStream> streams, int32_t lines, const ExpertProfile* profile);

}  // namespace fnx
