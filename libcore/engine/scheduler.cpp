#include "libcore/engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "kernels/error.h"
#include "libcore/dist/communicator.h"
#include "libcore/measure/clock.h"

namespace fnx {

namespace {

struct Active {
  size_t request = 0;
  int32_t slot = 0;
  size_t prompt_done = 0;  // prompt tokens in the state
  int64_t generated = 0;
  // Drawn and not yet in the state, then what was drafted behind it.
  std::vector<int32_t> feed;
  // Of the last round: its lane and first draw, the drafts that it kept, whether the answer has ended.
  int32_t lane = 0, first_draw = -1, kept = 0;
  int64_t left = 0;  // tokens that it may draw behind the next
  std::optional<Finish> end;
  // No generated token is in the state.
  bool feed_is_first() const { return generated <= 1; }
};

// The last generated token is never fed back.
int64_t state_tokens(const Request& r) {
  return static_cast<int64_t>(r.prompt.size()) + std::max<int64_t>(0, r.max_tokens - 1);
}

// Of `count` rows from position `start` on, those that have more complete blocks than they may select.
int64_t selecting(const ModelConfig& c, int64_t start, size_t count) {
  if (std::find(c.layer_types.begin(), c.layer_types.end(), LayerType::SparseAttention) == c.layer_types.end())
    return 0;
  const int64_t first = (c.index_blocks() + 1) * c.index_ratio - 1, end = start + static_cast<int64_t>(count);
  return std::max<int64_t>(0, end - std::max(start, first));
}

// The requests of one run and what is under way.
class Run {
 public:
  Run(Engine& engine, std::span<const Request> requests, const SchedulerOptions& options, const SchedulerEvents& events)
      : engine_(engine),
        requests_(requests),
        o_(options),
        events_(events),
        own_policy_(options.draft),
        policy_(options.policy != nullptr ? *options.policy : own_policy_) {
    const int64_t vocab = engine.config().vocab_size;
    valid_ = o_.valid_ids > 0 ? std::min(o_.valid_ids, vocab) : vocab;
    stats_.first_token_ns.assign(requests.size(), 0), stats_.started_ns.assign(requests.size(), 0);
    progress_.resize(requests.size());
    for (const Request& r : requests) {
      if (r.reuse_tokens > 0) ++snapshots_[{r.reuse_of, r.reuse_tokens}].users;
      if (r.prompt.empty()) throw Error(ErrorKind::Input, "a prompt without tokens: give at least one");
      prompt_total_ += static_cast<int64_t>(r.prompt.size());
    }
  }

  SchedulerStats run() {
    while (started_ < requests_.size() || !active_.empty()) {
      if (events_.stop && events_.stop()) {
        interrupt();
        break;
      }
      for (size_t i = 0; i < requests_.size() && static_cast<int64_t>(active_.size()) < o_.parallel; ++i)
        if (progress_[i] == Progress::Waits && ready(requests_[i])) start(i);
      step();
    }
    learn();
    return std::move(stats_);
  }

 private:
  bool drafting() const { return o_.draft.most > 0; }
  const Request& request(const Active& a) const { return requests_[a.request]; }

  void interrupt() {
    for (const Active& a : active_) close(a, Finish::Interrupted);
    for (size_t i = 0; i < requests_.size(); ++i)
      if (progress_[i] == Progress::Waits && events_.finished) events_.finished(i, Finish::Interrupted);
  }

  // Sources come earlier in the list, so one of those that wait is always ready when none runs.
  bool ready(const Request& r) const {
    return r.reuse_tokens == 0 || snapshots_.at({r.reuse_of, r.reuse_tokens}).saved ||
           progress_[r.reuse_of] == Progress::Ended;
  }

