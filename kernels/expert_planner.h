// Which routed experts of one layer lie in its pool of device lines, and which line the next one takes.
//
// The rule, in integers alone, so that a kernel that follows it makes the same plan bit for bit:
//
//   State    line_of[E] (-1: none), expert_of[L] (-1: empty), count[E], touched[E], clock, since_decay; all 0 or -1.
//   Key      of a resident expert: (count, touched) under lfu-decay, (0, touched) under lru.
//   Victim   the empty line of the lowest number; without one, the line that holds no protected expert and whose
//            (key, line number) is the smallest.
//   Request  the distinct experts of a forward's rows, in order of first appearance (rows in order, slots in order).
//            1. while since_decay >= decay_touches: every count is halved (rounded down), since_decay -= decay_touches.
//            2. each expert in order: count += 256, touched = ++clock, ++since_decay.
//            3. the request's resident experts are hits, the others, in order, misses.
//   Waves    the first wave serves every hit; each wave takes misses in order until it serves L experts or none is
//            left. A wave's experts are protected while it is planned, so a miss fills the victim line and no line
//            twice. The next wave protects none of the earlier ones' experts: their slots are already computed.
//
// A request of at most L experts is one wave; a pool of any size from one line up serves every request, and each miss
// is filled exactly once. Nothing here waits: a line may be filled only after the event of its last reader.
//
// Waves are how a host serves a request while lines change hands. A device plans the whole request, all waves, and then
// carries it out at once: an expert that has a line now and had none, or another, before is copied; what was chosen and
// has no line at the end is read where the bank keeps it. The state is the same; a miss that a later wave drove out is
// never copied.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "kernels/pool_state.h"

namespace fnx {

enum class PoolPolicy : uint8_t { Lru, LfuDecay };
inline constexpr std::array kPoolPolicies = {PoolPolicy::Lru, PoolPolicy::LfuDecay};
constexpr std::string_view pool_policy_name(PoolPolicy p) { return p == PoolPolicy::Lru ? "lru" : "lfu-decay"; }

// Why an expert was copied; every copy is of exactly one kind.
enum class FillKind : uint8_t { Demand, InitialPrefetch, LayerPrefetch, WarmStart };
inline constexpr int kFillKinds = 4;
constexpr std::string_view fill_kind_name(FillKind k) {
  constexpr std::array<std::string_view, kFillKinds> names = {"demand", "initial_prefetch", "cross_layer_prefetch",
                                                              "warm_start"};
  return names[static_cast<size_t>(k)];
}

// Short memories fit text best (README, "Which experts does my text use?").
constexpr uint32_t default_decay_touches(int32_t experts) { return 4 * static_cast<uint32_t>(experts); }

struct PoolOptions {
  int32_t experts = 0;  // of the layer
  int32_t lines = 0;    // 1 to experts
  PoolPolicy policy = PoolPolicy::LfuDecay;
  uint32_t decay_touches = default_decay_touches(experts);  // of this layer between two halvings, 1 to 2^20
};

struct Placement {
  int32_t line = 0, expert = 0;
  bool operator==(const Placement&) const = default;
};

struct Wave {
  std::vector<Placement> fills;   // copies to make, in order
  std::vector<Placement> serves;  // hits in request order, then the fills
  bool operator==(const Wave&) const = default;
};

struct PoolCounters {
  uint64_t requests = 0, waves = 0, touches = 0, hits = 0, misses = 0;
  uint64_t fills = 0, evictions = 0, resident = 0;  // lines that were filled, emptied or filled over, and hold now
  std::array<uint64_t, kFillKinds> fills_by_kind{};

  PoolCounters& operator+=(const PoolCounters& other);
  // Throws Internal with the numbers unless touches = hits + misses, demand fills = misses, the kinds sum to `fills`
  // and fills - evictions = resident.
  void check() const;
};

// The distinct ids of `ids`, in order of first appearance; throws Internal for an id outside 0 .. experts - 1.
std::vector<int32_t> distinct_experts(std::span<const int32_t> ids, int32_t experts);

class ExpertPlanner {
 public:
  // Throws Usage naming what is out of range.
  explicit ExpertPlanner(const PoolOptions& options);

  // Plans a request of distinct experts. Throws Internal for an expert that is out of range or named twice.
  std::vector<Wave> plan(std::span<const int32_t> request);
  // What a request does to the keys (rules 1 and 2), when its experts are brought by other means.
  void touch(std::span<const int32_t> request);
  // Fills of those of `experts` that are not resident, in order, while a line remains that holds none of them. Keys do
  // not change: only a request touches.
  std::vector<Placement> prefetch(std::span<const int32_t> experts, FillKind kind);
  // Of an empty pool: adds `heat` [E] to the counts, scaled so that its sum weighs like decay_touches touches (rounded
  // down, a count at most 2^30), and fills the lines with the experts of the largest counts above 0 (ties: touched
  // last, then the lower id), hottest first. The hottest takes the highest line, so that under lru, where none was
  // touched, the coldest goes first.
  std::vector<Placement> warm_start(std::span<const uint64_t> heat);
  // Empties every line, for instance after its memory was used for something else. Keys stay.
  void clear();
  // Empties every line and forgets the keys. Counters stay.
  void reset();

  // Everything above to a state of as many experts and lines, and back. Heat, copies and what is counted of plans on a
  // device are no part of it.
  void store(const PoolState& to) const;
  void load(const PoolState& from);

  int32_t line_of(int32_t expert) const { return line_of_[expert]; }   // -1: not resident
  int32_t expert_of(int32_t line) const { return expert_of_[line]; }   // -1: empty
  bool touched(int32_t expert) const { return touched_[expert] > 0; }  // ever
  const PoolOptions& options() const { return options_; }
  const PoolCounters& counters() const { return counters_; }

 private:
  bool less(int32_t a, int32_t b) const;  // by key; a and b are experts
  void fill(int32_t line, int32_t expert, FillKind kind);
  int32_t victim() const;  // -1: every line is protected
  void protect(int32_t expert) { protected_[expert] = round_; }

  PoolOptions options_;
  std::vector<int32_t> line_of_, expert_of_;
  std::vector<uint32_t> count_;
  std::vector<uint64_t> touched_;
  uint64_t clock_ = 0, since_decay_ = 0;
  std::vector<uint64_t> protected_;  // by expert: in the round of that number
  uint64_t round_ = 0;
  PoolCounters counters_;
};

}  // namespace fnx
