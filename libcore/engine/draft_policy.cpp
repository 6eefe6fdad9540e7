#include "libcore/engine/draft_policy.h"

#include <algorithm>
#include <cmath>

#include "libcore/measure/statistics.h"

namespace fnx {

namespace {
constexpr double kDecay = 0.97;                         // of counts, a round
constexpr double kPriorRounds = 2, kPriorKept = 0.7;    // before anything is known
constexpr double kMostPrior = 6;                        // rounds more, from what is known of all streams
constexpr int64_t kFewest = 2, kMostUntimed = 8;        // rounds of a try before it is judged, and without a time
constexpr int64_t kShortWait = 8, kLongestWait = 1024;  // plain rounds between tries
constexpr int64_t kLongestDrafting = 128;               // rounds of drafts between plain ones
constexpr double kClearly = 1.03;                       // rate over that of a depth in use that another must have
constexpr double kShare = 1.0 / 512;                    // of plain time, for credit
constexpr double kMostCredit = 8, kLeastCredit = 2;     // plain rounds: kept for later, and for a try to begin
constexpr double kPlausible = 0.25;                     // gain that a try may turn out to bring
constexpr int64_t kFewestLeft = 16;                     // rounds to come that a try is worth
}  // namespace

void DraftPolicy::Times::add(double ns) {
  ns_[next_++ % ns_.size()] = ns;
  count_ = std::min(count_ + 1, ns_.size());
}

double DraftPolicy::Times::typical() const {
  return count_ == 0 ? 0 : median({ns_.begin(), ns_.begin() + static_cast<std::ptrdiff_t>(count_)});
}

void DraftPolicy::Acceptance::add(const DraftRound::Stream& round) {
  // Places that a shallow round does not see are forgotten too: the text around them has passed.
  for (size_t at = 0; at < kMostDrafts; ++at) reached[at] *= kDecay, kept[at] *= kDecay;
  for (int32_t i = 0; i < std::min(round.drafted, round.kept + 1); ++i)
    reached[static_cast<size_t>(i)] += 1, kept[static_cast<size_t>(i)] += i < round.kept;
}

double DraftPolicy::expected_ns(const Width& width, int32_t depth) const {
  const auto at = static_cast<size_t>(depth);
  const double plain = width.depth[0].typical();
  if (width.depth[at].known() || depth == 0) return width.depth[at].typical();
  int32_t known = depth - 1;
  while (known > 0 && !width.depth[static_cast<size_t>(known)].known()) --known;
  if (known == 0) {
    // Other numbers of streams pay about the same share.
    for (const auto& [streams, other] : widths_)
      if (other.depth[at].known()) return plain * other.depth[at].typical() / other.depth[0].typical();
    return plain * (depth + 0.1);  // a hope, so that it is tried
  }
  // Hopes: steps behind the first cost less, as it has costs of its own.
  const double step = std::max(0.0, (width.depth[static_cast<size_t>(known)].typical() - plain) / known);
  return plain + step * known + step * (known == 1 ? 0.6 : 1.0) * (depth - known);
}

double DraftPolicy::tokens(size_t stream, int32_t depth, bool hoped) const {
  const auto it = streams_.find(stream);
  const Acceptance own = it == streams_.end() ? Acceptance{} : it->second;
  // A place is first taken for that of all streams, and theirs for the one before.
  double sum = 1, chain = 1, common = kPriorKept;
  for (int32_t i = 0; i < depth; ++i) {
    const auto at = static_cast<size_t>(i);
    common = (everyone_.kept[at] + kPriorRounds * common) / (everyone_.reached[at] + kPriorRounds);
    const double prior = kPriorRounds + std::min(kMostPrior, everyone_.reached[at] / 4);
    const double n = own.reached[at] + prior, p = (own.kept[at] + prior * common) / n;
    chain *= hoped ? std::min(1.0, p + std::sqrt(p * (1 - p) / n)) : p;
    sum += chain;
  }
  return sum;
}

// Of the stream that drafts help least: where it is slower, those that are faster would wait for it at the end.
double DraftPolicy::rate(const Width& width, Ids ids, int32_t depth, bool hoped) const {
  double least = tokens(ids[0], depth, hoped);
  for (const size_t id : ids) least = std::min(least, tokens(id, depth, hoped));
  return least / expected_ns(width, depth);
}

int32_t DraftPolicy::best(const Width& width, Ids ids, bool records) const {
  const double plain = rate(width, ids, 0, false);
  const auto known = [&](int32_t d) { return width.depth[static_cast<size_t>(d)].known(); };
  int32_t depth = last_depth_ > 0 ? last_depth_ : 1;
  if (!known(depth) && !records) return 0;
  if (!width.drafting && width.next_wait > kFirstWait) return 1;  // the cheapest, after others failed
  double most = rate(width, ids, depth, false);
  for (int32_t d = 1; d <= options_.most; ++d) {
    // A depth is seen for the first time where the one below pays.
    if (!known(d) &&
        (!records || (d > 1 && (!known(d - 1) || rate(width, ids, d - 1, false) < options_.guard * plain))))
      break;
    const double r = rate(width, ids, d, false);
    if (d == depth || r < most * kClearly) continue;
    depth = d, most = r;
  }
  return depth;
}

int32_t DraftPolicy::decide(std::span<const DraftStream> streams) const {
  if (options_.most == 0 || options_.fixed || streams.empty()) return streams.empty() ? 0 : options_.most;
  const auto it = widths_.find(streams.size());
  if (it == widths_.end() || it->second.plain_due > 0 || it->second.wait > 0 || credit_ <= 0) return 0;
  const Width& w = it->second;
  int64_t least = streams[0].left, most = 0;
  for (const DraftStream& s : streams) least = std::min(least, s.left), most = std::max(most, s.left);
  if (!w.drafting && most < kFewestLeft) return 0;
  // What drafts may still save before the last of these streams ends.
  const double plain = w.depth[0].typical(), plausible = kPlausible * plain * static_cast<double>(most);
  if (!w.drafting && (credit_ < kLeastCredit * plain || plausible < w.try_ns)) return 0;
  std::vector<size_t> ids;
  for (const DraftStream& s : streams) ids.push_back(s.id);
  const int32_t depth = best(w, ids, plausible >= recording_ns_ && credit_ >= kMostCredit / 2 * plain);
  if (depth <= least) return depth;
  // Shapes that only the last rounds of a stream have would be recorded for them.
  const auto last = static_cast<int32_t>(least);
  const bool pays =
      last > 0 && w.depth[static_cast<size_t>(last)].known() && rate(w, ids, last, false) > rate(w, ids, 0, false);
  return pays ? last : 0;
}

int64_t DraftPolicy::plain_ahead(size_t streams) const {
  const auto it = widths_.find(streams);
  return it == widths_.end() ? 0 : std::max<int64_t>(0, std::max(it->second.plain_due, it->second.wait) - 1);
}

// One that was not seen yet waits as long as its neighbour.
DraftPolicy::Width& DraftPolicy::width(size_t streams) {
  const auto after = widths_.lower_bound(streams);
  if (after != widths_.end() && after->first == streams) return after->second;
  Width w;
  const auto near = after != widths_.end() ? after : widths_.empty() ? after : std::prev(after);
  if (near != widths_.end()) {
    w.wait = std::max(w.wait, near->second.wait), w.next_wait = near->second.next_wait;
    w.try_ns = near->second.try_ns;
  }
  return widths_.emplace(streams, w).first->second;
}

void DraftPolicy::observe(const DraftRound& round) {
  for (const DraftRound::Stream& s : round.streams)
    if (s.drafted > 0) streams_[s.id].add(s), everyone_.add(s);
  if (options_.fixed || options_.most == 0 || round.streams.empty()) return;
  Width& w = width(round.streams.size());
  // A round behind one of another depth pays for the change, and the first of all for what later ones find ready.
  const bool counts = !round.recorded && last_depth_ == round.depth;
  if (counts) w.depth[static_cast<size_t>(round.depth)].add(round.ns);
  if (round.depth == 0)
    observe_plain(w, round, counts);
  else
    observe_drafts(w, round);
  last_depth_ = round.depth;
}

void DraftPolicy::observe_plain(Width& w, const DraftRound& round, bool counts) {
  if (last_depth_ > 0 && w.depth[0].known() && !(round.recorded && w.drafting)) {
    const double plain = w.depth[0].typical();
    pay(std::min(0.0, plain - round.ns), plain);
    if (!w.drafting) w.try_ns = try_.lost;
  } else if (counts) {
    credit_ = std::min(credit_ + kShare * round.ns, kMostCredit * round.ns);
  }
  if (w.plain_due > 0) --w.plain_due;
  if (w.wait > 0 && (w.wait > 1 || w.depth[0].known())) --w.wait;
  // Without credit for a try: until there is some, at the share that plain rounds give.
  const double plain = w.depth[0].typical(), missing = kLeastCredit * plain - credit_;
  if (w.wait == 0 && !w.drafting && missing > 0) w.wait = 1 + static_cast<int64_t>(missing / (kShare * plain));
}

void DraftPolicy::observe_drafts(Width& w, const DraftRound& round) {
  const bool same = std::equal(try_.ids.begin(), try_.ids.end(), round.streams.begin(), round.streams.end(),
                               [](size_t id, const DraftRound::Stream& s) { return id == s.id; });
  if (!w.drafting || !same) {
    try_ = {};
    for (const DraftRound::Stream& s : round.streams) try_.ids.push_back(s.id);
    try_.tokens.resize(try_.ids.size());
  }
  w.drafting = true;
  ++try_.rounds;
  try_.untimed = w.depth[static_cast<size_t>(round.depth)].known() ? 0 : try_.untimed + 1;
  const double plain = w.depth[0].typical();
  if (round.recorded) {
    try_.recording_ns += std::max(0.0, round.ns - plain);
    recording_ns_ = try_.recording_ns;
  } else {
    const auto fewest = [&] { return *std::min_element(try_.tokens.begin(), try_.tokens.end()); };
    const int64_t before = fewest();
    for (size_t i = 0; i < try_.tokens.size(); ++i) try_.tokens[i] += 1 + round.streams[i].kept;
    pay(plain * static_cast<double>(fewest() - before) - round.ns, plain);
  }
  if (++w.since_plain >= w.next_plain) {
    w.since_plain = 0, w.plain_due = 2;
    w.next_plain = std::min(2 * w.next_plain, kLongestDrafting);
  }
  if (!goes_on(w, round.depth)) give_up(w);
}

void DraftPolicy::pay(double saved, double plain) {
  credit_ = std::min(credit_ + saved, kMostCredit * plain);
  try_.worth += saved, try_.lost = std::max(0.0, try_.lost - saved);
}

bool DraftPolicy::goes_on(const Width& w, int32_t depth) const {
  if (credit_ <= 0) return false;
  if (try_.rounds < kFewest) return true;
  if (!w.depth[static_cast<size_t>(depth)].known()) return try_.untimed < kMostUntimed;
  // Going on takes half the gain that drafts should bring, and that within chance, or chance would end what pays.
  double most = 0;
  for (int32_t d = 1; d <= options_.most; ++d)
    if (w.depth[static_cast<size_t>(d)].known()) most = std::max(most, rate(w, try_.ids, d, true));
  return most >= rate(w, try_.ids, 0, true) * (1 + options_.guard) / 2;
}

void DraftPolicy::give_up(Width& w) {
  const bool paid = try_.worth > 0;
  if (!paid) credit_ -= try_.recording_ns;  // made for rounds to come, of which there are none
  w.drafting = false;
  w.try_ns = try_.lost;
  w.wait = paid ? kShortWait : w.next_wait;
  w.next_wait = paid ? kFirstWait : std::min(2 * w.next_wait, kLongestWait);
  // What ended it was partly chance: the next try should weigh more.
  for (const size_t id : try_.ids)
    for (size_t i = 0; i < kMostDrafts; ++i) streams_[id].reached[i] /= 2, streams_[id].kept[i] /= 2;
}

}  // namespace fnx