  void start(size_t i) {
    stats_.started_ns[i] = now_ns() - began_;
    const Request& r = requests_[i];
    Active a;
    a.request = i;
    const auto it = r.reuse_tokens > 0 ? snapshots_.find({r.reuse_of, r.reuse_tokens}) : snapshots_.end();
    if (it != snapshots_.end() && it->second.saved) {
      a.slot = engine_.state().restore(*it->second.saved);
      a.prompt_done = static_cast<size_t>(r.reuse_tokens);
      prompt_done_ += r.reuse_tokens;
      ++stats_.reused_requests, stats_.reused_tokens += r.reuse_tokens;
    } else {
      a.slot = engine_.state().open();
    }
    if (it != snapshots_.end() && --it->second.users == 0) it->second.saved.reset();
    active_.push_back(std::move(a));
    progress_[i] = Progress::Runs;
    ++started_;
  }

  void save_prompts() {
    for (const Active& a : active_) {
      const auto it = snapshots_.find({a.request, static_cast<int64_t>(a.prompt_done)});
      if (it == snapshots_.end() || it->second.saved || it->second.users == 0 || !a.feed_is_first()) continue;
      engine_.settle(a.slot);
      it->second.saved.emplace(engine_.state().save(a.slot));
      ++stats_.snapshots, stats_.snapshot_bytes += it->second.saved->bytes();
    }
  }

  void close(const Active& a, Finish why) {
    if (events_.closing && why != Finish::Interrupted) events_.closing(a.request, a.slot);
    engine_.state().close(a.slot);
    progress_[a.request] = Progress::Ended;
    policy_.forget(a.request);
    if (events_.finished) events_.finished(a.request, why);
  }

  void step() {
    const double began = now_ns();
    const bool any_prompt = plan_lanes();
    const std::vector<int32_t> drawn = engine_.round(lanes_, draws_, valid_, [&] { learn(); });
    ++stats_.forwards;
    if (any_prompt && events_.prompt_rows) events_.prompt_rows(prompt_done_, prompt_total_);
    report_draft_logits();
    for (Active& a : active_) count_kept(a, drawn);
    const double reporting = report_logits();
    for (Active& a : active_)
      if (a.first_draw >= 0) take(a, drawn);
    // What the draft head still absorbs of a prompt is the prompt's time.
    if (any_prompt && !drawn.empty()) engine_.stream().synchronize();
    const double verified = now_ns();
    (any_prompt ? stats_.prompt_ns : stats_.decode_ns).push_back(verified - began + draft_ns_);
    if (drafting()) {
      const GraphCounters& graphs = engine_.graph_counters();
      const int64_t before = std::exchange(recordings_, graphs.captures + graphs.failed + graphs.firsts);
      if (!any_prompt) note_round(stats_.decode_ns.back() - reporting, recordings_ != before);
      draft(any_prompt);
      draft_ns_ = now_ns() - verified;
    }
    save_prompts();
    size_t going = 0;
    for (size_t i = 0; i < active_.size(); ++i)
      if (active_[i].end)
        close(active_[i], *active_[i].end);
      else if (i != going++)
        active_[going - 1] = std::move(active_[i]);
    active_.resize(going);
  }

