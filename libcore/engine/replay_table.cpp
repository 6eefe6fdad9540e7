#include "libcore/engine/replay_table.h"

#include <fmt/format.h>

#include <algorithm>
#include <set>

#include "kernels/error.h"

namespace fnx {

void ReplayTable::add(Split& split, const RoutingTrace& t, const std::string& name) {
  if (!identity_) identity_ = t.identity;
  if (const std::string d = t.identity.difference(*identity_); !d.empty())
    throw Error(ErrorKind::Input, fmt::format("{}: of another model than the first trace: {}", name, d));
  if (std::find(digests_.begin(), digests_.end(), t.digest) != digests_.end())
    throw Error(ErrorKind::Input, fmt::format("{}: given twice; a trace is reported on or trained on, once", name));
  digests_.push_back(t.digest);
  for (LayerStream& s : layer_streams(t)) split.streams.push_back(std::move(s));
  for (const RoutingTrace::Forward& f : t.forwards) split.decode_rows += f.rows == 1 ? 1 : 0;
}

void ReplayTable::add_test(const RoutingTrace& trace, const std::string& name) { add(test_, trace, name); }

void ReplayTable::add_train(const RoutingTrace& t, const std::string& name) {
  add(train_, t, name);
  if (!profile_) profile_.emplace(*identity_);
  for (int64_t l = 0; l < t.identity.all_layers(); ++l)
    for (const RoutingTrace::Forward& f : t.forwards) profile_->count(l, t.layer(f, l));
}

void ReplayTable::set_profile(const ExpertProfile& profile, const std::string& name) {
  if (const std::string d = identity_ ? profile.identity.difference(*identity_) : ""; !d.empty())
    throw Error(ErrorKind::Input, fmt::format("{}: of another model than the traces: {}", name, d));
  profile_ = profile;
}

void ReplayTable::run_start(const Split& split, int32_t size, const ExpertProfile* profile, Json& rows) {
  const ReplayTotals best = replay_best(split.streams, size, profile);
  const auto ratio = [](const Misses& m) { return m.touches == 0 ? Json() : Json(m.hit_ratio()); };
  for (const PoolPolicy policy : kPoolPolicies)
    for (const int64_t decay : policy == PoolPolicy::Lru ? std::vector<int64_t>{0} : decay_touches) {
      if (stopping && stopping()) return;
      const auto touches = static_cast<uint32_t>(policy == PoolPolicy::Lru ? 1 : std::min<int64_t>(decay, UINT32_MAX));
      const ReplayTotals t = replay_policy(split.streams, size, policy, touches, profile);
      counters_ += t.counters;
      Json row{{"split", split.name},
               {"lines", size},
               {"start", profile != nullptr ? "warm" : "cold"},
               {"policy", pool_policy_name(policy)},
               {"decay_touches", policy == PoolPolicy::Lru ? Json() : Json(decay)},
               {"hit_ratio", ratio(t.all)},
               {"best_hit_ratio", ratio(best.all)},
               {"decode_hit_ratio", ratio(t.decode)},
               {"best_decode_hit_ratio", ratio(best.decode)},
               {"miss_bytes", t.all.bytes},
               {"decode_row_bytes", Json()},
               {"warm_bytes", t.warm_bytes}};
      if (split.decode_rows > 0)
        row["decode_row_bytes"] = static_cast<double>(t.decode.bytes) / static_cast<double>(split.decode_rows);
      rows.push_back(std::move(row));
    }
}

Json ReplayTable::run() {
  const auto experts = static_cast<int32_t>(identity_->experts),
             top = static_cast<int32_t>(identity_->experts_per_token);
  std::set<int64_t> sizes(lines.begin(), lines.end());
  if (lines.empty())
    for (const int64_t n : {1, 2, top, top + 1, experts / 8, experts / 4, experts / 2, experts})
      if (n >= 1 && n <= experts) sizes.insert(n);
  if (decay_touches.empty()) decay_touches = {default_decay_touches(experts)};
  Json rows = Json::array();
  for (const Split* split : {&test_, &train_})
    for (const int64_t size : split->streams.empty() ? std::set<int64_t>{} : sizes) {
      const auto fits =
          static_cast<int32_t>(std::clamp<int64_t>(size, 0, experts + 1));  // the planner refuses the rest
      run_start(*split, fits, nullptr, rows);
      if (profile_) run_start(*split, fits, &*profile_, rows);
    }
  return rows;
}

}  // namespace fnx
