#include "libcore/engine/draft_policy.h"

#include <algorithm>

#include "libcore/measure/statistics.h"

namespace fnx {

namespace {
constexpr double kDecay = 0.97;                        // of counts, a round
constexpr double kPriorRounds = 2, kPriorKept = 0.7;   // before anything is known
constexpr int64_t kProbe = 4;                          // rounds of a trial of drafts
constexpr double kLost = 0.9;                          // gain below which a trial is not gone through with
constexpr int64_t kFirstWait = 8, kLongestWait = 512;  // plain rounds between trials
constexpr int64_t kLongestDrafting = 128;              // rounds of drafts between plain ones
}  // namespace

double DraftPolicy::Times::typical() const { return ns.empty() ? 0 : median(ns); }

double DraftPolicy::Width::expected_ns(int32_t d) const {
  if (!depth[static_cast<size_t>(d)].ns.empty() || d == 0) return depth[static_cast<size_t>(d)].typical();
  // A step costs what the last measured one did; an optimistic tenth of a plain round when none was.
  int32_t known = d - 1;
  while (known > 0 && depth[static_cast<size_t>(known)].ns.empty()) --known;
  const double plain = depth[0].typical(), at = depth[static_cast<size_t>(known)].typical();
  const double step = known == 0 ? plain / 10 : std::max(0.0, (at - plain) / known);
  return at + step * (d - known);
}

void DraftPolicy::Acceptance::add(const DraftRound::Stream& round) {
  for (int32_t i = 0; i < round.drafted; ++i) {
    const auto at = static_cast<size_t>(i);
    reached[at] *= kDecay, kept[at] *= kDecay;
    if (i > round.kept) continue;
    reached[at] += 1;
    kept[at] += i < round.kept;
  }
}

double DraftPolicy::tokens(size_t stream, int32_t depth) const {
  const auto it = streams_.find(stream);
  const Acceptance own = it == streams_.end() ? Acceptance{} : it->second;
  // A place is first taken for that of all streams, and theirs for the one before.
  double sum = 1, chain = 1, common = kPriorKept;
  for (int32_t i = 0; i < depth; ++i) {
    const auto at = static_cast<size_t>(i);
    common = (everyone_.kept[at] + kPriorRounds * common) / (everyone_.reached[at] + kPriorRounds);
    chain *= (own.kept[at] + kPriorRounds * common) / (own.reached[at] + kPriorRounds);
    sum += chain;
  }
  return sum;
}

// One that was not seen yet waits as long as its neighbour.
DraftPolicy::Width DraftPolicy::width(size_t streams) const {
  const auto after = widths_.lower_bound(streams);
  if (after != widths_.end() && after->first == streams) return after->second;
  Width w;
  const auto near = after != widths_.end() ? after : widths_.empty() ? after : std::prev(after);
  if (near != widths_.end() && near->second.wait > 0) w.wait = near->second.wait, w.next_wait = near->second.next_wait;
  return w;
}

int32_t DraftPolicy::best(const Width& width, std::span<const size_t> streams, double* gain) const {
  const auto rate = [&](int32_t d) {
    double sum = 0;
    for (const size_t id : streams) sum += tokens(id, d);
    return sum / width.expected_ns(d);
  };
  int32_t depth = 1;
  for (int32_t d = 2; d <= options_.most; ++d)
    if (rate(d) > rate(depth)) depth = d;
  *gain = rate(depth) / rate(0);
  return depth;
}

int32_t DraftPolicy::decide(std::span<const size_t> streams) const {
  if (options_.most == 0 || options_.fixed || streams.empty()) return streams.empty() ? 0 : options_.most;
  const Width w = width(streams.size());
  if (w.plain_due > 0 || w.wait > 0) return 0;
  double gain = 0;
  return best(w, streams, &gain);
}

void DraftPolicy::observe(const DraftRound& round) {
  std::vector<size_t> ids;
  for (const DraftRound::Stream& s : round.streams) {
    ids.push_back(s.id);
    if (s.drafted == 0) continue;
    streams_[s.id].add(s);
    everyone_.add(s);
  }
  if (options_.fixed || options_.most == 0 || ids.empty()) return;
  Width& w = widths_.try_emplace(ids.size(), width(ids.size())).first->second;
  Times& times = w.depth[static_cast<size_t>(round.depth)];
  // The first round of a kind pays for what later ones find ready, and one behind another depth for the change.
  if (times.seen == 1) times.ns.clear();
  if (times.ns.empty() || w.last_depth == round.depth) {
    if (times.ns.size() == kSamples) times.ns.erase(times.ns.begin());
    times.ns.push_back(round.ns);
  }
  ++times.seen;
  w.last_depth = round.depth;
  if (round.depth == 0) {
    if (w.plain_due > 0) --w.plain_due;
    if (w.wait > 0 && --w.wait == 0) w.probing = kProbe;
    return;
  }
  if (++w.since_plain >= w.next_plain) {
    w.since_plain = 0, w.plain_due = 2;
    w.next_plain = std::min(2 * w.next_plain, kLongestDrafting);
  }
  const bool probed = w.probing > 0;
  double gain = 0;
  best(w, ids, &gain);
  // A trial ends early when it is lost.
  if (probed && --w.probing > 0 && (gain >= kLost || times.seen < 2)) return;
  w.probing = 0;
  // Going on takes half the gain that starting takes, or chance would end what pays.
  if (gain >= (probed ? options_.guard : (1 + options_.guard) / 2)) {
    w.next_wait = kFirstWait;
    return;
  }
  // What ended them was partly chance: the next trial should weigh more.
  for (const size_t id : ids)
    for (size_t i = 0; i < kMostDrafts; ++i) streams_[id].reached[i] /= 2, streams_[id].kept[i] /= 2;
  w.wait = w.next_wait;
  w.next_wait = std::min(2 * w.next_wait, kLongestWait);
}

}  // namespace fnx
