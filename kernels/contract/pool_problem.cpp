#include "kernels/contract/pool_problem.h"

#include <algorithm>
#include <cstring>

#include "kernels/contract/entry.h"

namespace fnx::contract {

PoolState state_of(Problem& p) {
  return PoolState::at(p["state"].data(), p.number("experts"), p.number("lines"), p.number("all"));
}

PoolOptions options_of(const Problem& p) {
  return {static_cast<int32_t>(p.number("experts")), static_cast<int32_t>(p.number("lines")),
          p.number("counts") != 0 ? PoolPolicy::LfuDecay : PoolPolicy::Lru, static_cast<uint32_t>(p.number("decay"))};
}

int64_t place_of(const Problem& p, int64_t e) {
  const auto* ids = p["foreseen"].as<int32_t>();
  const int64_t count = p["foreseen"].size(), place = std::find(ids, ids + count, e + p.number("first")) - ids;
  return place < count ? place : -1;
}

StageOrder order_of(const Problem& p) {
  StageOrder order;
  std::memcpy(&order, p["order"].data(), sizeof order);
  return order;
}
int64_t staged_at(const Problem& p, int64_t e) {
  if (const int64_t place = place_of(p, e); place >= 0) return place;
  const StageOrder order = order_of(p);
  const int32_t* end = order.experts + order.count;
  const int64_t other = std::find(order.experts, end, static_cast<int32_t>(e)) - order.experts;
  return other < order.count ? PoolStage::kForeseen + other : -1;
}
void add_words(Problem& p, const char* name, Role role, int64_t words) {
  std::fill_n(p.add(name, DType::I32, role, false, {words}).as<int32_t>(), words, 0);
}

Shape pool_shape(int64_t experts, int64_t lines, bool counts, int64_t decay, int64_t first, int64_t bytes) {
  return {std::to_string(lines) + " lines of " + std::to_string(experts) + " experts" + (counts ? "" : ", lru"),
          {{"experts", experts},
           {"lines", lines},
           {"all", experts + first + 1},
           {"first", first},
           {"counts", counts},
           {"decay", decay},
           {"k", 4},
           {"columns", 5},
           {"bytes", bytes}}};
}

void add_state(Problem& p, Kind kind, Random& random) {
  const PoolOptions o = options_of(p);
  const PoolState offsets = PoolState::at(nullptr, o.experts, o.lines, p.number("all"));
  const auto words = static_cast<int64_t>(reinterpret_cast<uintptr_t>(offsets.expert_of + o.lines) / 4);
  p.add("state", DType::I32, Role::InOut, false, {words});
  ExpertPlanner planner(o);
  const int64_t requests = kind == Kind::Normal ? o.lines : static_cast<int64_t>(kind) * 3;
  for (int64_t r = 0; r < requests; ++r) {
    std::vector<int32_t> ids;
    for (int i = 0; i < 5; ++i) ids.push_back(static_cast<int32_t>(random.below(o.experts)));
    planner.plan(distinct_experts(ids, o.experts));
  }
  planner.store(state_of(p));
}

void add_foreseen(Problem& p, Kind kind, Random& random, int64_t count) {
  auto* ids = p.add("foreseen", DType::I32, Role::In, false, {count}).as<int32_t>();
  for (int64_t i = 0; i < count; ++i)
    ids[i] = static_cast<int32_t>(p.number("first") + random.below(p.number("experts")));
  ids[1] = static_cast<int32_t>(p.number("all")) + 3, ids[4] = ids[2];
  if (kind == Kind::Extremes) std::fill_n(ids, count, ids[1]);
}
uint32_t guessed_draws(const Problem& p, Kind kind, Random& random) {
  const int64_t all = PoolStage::kForeseen * pieces(p);
  if (kind == Kind::Exponents) return 0;
  return static_cast<uint32_t>(kind == Kind::NonFinite ? all + cuda::kForeseenWarps : random.below(all));
}
Expectation words_as(const Problem& given, const Problem& wanted, const char* name) {
  return expect_elements(given[name], [&](int64_t i) { return Bounded{wanted[name].at(i), 0}; });
}

#ifdef FNX_HAS_CUDA
PoolState device_state(const Problem& p, DeviceProblem& d) {
  return PoolState::at(d.get<std::byte>("state"), p.number("experts"), p.number("lines"), p.number("all"));
}
const cuda::PooledExpert* homes(const Problem& p, DeviceProblem& d, const std::byte* bank) {
  std::vector<cuda::PooledExpert> list;
  for (int64_t e = 0; e < p.number("experts"); ++e)
    list.push_back({bank + e * p.number("bytes"), kUp, kDown, expert_bytes(p, e)});
  return static_cast<const cuda::PooledExpert*>(
      d.constant("homes", list.data(), list.size() * sizeof(cuda::PooledExpert)));
}
#endif

}  // namespace fnx::contract