  // One lane a sequence: its next prompt chunk, or its pending token and drafts. Draws from the last row of each prompt
  // that ends, and from every other row. True when a prompt is among the lanes.
  bool plan_lanes() {
    lanes_.clear(), draws_.clear();
    bool any_prompt = false;
    int32_t row = 0;
    for (Active& a : active_) {
      const Request& r = request(a);
      a.lane = static_cast<int32_t>(lanes_.size()), a.first_draw = -1;
      int32_t first_drawn = 0;
      if (a.prompt_done < r.prompt.size()) {
        size_t end = r.prompt.size();
        for (const int64_t at : r.save_at)
          if (static_cast<size_t>(at) > a.prompt_done) end = std::min(end, static_cast<size_t>(at));
        const size_t n = std::min<size_t>(o_.chunk_rows, end - a.prompt_done);
        lanes_.push_back({a.slot, std::span(r.prompt).subspan(a.prompt_done, n)});
        a.prompt_done += n;
        any_prompt = true;
        stats_.prompt_rows += static_cast<int64_t>(n);
        prompt_done_ += static_cast<int64_t>(n);
        first_drawn = static_cast<int32_t>(n) - (a.prompt_done == r.prompt.size() ? 1 : 0);
      } else {
        lanes_.push_back({a.slot, a.feed, static_cast<int32_t>(a.feed.size()) - 1});
      }
      const auto count = static_cast<int32_t>(lanes_.back().tokens.size());
      const int64_t length = engine_.state().length(a.slot);
      stats_.selecting_rows += selecting(engine_.config(), length, lanes_.back().tokens.size());
      if (first_drawn < count) a.first_draw = static_cast<int32_t>(draws_.size());
      for (int32_t i = first_drawn; i < count; ++i) {
        Draw draw{row + i, r.sampling};
        draw.params.stream = a.request;
        draw.params.position = length + i + 1;
        draws_.push_back(draw);
      }
      row += count;
    }
    return any_prompt;
  }

  bool stops(const Request& r, int32_t token) const {
    return std::find(r.stop_ids.begin(), r.stop_ids.end(), token) != r.stop_ids.end();
  }

  // The drafts that are what was drawn, up to one that ends the answer.
  void count_kept(Active& a, std::span<const int32_t> drawn) const {
    a.kept = 0;
    const int32_t tried = lanes_[static_cast<size_t>(a.lane)].tried;
    while (a.kept < tried) {
      const int32_t token = drawn[static_cast<size_t>(a.first_draw + a.kept)];
      if (token != a.feed[static_cast<size_t>(a.kept) + 1] || stops(request(a), token)) break;
      ++a.kept;
    }
  }

  // The tokens that the kept rows drew.
  void take(Active& a, std::span<const int32_t> drawn) {
    const Request& r = request(a);
    if (r.max_tokens == 0) {  // a run for its prompt's logits alone
      a.end = Finish::Length;
      return;
    }
    if (!a.feed.empty()) stats_.decode_rows += 1 + a.kept;
    a.feed.clear();
    for (int32_t i = 0; i <= a.kept; ++i) {
      const int32_t token = drawn[static_cast<size_t>(a.first_draw + i)];
      a.feed.assign(1, token);
      if (a.generated++ == 0) stats_.first_token_ns[a.request] = now_ns() - began_;
      if (events_.token) events_.token(a.request, token);
    }
    if (stops(r, a.feed[0]))
      a.end = Finish::Stop;
    else if (a.generated >= r.max_tokens)
      a.end = Finish::Length;
  }

  void note_round(double ns, bool recorded) {
    noted_.depth = depth_, noted_.ns = ns, noted_.recorded = recorded;
    noted_.streams.clear();
    for (const Active& a : active_) {
      const int32_t tried = lanes_[static_cast<size_t>(a.lane)].tried;
      noted_.streams.push_back({{a.request, a.left}, tried, a.kept});
      stats_.drafted += tried, stats_.drafts_kept += a.kept;
    }
  }

  // From the round before, where that has waited for the device to be busy.
  void learn() {
    if (noted_.streams.empty()) return;
    policy_.observe(noted_);
    stats_.draft_rounds.push_back(noted_);
    noted_.streams.clear();
  }

  // The streams of the last decision go on, and the policy needs nothing of this round for the next.
  bool stays_plain(bool any_prompt) {
    if (any_prompt || plain_ahead_ == 0 || active_.size() != streams_.size()) return false;
    if (std::any_of(active_.begin(), active_.end(), [](const Active& a) { return a.end.has_value(); })) return false;
    --plain_ahead_;
    for (Active& a : active_) --a.left;
    return true;
  }

