// Expert pools whose rounds are planned on the device: the state's way there and back.
#include <algorithm>
#include <utility>

#include "kernels/error.h"
#include "libcore/engine/expert_pools.h"

namespace fnx {

View ExpertPools::state(const Buffer& of, int64_t bank) const {
  return of.view(DType::U8, {banks(), state_bytes_}).rows(bank, 1);
}

void ExpertPools::set_planner(Planner planner) {
  if (planner != Planner::Host && state_bytes_ == 0)
    throw Error(ErrorKind::Internal, "expert pools that were made for plans on the host have no place on the device");
  come_home();
  options_.planner = planner;
}

void ExpertPools::go_to_device(Stream& stream) {
  for (int64_t b = 0; b < banks(); ++b) {
    Pool& p = pools_[b];
    const PoolState s = PoolState::at(state(staged_, b).data, p.bank->pooled, options_.lines, p.bank->experts);
    *s.words = {}, *s.fill_count = 0;
    p.planner.store(s);
    std::copy(p.heat.begin(), p.heat.end(), s.heat);
    p.changes.clear();
    for (int32_t e = 0; e < p.held(); ++e) {
      const int32_t at = e < p.bank->pooled ? p.planner.line_of(e) : 0;
      p.changes.push_back({p.id(e), at < 0 ? View{} : line(p.first_line + at), at < 0});
    }
    backend_.wait(stream, *p.filled);
    backend_.serve(stream, *p.bank, p.changes);
    p.changes.clear();
  }
  backend_.copy(stream, states_.view(DType::U8, {banks(), state_bytes_}),
                staged_.view(DType::U8, {banks(), state_bytes_}));
  on_ = &stream;
}

void ExpertPools::run_planned(Stream& stream, int64_t bank, int64_t k, const View& ids, const Foreseen& next,
                              Event* known, const std::function<void()>& compute) {
  Pool& p = pools_[bank];
  const PoolOptions& options = p.planner.options();
  const View to = state(states_, bank), own = lines(p.first_line, options_.lines);
  const Foreseen foreseen = std::exchange(foreseen_, next);
  foreseen_.follows = static_cast<bool>(foreseen);
  backend_.plan_experts(stream, *p.bank, options, k, ids, to, own, foreseen);
  if (foreseen) backend_.wait(stream, *stage_filled_);
  if (next) backend_.wait(stream, *known);  // here, where it is over by now: the stack may change after compute()
  if (std::exchange(settling_, false)) backend_.wait(stream, *settled_);  // so is the bank before
  backend_.fill_planned(stream, *p.bank, options, to, own, foreseen);
  // Beside the copies ahead of this bank, which keep the link until they say go, and behind those of the bank before,
  // which has settled what it had on the same stage.
  if (next) {
    Pool& after = pools_[bank + 1];
    Stream& ahead = ahead_of(bank + 1);
    backend_.wait(ahead, *known);
    backend_.fill_foreseen(ahead, *after.bank, after.planner.options(), state(states_, bank + 1), foreseen_);
    backend_.record(ahead, *stage_filled_);
  }
  if (options_.check_lines) backend_.check_served(stream, *p.bank);
  compute();
  if (!foreseen) return;
  // Beside what comes next. The last bank's own stream waits for no later one.
  settling_ = static_cast<bool>(next);
  Stream& settles = settling_ ? ahead_of(bank) : stream;
  if (settling_) backend_.record(stream, *computed_), backend_.wait(settles, *computed_);
  backend_.settle_planned(settles, *p.bank, options, to, own, foreseen);
  if (settling_) backend_.record(settles, *settled_);
}

void ExpertPools::release(Stream& stream) {
  if (on_ == &stream) come_home();
}

void ExpertPools::come_home() {
  if (on_ == nullptr) return;
  Stream& stream = *on_;
  on_ = nullptr;
  backend_.copy(stream, staged_.view(DType::U8, {banks(), state_bytes_}),
                states_.view(DType::U8, {banks(), state_bytes_}));
  stream.synchronize();
  constexpr auto demand = static_cast<size_t>(FillKind::Demand), ahead = static_cast<size_t>(FillKind::LayerPrefetch);
  for (int64_t b = 0; b < banks(); ++b) {
    Pool& p = pools_[b];
    const PoolState s = PoolState::at(state(staged_, b).data, p.bank->pooled, options_.lines, p.bank->experts);
    const PoolWords& w = *s.words;
    const uint64_t misses = w.misses - p.planner.counters().misses;
    p.planner.load(s);
    std::copy_n(s.heat, p.heat.size(), p.heat.begin());
    const uint64_t taken = w.taken_bytes - w.chosen_bytes;  // of what was copied before the choice
    copies_.copies[demand] += w.placed, copies_.bytes[demand] += w.placed_bytes - taken;
    stream_copies_.copies[ahead] += w.ahead, stream_copies_.bytes[ahead] += w.ahead_bytes;
    copies_.taken_bytes += taken;
    copies_.in_place += w.in_place, copies_.in_place_bytes += w.in_place_bytes;
    device_copied_ += w.copied_bytes - taken + w.ahead_bytes, not_copied_ += misses - w.placed;
    rounds_.misses += misses, rounds_.bytes += w.placed_bytes + w.in_place_bytes;
    rounds_.foreseen_bytes += taken, rounds_.vain_bytes += w.ahead_bytes - taken;
    // The table as a host knows it: lines and nothing else.
    p.changes.clear();
    for (int32_t e = 0; e < p.held(); ++e) {
      const int32_t at = e < p.bank->pooled ? p.planner.line_of(e) : 0;
      p.shown[e] = at < 0 ? -1 : p.first_line + at;
      p.changes.push_back({p.id(e), at < 0 ? View{} : line(p.first_line + at)});
    }
    for (int32_t l = 0; l < options_.lines; ++l) p.shows[l] = p.planner.expert_of(l);
    backend_.record(stream, *p.read);
  }
}

}  // namespace fnx
