#include "tests/support/replayed_backend.h"

#include <cstring>
#include <functional>
#include <optional>
#include <vector>

#include "kernels/cpu/backend.h"
#include "kernels/expert_planner.h"

namespace fnx::test {

namespace {

using Calls = std::vector<std::function<void()>>;

struct ReplayedGraph : Graph {
  explicit ReplayedGraph(Calls c) : calls(std::move(c)) {}
  void launch(Stream&) override {
    for (const auto& call : calls) call();
  }
  uint64_t bytes() const override { return 0; }
  int64_t launches() const override { return static_cast<int64_t>(calls.size()); }
  Calls calls;
};

class ReplayedBackend : public cpu::CpuBackend {
 public:
  using CpuBackend::CpuBackend;

  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& calls) override {
    recorded_.emplace();
    try {
      calls();
    } catch (...) {
      recorded_.reset();
      throw;
    }
    auto graph = std::make_unique<ReplayedGraph>(std::move(*recorded_));
    recorded_.reset();
    return graph;
  }

  void copy(Stream& s, View dst, View src) override {
    run([this, &s, dst, src] { CpuBackend::copy(s, dst, src); });
  }
  void clear(Stream& s, View dst) override {
    run([this, &s, dst] { CpuBackend::clear(s, dst); });
  }
  void gather(Stream& s, View ids, View from, View to, const RowCopies& copies) override {
    run([this, &s, ids, from, to, copies] { CpuBackend::gather(s, ids, from, to, copies); });
  }
  void embed(Stream& s, View tokens, View table, View out) override {
    run([this, &s, tokens, table, out] { CpuBackend::embed(s, tokens, table, out); });
  }
  void grouped_norm(Stream& s, const NormWeights& w, int64_t group, View x, View out) override {
    run([this, &s, w, group, x, out] { CpuBackend::grouped_norm(s, w, group, x, out); });
  }
  void linear(Stream& s, const Linear& l, View x, View y) override {
    run([this, &s, &l, x, y] { CpuBackend::linear(s, l, x, y); });
  }
  void add(Stream& s, int64_t repeat, View a, View b, View out) override {
    run([this, &s, repeat, a, b, out] { CpuBackend::add(s, repeat, a, b, out); });
  }
  void hc_mix(Stream& s, const HcWeights& w, const Injection& lacking, View stack, View u, View inj) override {
    run([this, &s, w, lacking, stack, u, inj] { CpuBackend::hc_mix(s, w, lacking, stack, u, inj); });
  }
  void hc_inject(Stream& s, const Injection& lacking, View stack) override {
    run([this, &s, lacking, stack] { CpuBackend::hc_inject(s, lacking, stack); });
  }
  void gdn(Stream& s, const GdnWeights& w, const Batch& batch, View qkv, View z, View b, View a, const GdnState& state,
           View out) override {
    rows(batch, [=, this, &s](const Batch& now) { CpuBackend::gdn(s, w, now, qkv, z, b, a, state, out); });
  }
  void qsa_write(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& r, const KvCache& kv) override {
    rows(batch, [=, this, &s](const Batch& now) { CpuBackend::qsa_write(s, w, now, r, kv); });
  }
  void qsa_select(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& r, const KvCache& kv) override {
    rows(batch, [=, this, &s](const Batch& now) { CpuBackend::qsa_select(s, w, now, r, kv); });
  }
  void qsa_attend(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& r, const KvCache& kv,
                  View out) override {
    rows(batch, [=, this, &s](const Batch& now) { CpuBackend::qsa_attend(s, w, now, r, kv, out); });
  }
  void router(Stream& s, bool normalise, View logits, View ids, View weights) override {
    run([this, &s, normalise, logits, ids, weights] { CpuBackend::router(s, normalise, logits, ids, weights); });
  }
  void plan_experts(Stream& s, ExpertBank& bank, const PoolOptions& options, int64_t k, View ids, View state,
                    View lines, const Foreseen& f) override {
    run([=, this, &s, &bank] { CpuBackend::plan_experts(s, bank, options, k, ids, state, lines, f); });
  }
  void fill_planned(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                    const Foreseen& f) override {
    run([=, this, &s, &bank] { CpuBackend::fill_planned(s, bank, options, state, lines, f); });
  }
  void settle_planned(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                      const Foreseen& f) override {
    run([=, this, &s, &bank] { CpuBackend::settle_planned(s, bank, options, state, lines, f); });
  }
  void fill_foreseen(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, const Foreseen& f) override {
    run([=, this, &s, &bank] { CpuBackend::fill_foreseen(s, bank, options, state, f); });
  }
  void check_served(Stream& s, const ExpertBank& bank) override {
    run([this, &s, &bank] { CpuBackend::check_served(s, bank); });
  }
  void experts(Stream& s, const ExpertBank& bank, View x, View ids, View slots) override {
    run([this, &s, &bank, x, ids, slots] { CpuBackend::experts(s, bank, x, ids, slots); });
  }
  void take_slots(Stream& s, int64_t per_part, View ids, View parts, View slots) override {
    run([this, &s, per_part, ids, parts, slots] { CpuBackend::take_slots(s, per_part, ids, parts, slots); });
  }
  void join_columns(Stream& s, std::span<const View> parts, View out) override {
    run([this, &s, own = std::vector<View>(parts.begin(), parts.end()), out] {
      CpuBackend::join_columns(s, own, out);
    });
  }
  void swiglu(Stream& s, View gate, View up, View out) override {
    run([this, &s, gate, up, out] { CpuBackend::swiglu(s, gate, up, out); });
  }
  void combine(Stream& s, View slots, View weights, View shared, View shared_gate, View y) override {
    run([=, this, &s] { CpuBackend::combine(s, slots, weights, shared, shared_gate, y); });
  }
  void ngram_decode(Stream& s, int bits, View packed, View bias, View out) override {
    run([this, &s, bits, packed, bias, out] { CpuBackend::ngram_decode(s, bits, packed, bias, out); });
  }
  void ple_mix(Stream& s, const PleWeights& w, const Batch& batch, View key, View value, View state,
               View stack) override {
    rows(batch, [=, this, &s](const Batch& now) { CpuBackend::ple_mix(s, w, now, key, value, state, stack); });
  }
  void sample(Stream& s, int64_t valid, bool greedy, View params, View logits, View ids) override {
    run([this, &s, valid, greedy, params, logits, ids] { CpuBackend::sample(s, valid, greedy, params, logits, ids); });
  }

 private:
  void run(std::function<void()> call) {
    if (recorded_)
      recorded_->push_back(std::move(call));
    else
      call();
  }
  void rows(const Batch& batch, std::function<void(const Batch&)> call) {
    run([batch, call = std::move(call)] {
      std::vector<Lane> lanes(static_cast<size_t>(batch.lane_table.shape[0]));
      std::memcpy(lanes.data(), batch.lane_table.data, lanes.size() * sizeof(Lane));
      Batch now = batch;
      now.lanes = lanes;
      call(now);
    });
  }

  std::optional<Calls> recorded_;
};

}  // namespace

std::unique_ptr<Backend> make_replayed_backend(const CpuOptions& options) {
  return std::make_unique<ReplayedBackend>(options);
}

}  // namespace fnx::test
