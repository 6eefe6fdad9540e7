#include "libcore/engine/context_run.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/error.h"
#include "libcore/engine/workload.h"
#include "libcore/measure/clock.h"
#include "libcore/receipt/receipt.h"

namespace fnx {

StateOptions ContextWork::state() const {
  StateOptions s;
  s.slots = static_cast<int64_t>(texts.size());
  s.max_tokens = 1;
  for (size_t i = 0; i < texts.size(); ++i) {
    auto tokens = static_cast<int64_t>(texts[i].size());
    if (i < questions.size())
      for (const auto& q : questions[i]) tokens += static_cast<int64_t>(q.size()) + answer_tokens;
    s.tokens += tokens;
    s.max_tokens = std::max(s.max_tokens, tokens);
  }
  return s;
}

int64_t ContextWork::max_rows() const {
  int64_t rows = std::max(std::min(chunk_rows, points.back()), static_cast<int64_t>(texts.size()));
  for (const auto& list : questions)
    for (const auto& q : list) rows = std::max(rows, static_cast<int64_t>(q.size()));
  return rows;
}

namespace {

class Growth {
 public:
  Growth(Engine& engine, const ContextWork& work) : engine_(engine), work_(work), vocab_(engine.config().vocab_size) {
    for (size_t i = 0; i < work.texts.size(); ++i) slots_.push_back(engine.state().open());
    run_.prompt_ns.assign(slots_.size(), 0);
  }
  ~Growth() {
    for (const int32_t slot : slots_) engine_.state().close(slot);
  }
  Growth(const Growth&) = delete;
  Growth& operator=(const Growth&) = delete;

  ContextRun run() {
    for (const int64_t point : work_.points) {
      if (point - done_ <= work_.rounds_at_point())
        throw Error(ErrorKind::Internal, fmt::format("no room for {} rounds and a prompt between {} and {} tokens",
                                                     work_.rounds_at_point(), done_, point));
      for (size_t i = 0; i < slots_.size(); ++i) read(i, point - work_.rounds_at_point());
      done_ = point - work_.rounds_at_point();
      measure(point);
      if (run_.stopped) return std::move(run_);
    }
    for (size_t i = 0; i < work_.questions.size(); ++i) ask(i);
    for (size_t i = 0; i < slots_.size() && work_.hash_states && !run_.stopped; ++i) {
      engine_.settle(slots_[i]);
      const std::vector<std::byte> bytes = engine_.state().dump(slots_[i]);
      run_.state_hashes.push_back(xxh3_hex(bytes.data(), bytes.size()));
    }
    return std::move(run_);
  }

 private:
  std::vector<int32_t> step(std::span<const LaneInput> lanes, std::span<const Draw> draws) {
    run_.stopped = run_.stopped || (work_.stop && work_.stop());
    if (run_.stopped) return std::vector<int32_t>(draws.size());
    std::vector<int32_t> drawn = engine_.round(lanes, draws, vocab_);
    run_.tokens.insert(run_.tokens.end(), drawn.begin(), drawn.end());
    rows_ += engine_.rows();
    return drawn;
  }
  void between() const {
    if (work_.after && !run_.stopped) work_.after(rows_);
  }

  // The prompt of a sequence up to `end` tokens; the last row draws.
  void read(size_t i, int64_t end) {
    for (int64_t at = done_; at < end && !run_.stopped;) {
      const int64_t n = std::min(work_.chunk_rows, end - at);
      const LaneInput lane{slots_[i],
                           std::span(work_.texts[i]).subspan(static_cast<size_t>(at), static_cast<size_t>(n))};
      const Draw draw{static_cast<int32_t>(n) - 1, {}};
      const double began = now_ns();
      at += n;
      step({&lane, 1}, {&draw, 1});
      run_.prompt_ns[i] += now_ns() - began;
      between();
    }
    if (!run_.stopped) run_.logits_hashes.push_back(drawn_logits_hash(engine_));
  }

  // Rounds whose tokens are the text's, whatever was drawn.
  void measure(int64_t point) {
    ContextRun::Point p{point, {}};
    for (int64_t round = 0; round < work_.rounds_at_point() && !run_.stopped; ++round, ++done_) {
      std::vector<LaneInput> lanes;
      std::vector<Draw> draws;
      for (size_t i = 0; i < slots_.size(); ++i) {
        lanes.push_back({slots_[i], std::span(work_.texts[i]).subspan(static_cast<size_t>(done_), 1)});
        draws.push_back({static_cast<int32_t>(i), {}});
      }
      const double began = now_ns();
      step(lanes, draws);
      if (round >= ContextWork::kWarmRounds) p.round_ns.push_back(now_ns() - began);
    }
    if (run_.stopped) return;
    run_.logits_hashes.push_back(drawn_logits_hash(engine_));
    if (work_.measured) work_.measured(point, p.round_ns);
    run_.points.push_back(std::move(p));
    between();
  }

  void ask(size_t i) {
    run_.answers.emplace_back();
    for (const std::vector<int32_t>& question : work_.questions[i]) {
      std::vector<int32_t> feed = question, answer;
      while (static_cast<int64_t>(answer.size()) < work_.answer_tokens && !run_.stopped) {
        const LaneInput lane{slots_[i], feed};
        const Draw draw{static_cast<int32_t>(feed.size()) - 1, {}};
        answer.push_back(step({&lane, 1}, {&draw, 1})[0]);
        feed.assign(1, answer.back());
      }
      run_.answers.back().push_back(std::move(answer));
    }
    between();
  }

  Engine& engine_;
  const ContextWork& work_;
  int64_t vocab_, done_ = 0, rows_ = 0;
  std::vector<int32_t> slots_;
  ContextRun run_;
};

}  // namespace

ContextRun run_context(Engine& engine, const ContextWork& work) { return Growth(engine, work).run(); }

}  // namespace fnx
