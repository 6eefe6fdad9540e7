#include "libcore/engine/expert_replay.h"

#include <algorithm>
#include <limits>

namespace fnx {

namespace {

void count(ReplayTotals& to, const LayerStream& stream, const LayerStream::Request& request,
           std::span<const int32_t> missed) {
  const auto add = [&](Misses& m) {
    m.touches += request.experts.size();
    m.misses += missed.size();
    for (const int32_t e : missed) m.bytes += stream.copy_bytes[e];
  };
  add(to.all);
  if (request.decode) add(to.decode);
}

PoolOptions pool_options(const LayerStream& stream, int32_t lines, PoolPolicy policy, uint32_t decay_touches) {
  return {static_cast<int32_t>(stream.copy_bytes.size()), lines, policy, decay_touches};
}

// For each expert the requests that name it, ascending.
std::vector<std::vector<size_t>> uses_of(const LayerStream& stream) {
  std::vector<std::vector<size_t>> uses(stream.copy_bytes.size());
  for (size_t r = 0; r < stream.requests.size(); ++r)
    for (const int32_t e : stream.requests[r].experts) uses[e].push_back(r);
  return uses;
}

}  // namespace

std::vector<LayerStream> layer_streams(const RoutingTrace& trace) {
  std::vector<LayerStream> out;
  for (int64_t l = 0; l < trace.identity.all_layers(); ++l) {
    LayerStream s;
    s.layer = l;
    s.copy_bytes.assign(trace.layer_bytes(l).begin(), trace.layer_bytes(l).end());
    for (const RoutingTrace::Forward& f : trace.forwards) {
      const std::vector<int32_t> ids = trace.layer(f, l);
      if (!ids.empty())
        s.requests.push_back({distinct_experts(ids, static_cast<int32_t>(trace.identity.experts)), f.rows == 1});
    }
    if (!s.requests.empty()) out.push_back(std::move(s));
  }
  return out;
}

ReplayTotals replay_policy(std::span<const LayerStream> streams, int32_t lines, PoolPolicy policy,
                           uint32_t decay_touches, const ExpertProfile* profile) {
  ReplayTotals out;
  std::vector<int32_t> missed;
  for (const LayerStream& s : streams) {
    ExpertPlanner pool(pool_options(s, lines, policy, decay_touches));
    if (profile != nullptr)
      for (const Placement& p : pool.warm_start(profile->layer(s.layer))) out.warm_bytes += s.copy_bytes[p.expert];
    for (const LayerStream::Request& r : s.requests) {
      missed.clear();
      for (const Wave& w : pool.plan(r.experts))
        for (const Placement& p : w.fills) missed.push_back(p.expert);
      count(out, s, r, missed);
    }
    pool.counters().check();
    out.counters += pool.counters();
  }
  out.counters.check();
  return out;
}

ReplayTotals replay_best(std::span<const LayerStream> streams, int32_t lines, const ExpertProfile* profile) {
  constexpr size_t kNever = std::numeric_limits<size_t>::max();
  ReplayTotals out;
  for (const LayerStream& s : streams) {
    const std::vector<std::vector<size_t>> uses = uses_of(s);
    std::vector<size_t> passed(uses.size(), 0);  // uses at or before the current request
    const auto next_use = [&](int32_t e) { return passed[e] < uses[e].size() ? uses[e][passed[e]] : kNever; };
    std::vector<int32_t> resident;
    if (profile != nullptr) {
      ExpertPlanner pool(pool_options(s, lines, PoolPolicy::LfuDecay,
                                      default_decay_touches(static_cast<int32_t>(s.copy_bytes.size()))));
      for (const Placement& p : pool.warm_start(profile->layer(s.layer))) {
        resident.push_back(p.expert);
        out.warm_bytes += s.copy_bytes[p.expert];
      }
    }
    for (const LayerStream::Request& r : s.requests) {
      std::vector<int32_t> missed;
      for (const int32_t e : r.experts) {
        ++passed[e];
        if (std::find(resident.begin(), resident.end(), e) == resident.end()) missed.push_back(e);
      }
      resident.insert(resident.end(), missed.begin(), missed.end());
      std::stable_sort(resident.begin(), resident.end(),
                       [&](int32_t a, int32_t b) { return next_use(a) < next_use(b); });
      resident.resize(std::min(resident.size(), static_cast<size_t>(lines)));
      count(out, s, r, missed);
    }
  }
  return out;
}

}  // namespace fnx
