#include "libcore/engine/workload.h"

#include <algorithm>
#include <numeric>

#include "libcore/measure/clock.h"
#include "libcore/receipt/receipt.h"

namespace fnx {
namespace {

// Sequences that are closed whatever happens.
struct Slots {
  explicit Slots(StatePool& pool) : state(pool) {}
  ~Slots() {
    for (int32_t s : open) state.close(s);
  }
  Slots(const Slots&) = delete;
  Slots& operator=(const Slots&) = delete;
  StatePool& state;
  std::vector<int32_t> open;
};

}  // namespace

StateOptions Workload::state() const {
  StateOptions s;
  s.slots = static_cast<int64_t>(prompts.size());
  for (const auto& p : prompts) {
    s.tokens += static_cast<int64_t>(p.size()) + rounds;
    s.max_tokens = std::max(s.max_tokens, static_cast<int64_t>(p.size()) + rounds);
  }
  return s;
}

int64_t Workload::max_rows() const {
  int64_t rows = 1;
  for (const auto& p : prompts) rows = std::max(rows, std::min(chunk_rows, static_cast<int64_t>(p.size())));
  return std::max(rows, static_cast<int64_t>(prompts.size()));
}

double WorkloadRun::rounds_ns() const { return std::accumulate(round_ns.begin(), round_ns.end(), 0.0); }

WorkloadRun run_workload(Engine& engine, const Workload& work, const std::function<bool()>& stop) {
  WorkloadRun run;
  Slots slots(engine.state());
  const int64_t vocab = engine.config().vocab_size;
  const auto step = [&](std::span<const LaneInput> lanes, std::span<const Draw> draws) -> std::vector<int32_t> {
    run.stopped = run.stopped || (stop && stop());
    if (run.stopped) return {};
    std::vector<int32_t> drawn = engine.round(lanes, draws, vocab);
    run.tokens.insert(run.tokens.end(), drawn.begin(), drawn.end());
    if (work.hash_logits && !draws.empty()) run.logits_hashes.push_back(drawn_logits_hash(engine));
    if (work.after_forward) work.after_forward(drawn);
    return drawn;
  };

  // The draw after a sequence's tokens so far and `more` of this forward.
  const auto draw_of = [&](size_t sequence, int32_t row, size_t more) {
    Draw draw{row, work.sampling};
    draw.params.stream = sequence;
    draw.params.position = engine.state().length(slots.open[sequence]) + static_cast<int64_t>(more);
    return draw;
  };

  std::vector<int32_t> pending;
  const double began = now_ns();
  for (const auto& prompt : work.prompts) {
    slots.open.push_back(engine.state().open());
    for (size_t at = 0; at < prompt.size();) {
      const size_t n = std::min(static_cast<size_t>(work.chunk_rows), prompt.size() - at);
      const LaneInput lane{slots.open.back(), std::span(prompt).subspan(at, n)};
      at += n;
      const Draw draw = draw_of(slots.open.size() - 1, static_cast<int32_t>(n) - 1, n);
      const std::vector<int32_t> drawn = step({&lane, 1}, {&draw, at == prompt.size() ? size_t{1} : 0});
      pending.insert(pending.end(), drawn.begin(), drawn.end());
    }
  }
  run.prompts_ns = now_ns() - began;
  for (int64_t round = 0; round < work.rounds && !run.stopped; ++round) {
    const double round_began = now_ns();
    std::vector<LaneInput> lanes;
    std::vector<Draw> draws;
    for (size_t i = 0; i < pending.size(); ++i) {
      lanes.push_back({slots.open[i], std::span(pending).subspan(i, 1)});
      draws.push_back(draw_of(i, static_cast<int32_t>(i), 1));
    }
    pending = step(lanes, draws);
    run.round_ns.push_back(now_ns() - round_began);
  }
  return run;
}

int64_t different_rounds(const WorkloadRun& a, const WorkloadRun& b) {
  if (a.logits_hashes.size() != b.logits_hashes.size() || a.tokens.size() != b.tokens.size())
    return static_cast<int64_t>(std::max(a.logits_hashes.size(), b.logits_hashes.size()));
  int64_t different = a.tokens != b.tokens && a.logits_hashes == b.logits_hashes;
  for (size_t i = 0; i < a.logits_hashes.size(); ++i) different += a.logits_hashes[i] != b.logits_hashes[i];
  return different;
}

std::string logits_hash(const WorkloadRun& run) {
  std::string all;
  for (const std::string& hash : run.logits_hashes) all += hash;
  return xxh3_hex(all.data(), all.size());
}

std::string drawn_logits_hash(Engine& engine) {
  const std::vector<float> rows = engine.to_host(engine.drawn_logits());
  return xxh3_hex(rows.data(), rows.size() * sizeof(float));
}

}  // namespace fnx