  // Settles what was tried and drafts for the next round.
  void draft(bool any_prompt) {
    if (stays_plain(any_prompt)) return;
    learn();
    streams_.clear();
    bool tried_any = false;
    for (Active& a : active_) {
      tried_any = tried_any || lanes_[static_cast<size_t>(a.lane)].tried > 0;
      if (a.end || a.first_draw < 0) continue;
      // The last token of an answer is never fed back.
      a.left = request(a).max_tokens - a.generated - 1;
      streams_.push_back({a.request, a.left});
    }
    depth_ = policy_.decide(streams_);
    plain_ahead_ = depth_ == 0 ? policy_.plain_ahead(streams_.size()) : 0;
    // Ranks measure different times.
    if (Communicator* ranks = engine_.options().ranks; ranks != nullptr && !o_.draft.fixed) {
      const int64_t decided = ranks->of_rank_0(plain_ahead_ * (kMostDrafts + 1) + depth_);
      depth_ = static_cast<int32_t>(decided % (kMostDrafts + 1)), plain_ahead_ = decided / (kMostDrafts + 1);
    }
    if (depth_ == 0 && !tried_any) return;
    std::vector<Proposal> proposals;
    std::vector<Active*> owners;
    for (Active& a : active_) {
      const Request& r = request(a);
      const int32_t tried = lanes_[static_cast<size_t>(a.lane)].tried;
      int32_t depth = 0;
      if (!a.end && a.first_draw >= 0) depth = static_cast<int32_t>(std::min<int64_t>(depth_, a.left));
      if (tried == 0 && depth == 0) continue;
      Proposal p{a.lane, a.kept, a.feed[0], depth, r.sampling};
      p.params.stream = a.request;
      proposals.push_back(p);
      owners.push_back(&a);
    }
    const std::vector<std::vector<int32_t>> drafts = engine_.propose(proposals, valid_);
    for (size_t i = 0; i < owners.size(); ++i) {
      std::vector<int32_t>& feed = owners[i]->feed;
      feed.insert(feed.end(), drafts[i].begin(), drafts[i].end());
      if (events_.drafts && feed.size() > 1)
        events_.drafts(owners[i]->request, engine_.state().length(owners[i]->slot) + 1, std::span(feed).subspan(1));
    }
  }

  void report_draft_logits() {
    if (!o_.draft_logits || !engine_.has_draft_head()) return;
    for (size_t i = 0; i < active_.size(); ++i) {
      const Engine::DraftRows& d = engine_.draft_rows()[i];
      for (int32_t j = 0; j < d.count; ++j)
        events_.draft_logits(active_[i].request,
                             engine_.to_host(engine_.draft_logits(std::vector<int32_t>{d.first_row + j})));
    }
  }

  // The time that it takes.
  double report_logits() {
    if (!events_.logits) return 0;
    const double began = now_ns();
    int32_t row = 0;
    for (const Active& a : active_) {
      const auto& lane = lanes_[static_cast<size_t>(a.lane)];
      const auto count = static_cast<int32_t>(lane.tokens.size());
      const int32_t undrawn = count - (a.first_draw >= 0 ? 1 + lane.tried : 0);
      for (int32_t j = 0; o_.all_logits && j < undrawn; ++j)
        events_.logits(a.request, engine_.to_host(engine_.logits(std::vector<int32_t>{row + j})));
      for (int32_t j = 0; a.first_draw >= 0 && j <= a.kept; ++j)
        events_.logits(a.request, engine_.to_host(engine_.drawn_logits().rows(a.first_draw + j, 1)));
      row += count;
    }
    return now_ns() - began;
  }

