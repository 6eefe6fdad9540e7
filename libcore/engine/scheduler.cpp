#include "libcore/engine/scheduler.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "kernels/error.h"
#include "libcore/measure/clock.h"

namespace fnx {

namespace {

struct Active {
  size_t request = 0;
  int32_t slot = 0;
  size_t prompt_done = 0;  // prompt tokens in the state
  int64_t generated = 0;
  int32_t pending = -1;  // drawn and not yet in the state
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

}  // namespace

StateOptions state_for(std::span<const Request> requests, int64_t parallel, int64_t max_positions) {
  StateOptions s;
  s.slots = std::max<int64_t>(1, std::min<int64_t>(parallel, static_cast<int64_t>(requests.size())));
  std::vector<int64_t> need;
  for (const Request& r : requests) {
    const auto whole = static_cast<int64_t>(r.prompt.size()) + r.max_tokens;
    if (whole > max_positions)
      throw Error(ErrorKind::Input,
                  fmt::format("a prompt of {} tokens and {} to generate exceed the model's context of {} "
                              "tokens; shorten the prompt or lower --max-tokens",
                              r.prompt.size(), r.max_tokens, max_positions));
    need.push_back(state_tokens(r));
  }
  std::sort(need.rbegin(), need.rend());
  need.resize(std::min<size_t>(need.size(), s.slots));
  s.max_tokens = need.empty() ? 1 : need.front();
  // Every slot may hold the longest sequences at once; each rounds up to a page by itself, which the pool allows for.
  s.tokens = std::accumulate(need.begin(), need.end(), int64_t{0});
  return s;
}

SchedulerStats run_requests(Engine& engine, std::span<const Request> requests, const SchedulerOptions& o,
                            const SchedulerEvents& events) {
  SchedulerStats stats;
  const int64_t vocab = engine.config().vocab_size;
  const int64_t valid = o.valid_ids > 0 ? std::min(o.valid_ids, vocab) : vocab;
  const double began = now_ns();
  stats.first_token_ns.assign(requests.size(), 0);
  std::vector<Active> active;
  size_t next = 0;
  int64_t prompt_total = 0, prompt_done = 0;
  for (const Request& r : requests) {
    if (r.prompt.empty()) throw Error(ErrorKind::Input, "a prompt without tokens: give at least one");
    prompt_total += static_cast<int64_t>(r.prompt.size());
  }
  const auto finish = [&](const Active& a, Finish why) {
    engine.state().close(a.slot);
    if (events.finished) events.finished(a.request, why);
  };

  while (next < requests.size() || !active.empty()) {
    if (events.stop && events.stop()) {
      for (const Active& a : active) finish(a, Finish::Interrupted);
      for (; next < requests.size(); ++next)
        if (events.finished) events.finished(next, Finish::Interrupted);
      break;
    }
    while (next < requests.size() && static_cast<int64_t>(active.size()) < o.parallel) {
      active.push_back({next, engine.state().open()});
      ++next;
    }

    // One lane a sequence: its next prompt chunk or its pending token.
    std::vector<LaneInput> lanes;
    bool any_prompt = false;
    for (Active& a : active) {
      const Request& r = requests[a.request];
      if (a.prompt_done < r.prompt.size()) {
        const size_t n = std::min<size_t>(o.chunk_rows, r.prompt.size() - a.prompt_done);
        lanes.push_back({a.slot, std::span(r.prompt).subspan(a.prompt_done, n)});
        a.prompt_done += n;
        any_prompt = true;
        stats.prompt_rows += static_cast<int64_t>(n);
        prompt_done += static_cast<int64_t>(n);
      } else {
        lanes.push_back({a.slot, std::span(&a.pending, 1)});
        ++stats.decode_rows;
      }
    }
    // The last row of each prompt that ends and of each pending token is drawn from.
    std::vector<Draw> draws;
    std::vector<size_t> drawing;  // their index in `active`
    int32_t row = 0;
    for (size_t i = 0; i < active.size(); ++i) {
      const Request& r = requests[active[i].request];
      const int64_t length = engine.state().length(active[i].slot);
      stats.selecting_rows += selecting(engine.config(), length, lanes[i].tokens.size());
      row += static_cast<int32_t>(lanes[i].tokens.size());
      if (active[i].prompt_done < r.prompt.size()) continue;
      Draw draw{row - 1, r.sampling};
      draw.params.stream = active[i].request;
      draw.params.position = length + static_cast<int64_t>(lanes[i].tokens.size());
      draws.push_back(draw);
      drawing.push_back(i);
    }
    const double step_began = now_ns();
    const std::vector<int32_t> drawn = engine.round(lanes, draws, valid);
    ++stats.forwards;
    if (any_prompt && events.prompt_rows) events.prompt_rows(prompt_done, prompt_total);

    if (o.draft_logits && engine.has_draft_head())
      for (size_t i = 0; i < active.size(); ++i) {
        const Engine::DraftRows& d = engine.draft_rows()[i];
        for (int32_t j = 0; j < d.count; ++j)
          events.draft_logits(active[i].request,
                              engine.to_host(engine.draft_logits(std::vector<int32_t>{d.first_row + j})));
      }
    if (events.logits) {
      row = 0;
      size_t d = 0;
      for (size_t i = 0; i < active.size(); ++i) {
        const auto count = static_cast<int32_t>(lanes[i].tokens.size());
        const bool draws_here = d < drawing.size() && drawing[d] == i;
        if (o.all_logits)
          for (int32_t j = 0; j + (draws_here ? 1 : 0) < count; ++j)
            events.logits(active[i].request, engine.to_host(engine.logits(std::vector<int32_t>{row + j})));
        if (draws_here) events.logits(active[i].request, engine.to_host(engine.drawn_logits().rows(d++, 1)));
        row += count;
      }
    }
    if (!drawing.empty()) {
      std::vector<char> done(active.size(), 0);
      for (size_t d = 0; d < drawing.size(); ++d) {
        Active& a = active[drawing[d]];
        const Request& r = requests[a.request];
        if (r.max_tokens == 0) {  // a run for its prompt's logits alone
          finish(a, Finish::Length);
          done[drawing[d]] = 1;
          continue;
        }
        a.pending = drawn[d];
        if (a.generated++ == 0) stats.first_token_ns[a.request] = now_ns() - began;
        if (events.token) events.token(a.request, a.pending);
        const bool stop = std::find(r.stop_ids.begin(), r.stop_ids.end(), a.pending) != r.stop_ids.end();
        if (!stop && a.generated < r.max_tokens) continue;
        finish(a, stop ? Finish::Stop : Finish::Length);
        done[drawing[d]] = 1;
      }
      size_t kept = 0;
      for (size_t i = 0; i < active.size(); ++i)
        if (!done[i]) active[kept++] = active[i];
      active.resize(kept);
    }
    (any_prompt ? stats.prompt_ns : stats.decode_ns).push_back(now_ns() - step_began);
  }
  return stats;
}

}  // namespace fnx
