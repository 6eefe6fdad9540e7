#include "libcore/engine/stream_timeline.h"

#include <algorithm>

namespace fnx {

namespace {
constexpr size_t kMostForwards = 16;

using Spans = std::vector<std::pair<double, double>>;

// Disjoint and ascending.
Spans merged(Spans spans) {
  std::sort(spans.begin(), spans.end());
  Spans out;
  for (const auto& s : spans)
    if (!out.empty() && s.first <= out.back().second)
      out.back().second = std::max(out.back().second, s.second);
    else
      out.push_back(s);
  return out;
}

double length(const Spans& spans) {
  double sum = 0;
  for (const auto& s : spans) sum += s.second - s.first;
  return sum;
}

Spans common(const Spans& a, const Spans& b) {
  Spans out;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const double from = std::max(a[i].first, b[j].first), to = std::min(a[i].second, b[j].second);
    if (from < to) out.emplace_back(from, to);
    (a[i].second < b[j].second ? i : j) += 1;
  }
  return out;
}
}  // namespace

void StreamTimeline::begin_forward() {
  noting_ = forwards_.size() < kMostForwards;
  if (noting_) forwards_.emplace_back();
}

void StreamTimeline::begin(Stream& stream) {
  if (!noting_) return;
  began_ = backend_.make_timed_event();
  backend_.record(stream, *began_);
}

void StreamTimeline::end(Stream& stream, bool copy, uint64_t bytes) {
  if (!noting_) return;
  Interval i{std::move(began_), backend_.make_timed_event(), copy, bytes};
  backend_.record(stream, *i.to);
  forwards_.back().push_back(std::move(i));
}

TimelineSummary StreamTimeline::summary() const {
  TimelineSummary s;
  for (const auto& forward : forwards_) {
    if (forward.empty()) continue;
    Spans copies, computations, all;
    Event& origin = *forward.front().from;
    for (const Interval& i : forward) {
      const double from = backend_.elapsed_ns(origin, *i.from);
      const std::pair span{from, from + backend_.elapsed_ns(*i.from, *i.to)};
      (i.copy ? copies : computations).push_back(span);
      all.push_back(span);
      s.copied_bytes += i.bytes;
    }
    copies = merged(std::move(copies)), computations = merged(std::move(computations)), all = merged(std::move(all));
    s.window_ns += all.back().second - all.front().first;
    s.copying_ns += length(copies), s.computing_ns += length(computations);
    s.overlapped_ns += length(common(copies, computations));
    ++s.forwards;
  }
  return s;
}

}  // namespace fnx
