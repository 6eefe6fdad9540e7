#include "kernels/expert_planner.h"

#include <algorithm>
#include <numeric>
#include <string>
#include <tuple>

#include "kernels/error.h"

namespace fnx {

namespace {

constexpr uint32_t kTouchWeight = 256;  // so that a touch lasts eight halvings
constexpr uint32_t kMostDecayTouches = 1u << 20;
constexpr uint32_t kMostWarmCount = 1u << 30;  // leaves room for every touch until counts are halved

[[noreturn]] void bug(const std::string& what) { throw Error(ErrorKind::Internal, "expert pool: " + what); }

}  // namespace

PoolCounters& PoolCounters::operator+=(const PoolCounters& o) {
  requests += o.requests, waves += o.waves, touches += o.touches, hits += o.hits, misses += o.misses;
  fills += o.fills, evictions += o.evictions, resident += o.resident;
  for (size_t k = 0; k < fills_by_kind.size(); ++k) fills_by_kind[k] += o.fills_by_kind[k];
  return *this;
}

void PoolCounters::check() const {
  const uint64_t demand = fills_by_kind[static_cast<size_t>(FillKind::Demand)];
  const uint64_t sum = std::accumulate(fills_by_kind.begin(), fills_by_kind.end(), uint64_t{0});
  if (touches != hits + misses)
    bug(std::to_string(touches) + " touches are not " + std::to_string(hits) + " hits and " + std::to_string(misses) +
        " misses");
  if (demand != misses) bug(std::to_string(demand) + " demand fills for " + std::to_string(misses) + " misses");
  if (sum != fills) bug(std::to_string(fills) + " fills, their kinds sum to " + std::to_string(sum));
  if (fills != evictions + resident)
    bug(std::to_string(fills) + " fills are not " + std::to_string(evictions) + " evictions and " +
        std::to_string(resident) + " resident experts");
}

std::vector<int32_t> distinct_experts(std::span<const int32_t> ids, int32_t experts) {
  std::vector<int32_t> out;
  std::vector<char> seen(static_cast<size_t>(experts), 0);
  for (const int32_t id : ids) {
    if (id < 0 || id >= experts) bug("expert " + std::to_string(id) + " of " + std::to_string(experts));
    if (!seen[id]) out.push_back(id);
    seen[id] = 1;
  }
  return out;
}

ExpertPlanner::ExpertPlanner(const PoolOptions& options) : options_(options) {
  const auto refuse = [](const std::string& what) { throw Error(ErrorKind::Usage, what); };
  if (options.experts < 1) refuse("an expert pool of a layer with " + std::to_string(options.experts) + " experts");
  if (options.lines < 1 || options.lines > options.experts)
    refuse(std::to_string(options.lines) + " expert lines a layer: give 1 to " + std::to_string(options.experts) +
           ", the layer's experts");
  if (options.decay_touches < 1 || options.decay_touches > kMostDecayTouches)
    refuse(std::to_string(options.decay_touches) + " touches between two decays: give 1 to " +
           std::to_string(kMostDecayTouches));
  const auto experts = static_cast<size_t>(options.experts);
  line_of_.assign(experts, -1);
  expert_of_.assign(static_cast<size_t>(options.lines), -1);
  count_.assign(experts, 0);
  touched_.assign(experts, 0);
  protected_.assign(experts, 0);
}

bool ExpertPlanner::less(int32_t a, int32_t b) const {
  const bool counts = options_.policy == PoolPolicy::LfuDecay;
  return std::tuple(counts ? count_[a] : 0, touched_[a]) < std::tuple(counts ? count_[b] : 0, touched_[b]);
}

int32_t ExpertPlanner::victim() const {
  int32_t best = -1;
  for (int32_t line = 0; line < options_.lines; ++line) {
    const int32_t e = expert_of_[line];
    if (e < 0) return line;
    if (protected_[e] != round_ && (best < 0 || less(e, expert_of_[best]))) best = line;
  }
  return best;
}

void ExpertPlanner::fill(int32_t line, int32_t expert, FillKind kind) {
  int32_t& held = expert_of_[line];
  if (held >= 0) {
    line_of_[held] = -1;
    ++counters_.evictions;
    --counters_.resident;
  }
  held = expert;
  line_of_[expert] = line;
  ++counters_.fills;
  ++counters_.resident;
  ++counters_.fills_by_kind[static_cast<size_t>(kind)];
}

void ExpertPlanner::touch(std::span<const int32_t> request) {
  for (; since_decay_ >= options_.decay_touches; since_decay_ -= options_.decay_touches)
    for (uint32_t& c : count_) c /= 2;
  for (const int32_t e : request) {
    count_[e] += kTouchWeight;
    touched_[e] = ++clock_;
    ++since_decay_;
  }
}

std::vector<Wave> ExpertPlanner::plan(std::span<const int32_t> request) {
  ++round_;
  for (const int32_t e : request) {
    if (e < 0 || e >= options_.experts) bug("expert " + std::to_string(e) + " of " + std::to_string(options_.experts));
    if (protected_[e] == round_) bug("a request names expert " + std::to_string(e) + " twice");
    protect(e);
  }
  touch(request);

  std::vector<Wave> waves;
  std::vector<int32_t> misses;
  Wave wave;
  ++round_;
  for (const int32_t e : request)
    if (line_of_[e] >= 0) {
      wave.serves.push_back({line_of_[e], e});
      protect(e);
    } else {
      misses.push_back(e);
    }
  const size_t hits = wave.serves.size();
  for (size_t next = 0; next < misses.size() || !wave.serves.empty(); ++round_) {
    for (; next < misses.size() && wave.serves.size() < static_cast<size_t>(options_.lines); ++next) {
      const Placement p{victim(), misses[next]};
      fill(p.line, p.expert, FillKind::Demand);
      protect(p.expert);
      wave.fills.push_back(p);
      wave.serves.push_back(p);
    }
    waves.push_back(std::move(wave));
    wave = {};
  }
  ++counters_.requests;
  counters_.waves += waves.size();
  counters_.touches += request.size();
  counters_.hits += hits;
  counters_.misses += misses.size();
  return waves;
}

std::vector<Placement> ExpertPlanner::prefetch(std::span<const int32_t> experts, FillKind kind) {
  ++round_;
  for (const int32_t e : experts) {
    if (e < 0 || e >= options_.experts) bug("expert " + std::to_string(e) + " of " + std::to_string(options_.experts));
    protect(e);
  }
  std::vector<Placement> fills;
  for (const int32_t e : experts) {
    if (line_of_[e] >= 0) continue;
    const int32_t line = victim();
    if (line < 0) break;
    fill(line, e, kind);
    fills.push_back({line, e});
  }
  return fills;
}

std::vector<Placement> ExpertPlanner::warm_start(std::span<const uint64_t> heat) {
  if (static_cast<int64_t>(heat.size()) != options_.experts)
    bug("heat of " + std::to_string(heat.size()) + " experts for a layer of " + std::to_string(options_.experts));
  if (counters_.resident != 0) bug("a warm start over " + std::to_string(counters_.resident) + " resident experts");
  unsigned __int128 sum = 0;
  for (const uint64_t h : heat) sum += h;
  const uint64_t window = uint64_t{options_.decay_touches} * kTouchWeight;
  for (size_t e = 0; e < heat.size() && sum > 0; ++e) {
    const auto share = static_cast<uint32_t>(static_cast<unsigned __int128>(heat[e]) * window / sum);
    count_[e] = std::min(count_[e] + share, kMostWarmCount);
  }

  std::vector<int32_t> order;
  for (int32_t e = 0; e < options_.experts; ++e)
    if (count_[e] > 0) order.push_back(e);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return std::tuple(count_[a], touched_[a]) > std::tuple(count_[b], touched_[b]);
  });
  order.resize(std::min(order.size(), static_cast<size_t>(options_.lines)));
  std::vector<Placement> fills;
  int32_t line = options_.lines;
  for (const int32_t e : order) {
    fill(--line, e, FillKind::WarmStart);
    fills.push_back({line, e});
  }
  return fills;
}

