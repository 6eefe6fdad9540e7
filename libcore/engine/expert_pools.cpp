#include "libcore/engine/expert_pools.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "kernels/error.h"

namespace fnx {

namespace {

PoolOptions planner_options(const ExpertBank& bank, const ExpertPoolsOptions& o) {
  PoolOptions p;
  p.experts = static_cast<int32_t>(bank.pooled);
  p.lines = static_cast<int32_t>(std::min<int64_t>(o.lines, INT32_MAX));
  p.policy = o.policy;
  p.decay_touches = default_decay_touches(p.experts);
  return p;
}

}  // namespace

ExpertPools::ExpertPools(Backend& backend, std::vector<ExpertBank*> banks, const ExpertPoolsOptions& options)
    : backend_(backend),
      options_(options),
      copies_stream_(backend.make_stream()),
      ahead_stream_(backend.make_stream()),
      other_ahead_stream_(backend.make_stream()),
      timeline_(backend),
      stage_filled_(backend.make_event()),
      computed_(backend.make_event()),
      settled_(backend.make_event()),
      refill_began_(backend.make_timed_event()),
      refilled_(backend.make_timed_event()) {
  for (ExpertBank* bank : banks) {
    Pool p{bank, ExpertPlanner(planner_options(*bank, options)), pool_lines(), {}, {}, {}, {}, nullptr, nullptr};
    p.shows.assign(static_cast<size_t>(options.lines), -1);
    p.heat.assign(static_cast<size_t>(bank->experts), 0);
    p.shown.assign(static_cast<size_t>(p.held()), -1);
    p.read = backend.make_event(), p.filled = backend.make_event();
    line_bytes_ = std::max(line_bytes_, bank->line_bytes);
    pools_.push_back(std::move(p));
  }
  lines_ = backend.allocate(static_cast<size_t>(pool_lines() * line_bytes_), Space::Device);
  if (options.planner == Planner::Host || pools_.empty()) return;
  for (const Pool& p : pools_)
    state_bytes_ = std::max<int64_t>(state_bytes_, PoolState::bytes(p.bank->pooled, options.lines, p.bank->experts));
  const size_t bytes = pools_.size() * static_cast<size_t>(state_bytes_);
  states_ = backend.allocate(bytes, Space::Device), staged_ = backend.allocate(bytes, Space::Host);
}

View ExpertPools::lines(int64_t first, int64_t count) const {
  View v{lines_.view(DType::U8, {0}).data, DType::U8, lines_.space(), 2, {pool_lines(), line_bytes_}};
  return v.rows(first, count);
}

void ExpertPools::copy(Pool& pool, std::span<const Placement> fills, FillKind kind) {
  if (fills.empty()) return;
  const auto k = static_cast<size_t>(kind);
  backend_.wait(*copies_stream_, *pool.read);
  const uint64_t before = pool.bank->filled_bytes;
  for (const Placement& f : fills) {
    if (const int32_t was = pool.shows[f.line]; was >= 0) show(pool, was, -1);  // no table names a line in change
    backend_.fill(*copies_stream_, *pool.bank, pool.id(f.expert), line(pool.first_line + f.line));
  }
  backend_.record(*copies_stream_, *pool.filled);
  copies_.copies[k] += fills.size();
  copies_.bytes[k] += pool.bank->filled_bytes - before;
  if (kind == FillKind::Demand) phase_->misses += fills.size(), phase_->bytes += pool.bank->filled_bytes - before;
}

void ExpertPools::change(Pool& pool, int32_t expert, int64_t to) {
  if (pool.shown[expert] == to) return;
  pool.shown[expert] = to;
  const int32_t id = pool.id(expert);
  std::erase_if(pool.changes, [&](const ServedExpert& s) { return s.expert == id; });
  pool.changes.push_back({id, to < 0 ? View{} : line(to)});
}

void ExpertPools::show(Pool& pool, int32_t expert, int32_t at) {
  const bool pooled = expert < pool.bank->pooled;
  if (const int64_t was = pool.shown[expert]; pooled && was >= 0) pool.shows[was - pool.first_line] = -1;
  if (pooled && at >= 0) pool.shows[at] = expert;
  change(pool, expert, at < 0 ? -1 : pool.first_line + at);
}

void ExpertPools::pass(Stream& stream, Pool& pool, std::span<const int32_t> request, std::span<const Placement> serves,
                       bool first, const std::function<void()>& compute) {
  place_.assign(static_cast<size_t>(pool.bank->pooled), -1);
  for (const Placement& p : serves) place_[p.expert] = p.line;
  for (const int32_t e : request) show(pool, e, place_[e]);
  for (auto e = static_cast<int32_t>(pool.bank->pooled); e < pool.held(); ++e) show(pool, e, first ? 0 : -1);
  backend_.serve(stream, *pool.bank, pool.changes);
  pool.changes.clear();
  if (options_.check_lines) backend_.check_served(stream, *pool.bank);
  compute();
  backend_.record(stream, *pool.read);
}

std::vector<int32_t> ExpertPools::Pool::requested(std::span<const int32_t> ids) const {
  std::vector<int32_t> mine;
  for (const int32_t id : ids)
    if (bank->is_pooled(id)) mine.push_back(id - static_cast<int32_t>(bank->first));
  return distinct_experts(mine, planner.options().experts);
}

void ExpertPools::run(Stream& stream, int64_t bank, std::span<const int32_t> ids,
                      const std::function<void()>& compute) {
  Pool& pool = pools_[bank];
  const std::vector<int32_t> request = pool.requested(ids);
  for (const int32_t id : ids) ++pool.heat[id];
  if (streaming_) return stream_bank(stream, bank, request, compute);
  bool first = true;
  backend_.wait(stream, *pool.filled);  // of before, whoever asked for them
  for (const Wave& wave : pool.planner.plan(request)) {
    copy(pool, wave.fills, FillKind::Demand);
    const std::span<const Placement> serves = wave.serves;
    const auto hits = serves.first(serves.size() - wave.fills.size());
    // What is there, and what needs no line, is computed while the copies run.
    const bool ahead = !wave.fills.empty() && (!hits.empty() || (first && !pool.bank->others.empty()));
    if (ahead) pass(stream, pool, request, hits, first, compute);
    if (!wave.fills.empty()) backend_.wait(stream, *pool.filled);
    pass(stream, pool, request, ahead ? serves.subspan(hits.size()) : serves, first && !ahead, compute);
    first = false;
  }
  if (first) pass(stream, pool, request, {}, true, compute);
}

void ExpertPools::warm(const std::function<std::span<const uint64_t>(int64_t bank)>& counts) {
  come_home();
  for (size_t b = 0; b < pools_.size(); ++b) {
    const std::span<const uint64_t> of = counts(static_cast<int64_t>(b));
    std::copy(of.begin(), of.end(), pools_[b].heat.begin());
  }
  refill();
}

void ExpertPools::reset() {
  come_home();
  if (streaming_) leave_streaming(false);
  for (Pool& p : pools_) {
    p.planner.reset();
    std::fill(p.heat.begin(), p.heat.end(), uint64_t{0});
    for (const int32_t e : p.shows)
      if (e >= 0) show(p, e, -1);
  }
}

void ExpertPools::refill() {
  constexpr auto warm = static_cast<size_t>(FillKind::WarmStart);
  const uint64_t before = copies_.bytes[warm];
  for (Pool& p : pools_) backend_.wait(*copies_stream_, *p.read);
  backend_.record(*copies_stream_, *refill_began_);
  for (Pool& p : pools_) {
    const auto heat = std::span<const uint64_t>(p.heat).subspan(p.bank->first, p.bank->pooled);
    copy(p, p.planner.warm_start(heat), FillKind::WarmStart);
  }
  backend_.record(*copies_stream_, *refilled_);
  refill_bytes_ = copies_.bytes[warm] - before;
}

double ExpertPools::link_bytes_per_s() const {
  if (refill_bytes_ == 0) return 0;
  return static_cast<double>(refill_bytes_) / backend_.elapsed_ns(*refill_began_, *refilled_) * 1e9;
}

uint64_t ExpertPools::host_bytes() const {
  return std::accumulate(pools_.begin(), pools_.end(), uint64_t{0},
                         [](uint64_t sum, const Pool& p) { return sum + p.bank->host_bytes; });
}

PoolCounters ExpertPools::counters() {
  come_home();
  PoolCounters sum;
  for (const Pool& p : pools_) {
    p.planner.counters().check();
    sum += p.planner.counters();
  }
  auto made = copies_.copies;
  made[static_cast<size_t>(FillKind::Demand)] += not_copied_;
  if (sum.fills_by_kind != made)
    throw Error(ErrorKind::Internal, fmt::format("expert pools planned fills [{}] by cause, made or left out [{}]",
                                                 fmt::join(sum.fills_by_kind, ", "), fmt::join(made, ", ")));
  return sum;
}

PoolCopies ExpertPools::copies() {
  come_home();
  PoolCopies c = copies_;
  for (size_t k = 0; k < c.copies.size(); ++k)
    c.copies[k] += stream_copies_.copies[k], c.bytes[k] += stream_copies_.bytes[k];
  c.total_bytes = device_copied_;
  for (const Pool& p : pools_) c.total_bytes += p.bank->filled_bytes;
  const uint64_t sum = std::accumulate(c.bytes.begin(), c.bytes.end(), uint64_t{0});
  if (sum != c.total_bytes)
    throw Error(ErrorKind::Internal,
                fmt::format("copies of experts sum to {} bytes by cause and to {} in all", sum, c.total_bytes));
  return c;
}

}  // namespace fnx