  Engine& engine_;
  std::span<const Request> requests_;
  const SchedulerOptions& o_;
  const SchedulerEvents& events_;
  DraftPolicy own_policy_;
  DraftPolicy& policy_;
  SchedulerStats stats_;
  int64_t valid_ = 0, prompt_total_ = 0, prompt_done_ = 0;
  const double began_ = now_ns();
  // What requests go on from: (source, tokens). Dropped when the last of its users has started.
  struct Saved {
    int64_t users = 0;
    std::optional<Snapshot> saved;
  };
  enum class Progress : uint8_t { Waits, Runs, Ended };
  std::map<std::pair<size_t, int64_t>, Saved> snapshots_;
  std::vector<Progress> progress_;
  size_t started_ = 0;
  std::vector<Active> active_;
  std::vector<LaneInput> lanes_;
  std::vector<Draw> draws_;
  std::vector<DraftStream> streams_;
  int32_t depth_ = 0;        // decided for the next round
  int64_t plain_ahead_ = 0;  // rounds of streams_ whose depth is decided too: none
  DraftRound noted_;         // and not learned from; of no stream: none
  double draft_ns_ = 0;      // spent on its drafts
  int64_t recordings_ = 0;
};

}  // namespace

StateOptions state_for(std::span<const Request> requests, int64_t parallel) {
  StateOptions s;
  s.slots = std::max<int64_t>(1, std::min<int64_t>(parallel, static_cast<int64_t>(requests.size())));
  std::vector<int64_t> need;
  for (const Request& r : requests) need.push_back(state_tokens(r));
  std::sort(need.rbegin(), need.rend());
  need.resize(std::min<size_t>(need.size(), s.slots));
  s.max_tokens = need.empty() ? 1 : need.front();
  // Every slot may hold the longest sequences at once; each rounds up to a page by itself, which the pool allows for.
  s.tokens = std::accumulate(need.begin(), need.end(), int64_t{0});
  return s;
}

int64_t max_rows_for(std::span<const Request> requests, int64_t parallel, int64_t chunk_rows, int64_t drafts) {
  int64_t longest = 1;
  for (const Request& r : requests) longest = std::max(longest, static_cast<int64_t>(r.prompt.size()));
  return parallel * std::max(std::min(chunk_rows, longest), 1 + drafts);
}

void plan_reuse(std::span<Request> requests, int64_t least) {
  for (size_t j = 0; j < requests.size(); ++j) {
    Request& r = requests[j];
    for (size_t i = 0; i < j; ++i) {
      const std::vector<int32_t>& other = requests[i].prompt;
      const auto shared = std::mismatch(r.prompt.begin(), r.prompt.end() - 1, other.begin(), other.end());
      const auto length = static_cast<int64_t>(shared.first - r.prompt.begin());
      if (length >= least && length > r.reuse_tokens) r.reuse_of = i, r.reuse_tokens = length;
    }
    if (r.reuse_tokens == 0) continue;
    std::vector<int64_t>& at = requests[r.reuse_of].save_at;
    const auto place = std::lower_bound(at.begin(), at.end(), r.reuse_tokens);
    if (place == at.end() || *place != r.reuse_tokens) at.insert(place, r.reuse_tokens);
  }
}

SchedulerStats run_requests(Engine& engine, std::span<const Request> requests, const SchedulerOptions& options,
                            const SchedulerEvents& events) {
  const EngineOptions& e = engine.options();
  for (size_t i = 0; i < requests.size(); ++i) {
    const Request& r = requests[i];
    if (r.reuse_tokens != 0 && (r.reuse_of >= i || r.reuse_tokens >= static_cast<int64_t>(r.prompt.size())))
      throw Error(ErrorKind::Internal,
                  fmt::format("request {} goes on from {} tokens of request {}", i, r.reuse_tokens, r.reuse_of));
  }
  if (options.draft.most < 0 || options.draft.most > std::min<int64_t>(kMostDrafts, e.state.trials) ||
      (options.draft.most > 0 && !engine.has_draft_head()))
    throw Error(ErrorKind::Internal, fmt::format("{} drafts a round: the engine can take back {}", options.draft.most,
                                                 engine.has_draft_head() ? e.state.trials : 0));
  return Run(engine, requests, options, events).run();
}

}  // namespace fnx
