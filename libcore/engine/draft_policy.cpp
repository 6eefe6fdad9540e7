#include "libcore/engine/draft_policy.h"

#include <algorithm>

#include "libcore/measure/statistics.h"

namespace fnx {

namespace {
constexpr double kDecay = 0.97;                        // of counts, a round
constexpr double kPriorRounds = 2, kPriorKept = 0.7;   // before anything is known
constexpr int64_t kProbe = 4;                          // rounds of a trial of drafts
constexpr double kLost = 0.9;                          // gain below which a trial is not gone through with
constexpr int64_t kFirstWait = 8, kLongestWait = 128;  // plain rounds between trials, and the reverse
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

double DraftPolicy::Acceptance::tokens(int32_t depth) const {
  double sum = 1, chain = 1, rate = kPriorKept;
  for (int32_t i = 0; i < depth; ++i) {
    const auto at = static_cast<size_t>(i);
    rate =
        (kept[at] + kPriorRounds * rate) / (reached[at] + kPriorRounds);  // a place is first taken for the one before
    chain *= rate;
    sum += chain;
  }
  return sum;
}

int32_t DraftPolicy::best(const Width& width, std::span<const size_t> streams, double* gain) const {
  const auto rate = [&](int32_t d) {
    double tokens = 0;
    for (const size_t id : streams) {
      const auto it = streams_.find(id);
      tokens += it == streams_.end() ? Acceptance{}.tokens(d) : it->second.tokens(d);
    }
    return tokens / width.expected_ns(d);
  };
  int32_t depth = 1;
  for (int32_t d = 2; d <= options_.most; ++d)
    if (rate(d) > rate(depth)) depth = d;
  *gain = rate(depth) / rate(0);
  return depth;
}

int32_t DraftPolicy::decide(std::span<const size_t> streams) {
  if (options_.most == 0 || options_.fixed || streams.empty()) return streams.empty() ? 0 : options_.most;
  Width& w = widths_[streams.size()];
  if (w.plain_due > 0) return 0;
  double gain = 0;
  const int32_t depth = best(w, streams, &gain);
  return w.probing > 0 || w.wait == 0 ? depth : 0;
}

void DraftPolicy::observe(const DraftRound& round) {
  std::vector<size_t> ids;
  for (const DraftRound::Stream& s : round.streams) {
    ids.push_back(s.id);
    Acceptance& a = streams_[s.id];
    for (int32_t i = 0; i < s.drafted; ++i) {
      const auto at = static_cast<size_t>(i);
      a.reached[at] *= kDecay, a.kept[at] *= kDecay;
      if (i > s.kept) continue;
      a.reached[at] += 1;
      a.kept[at] += i < s.kept;
    }
  }
  if (options_.fixed || options_.most == 0 || ids.empty()) return;
  Width& w = widths_[ids.size()];
  Times& times = w.depth[static_cast<size_t>(round.depth)];
  // The first round of a kind pays for what later ones find ready.
  if (times.seen++ == 1) times.ns.clear();
  if (times.ns.size() == kSamples) times.ns.erase(times.ns.begin());
  times.ns.push_back(round.ns);
  if (round.depth == 0) {
    if (w.plain_due > 0) --w.plain_due;
    if (w.depth[0].seen == 2 || (w.wait > 0 && --w.wait == 0)) w.probing = kProbe;
    return;
  }
  if (++w.since_plain >= w.next_plain) {
    w.since_plain = 0, w.plain_due = 2;
    w.next_plain = std::min(2 * w.next_plain, kLongestWait);
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
