// Forwards of many rows: batches of experts pass through the lines of all pools.
#include <algorithm>
#include <numeric>

#include "libcore/engine/expert_pools.h"

namespace fnx {

namespace {
// Choices an expert from which on nearly every one of a bank is chosen.
constexpr int64_t kStreamChoices = 4;
constexpr int64_t kMostFrameLines = 64;
// Frames that copies ahead leave for experts which nobody foresaw; one at least, or these would wait for ever.
size_t kept_free(size_t frames) { return frames >= 8 ? 2 : 1; }
}  // namespace

void ExpertPools::begin(Stream& stream, int64_t choices, int64_t banks, bool round) {
  const int64_t experts = pools_[0].bank->pooled;
  phase_ = round ? &rounds_ : &prompts_;
  foreseen_ = {}, settling_ = false;  // a recording that failed may have left them
  if (banks > 0) ++phase_->forwards;
  const bool streaming = 2 * options_.lines <= experts && choices >= kStreamChoices * experts;
  const bool device = options_.planner != Planner::Host && round && !streaming;
  if (!device || on_ != &stream) come_home();
  if (streaming && !streaming_) enter_streaming();
  if (!streaming && streaming_) leave_streaming(true);
  if (device && on_ == nullptr) go_to_device(stream);
  if (!streaming) return;
  ++streamed_.forwards;
  timeline_.begin_forward();
  for (const Batch& b : ahead_) free_frames_.push_back(b.frame);  // of a bank that had no rows
  ahead_.clear(), candidates_.clear();
  candidates_known_ = false;
  ahead_bank_ = 0, ahead_banks_ = banks;
  copy_ahead();
}

void ExpertPools::enter_streaming() {
  streaming_ = true;
  if (frames_.empty()) {
    frame_lines_ = std::clamp<int64_t>(pool_lines() / 2, 1, kMostFrameLines);
    for (int64_t i = 0; i < pool_lines() / frame_lines_; ++i)
      frames_.push_back({i * frame_lines_, backend_.make_event(), backend_.make_event()});
    for (size_t f = 0; f < frames_.size(); ++f) free_frames_.push_back(f);
  }
  for (Pool& p : pools_) {
    p.planner.clear();
    for (const int32_t e : p.shows)
      if (e >= 0) show(p, e, -1);
    for (Stream* s : {copies_stream_.get(), ahead_stream_.get()}) {
      backend_.wait(*s, *p.read);
      backend_.wait(*s, *p.filled);
    }
  }
}

void ExpertPools::leave_streaming(bool warm) {
  streaming_ = false;
  for (const Frame& f : frames_) {
    backend_.wait(*copies_stream_, *f.read);
    backend_.wait(*copies_stream_, *f.filled);
  }
  if (warm) refill();
}

ExpertPools::Batch ExpertPools::issue(Stream& copies, FillKind kind, int64_t bank, std::span<const int32_t> experts) {
  Pool& pool = pools_[bank];
  Batch batch{bank, free_frames_.front(), {experts.begin(), experts.end()}};
  free_frames_.pop_front();
  const Frame& frame = frames_[batch.frame];
  backend_.wait(copies, *frame.read);
  backend_.wait(copies, *frame.filled);
  const uint64_t before = pool.bank->filled_bytes;
  timeline_.begin(copies);
  int64_t at = frame.first_line;
  for (const int32_t e : experts) backend_.fill(copies, *pool.bank, pool.id(e), line(at++));
  timeline_.end(copies, true, pool.bank->filled_bytes - before);
  backend_.record(copies, *frame.filled);
  stream_copies_.copies[static_cast<size_t>(kind)] += experts.size();
  stream_copies_.bytes[static_cast<size_t>(kind)] += pool.bank->filled_bytes - before;
  phase_->bytes += pool.bank->filled_bytes - before;
  if (kind == FillKind::Demand) phase_->misses += experts.size();
  ++streamed_.batches;
  (kind == FillKind::Demand ? streamed_.demand : streamed_.ahead) += experts.size();
  return batch;
}

// Experts that a bank is likely to need: those that it ever did, or all of them where these are most or none.
void ExpertPools::copy_ahead() {
  while (ahead_bank_ < ahead_banks_ && free_frames_.size() > kept_free(frames_.size())) {
    const ExpertPlanner& planner = pools_[ahead_bank_].planner;
    if (!candidates_known_) {
      candidates_known_ = true;
      const int32_t experts = planner.options().experts;
      for (int32_t e = 0; e < experts; ++e)
        if (planner.touched(e)) candidates_.push_back(e);
      // What is demanded later waits behind all that is copied ahead: a few copies in vain cost less.
      if (candidates_.empty() || 4 * candidates_.size() >= 3 * static_cast<size_t>(experts)) {
        candidates_.resize(static_cast<size_t>(experts));
        std::iota(candidates_.begin(), candidates_.end(), 0);
      }
    }
    const size_t count = std::min(candidates_.size(), static_cast<size_t>(frame_lines_));
    if (count > 0)
      ahead_.push_back(
          issue(*ahead_stream_, FillKind::LayerPrefetch, ahead_bank_, std::span(candidates_).first(count)));
    candidates_.erase(candidates_.begin(), candidates_.begin() + static_cast<int64_t>(count));
    if (candidates_.empty()) ++ahead_bank_, candidates_known_ = false;
  }
}

void ExpertPools::stream_bank(Stream& stream, int64_t bank, std::span<const int32_t> request,
                              const std::function<void()>& compute) {
  Pool& pool = pools_[bank];
  pool.planner.touch(request);
  streamed_.needed += request.size();
  if (ahead_bank_ <= bank) ahead_bank_ = bank + 1, candidates_.clear(), candidates_known_ = false;
  std::deque<Batch> batches;
  for (; !ahead_.empty() && ahead_.front().bank == bank; ahead_.pop_front())
    batches.push_back(std::move(ahead_.front()));
  std::vector<char> there(static_cast<size_t>(pool.bank->pooled), 0);
  for (const Batch& b : batches)
    for (const int32_t e : b.experts) there[e] = 1;
  std::vector<int32_t> missing;
  for (const int32_t e : request)
    if (!there[e]) missing.push_back(e);
  size_t next = 0;
  bool first = true;
  while (!batches.empty() || next < missing.size()) {
    while (next < missing.size() && !free_frames_.empty()) {
      const size_t count = std::min(missing.size() - next, static_cast<size_t>(frame_lines_));
      batches.push_back(issue(*copies_stream_, FillKind::Demand, bank, std::span(missing).subspan(next, count)));
      next += count;
    }
    stream_batch(stream, pool, batches.front(), request, first, compute);
    free_frames_.push_back(batches.front().frame);
    batches.pop_front();
    copy_ahead();
  }
  if (first) pass(stream, pool, request, {}, true, compute);
}

void ExpertPools::stream_batch(Stream& stream, Pool& pool, const Batch& batch, std::span<const int32_t> request,
                               bool& first, const std::function<void()>& compute) {
  const Frame& frame = frames_[batch.frame];
  place_.assign(static_cast<size_t>(pool.bank->pooled), -1);
  auto at = static_cast<int32_t>(frame.first_line);
  for (const int32_t e : batch.experts) place_[e] = at++;
  const bool any = std::any_of(request.begin(), request.end(), [&](int32_t e) { return place_[e] >= 0; });
  if (!any) return;
  for (const int32_t e : request) change(pool, e, place_[e]);
  for (auto e = static_cast<int32_t>(pool.bank->pooled); e < pool.held(); ++e) change(pool, e, first ? 0 : -1);
  first = false;
  backend_.wait(stream, *frame.filled);
  backend_.serve(stream, *pool.bank, pool.changes);
  pool.changes.clear();
  if (options_.check_lines) backend_.check_served(stream, *pool.bank);
  timeline_.begin(stream);
  compute();
  timeline_.end(stream, false, 0);
  backend_.record(stream, *frame.read);
  // No table names a line that the next batch fills.
  for (const int32_t e : batch.experts) change(pool, e, -1);
}

}  // namespace fnx