void ExpertPlanner::reset() {
  clear();
  std::fill(count_.begin(), count_.end(), 0);
  std::fill(touched_.begin(), touched_.end(), 0);
  clock_ = since_decay_ = 0;
}

void ExpertPlanner::store(const PoolState& to) const {
  const PoolCounters& c = counters_;
  PoolWords& w = *to.words;
  w.clock = clock_, w.since_decay = since_decay_;
  w.requests = c.requests, w.waves = c.waves, w.touches = c.touches, w.hits = c.hits, w.misses = c.misses;
  w.fills = c.fills, w.evictions = c.evictions, w.resident = c.resident;
  std::copy(c.fills_by_kind.begin(), c.fills_by_kind.end(), w.fills_by_kind);
  std::copy(count_.begin(), count_.end(), to.count);
  std::copy(touched_.begin(), touched_.end(), to.touched);
  std::copy(line_of_.begin(), line_of_.end(), to.line_of);
  std::copy(expert_of_.begin(), expert_of_.end(), to.expert_of);
}

void ExpertPlanner::load(const PoolState& from) {
  const PoolWords& w = *from.words;
  clock_ = w.clock, since_decay_ = w.since_decay;
  PoolCounters& c = counters_;
  c.requests = w.requests, c.waves = w.waves, c.touches = w.touches, c.hits = w.hits, c.misses = w.misses;
  c.fills = w.fills, c.evictions = w.evictions, c.resident = w.resident;
  std::copy_n(w.fills_by_kind, kFillKinds, c.fills_by_kind.begin());
  std::copy_n(from.count, count_.size(), count_.begin());
  std::copy_n(from.touched, touched_.size(), touched_.begin());
  std::copy_n(from.line_of, line_of_.size(), line_of_.begin());
  std::copy_n(from.expert_of, expert_of_.size(), expert_of_.begin());
}

void ExpertPlanner::clear() {
  for (int32_t& e : expert_of_) {
    if (e < 0) continue;
    line_of_[e] = -1;
    e = -1;
    ++counters_.evictions;
    --counters_.resident;
  }
}

}  // namespace fnx
