// The reference backend: see make_cpu_backend in kernels/ops.h. One source a family of operations.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <vector>

#include "kernels/cpu/threads.h"
#include "kernels/expert_extent.h"
#include "kernels/ops.h"

namespace fnx::cpu {

// Operations are done when they return.
struct CpuEvent : Event {
  void wait() override {}
  std::chrono::steady_clock::time_point at;
};

// Intermediate rows of one operation; grows to the largest request and is reused.
struct CpuStream : Stream {
  void synchronize() override {}
  float* scratch(int which, int64_t count) {
    if (static_cast<int64_t>(scratch_[which].size()) < count) scratch_[which].resize(count);
    return scratch_[which].data();
  }

 private:
  std::vector<float> scratch_[4];
};

// Bytes of decoded weights that may be kept; shared by all matrices of a backend.
struct DecodedBudget {
  uint64_t limit = 0;
  std::atomic<uint64_t> used{0};
  bool take(uint64_t bytes);
};

// A matrix as panels (kernels/cpu/dense.h). EXL3 weights are decoded at first use and kept while the budget lasts;
// beyond it they are decoded again at every use.
class CpuLinear : public Linear {
 public:
  CpuLinear(LinearSource source, DecodedBudget& budget);
  // Weights that may change from call to call: they are decoded at every use.
  void move_to(const std::byte* weights);

  // y[r] = W x[r] + bias for rows of stride `in` and `out`; the caller's thread does all of it.
  void apply(const float* x, int64_t rows, float* y);
  // The same spread over the pool.
  void apply(ThreadPool& pool, const float* x, int64_t rows, float* y);

 private:
  int64_t blocks() const { return (out + exl3::kHadamard - 1) / exl3::kHadamard; }  // of 128 outputs
  int64_t block_bytes() const;
  bool keep();  // true when the decoded matrix may be kept
  void decode_block(int64_t block, std::byte* to) const;
  void rotate(const float* x, float* xh) const;
  void block_rows(int64_t block, const std::byte* weights, const float* x, int64_t rows, float* y) const;

  LinearSource source_;
  DecodedBudget& budget_;
  bool quantized_ = false, half_ = false;  // half_: panels hold fp16, otherwise fp32
  int kept_ = -1;                          // -1: not asked yet
  std::vector<std::byte> panels_;
  std::vector<uint8_t> decoded_;  // one a block
};

struct CpuExperts : ExpertBank {
  struct Expert {
    std::unique_ptr<CpuLinear> gate, up, down;
    ExpertExtent extent;
    int64_t at = 0;                   // in the arena
    const std::byte* line = nullptr;  // that it is served from
    bool served = true;
  };
  std::vector<Expert> list;
  Buffer arena;
  const std::byte* home(int32_t expert) const { return arena.view(DType::U8, {0}).data + list[expert].at; }
};

// Of the batch's i-th lane.
inline Trial trial_of(const Batch& batch, size_t i) {
  if (batch.trials.rank == 0) return {};
  const int32_t* t = batch.trials.as<int32_t>() + 2 * i;
  return {t[0], t[1]};
}

// Keeps what the next call of a lane reads: of the `history` rows in `past`, the `kept` after them and the lane's own
// `rows`, the last history + tried.
inline void keep_history(float* past, const float* rows, int64_t width, int64_t history, const Lane& lane,
                         const Trial& trial) {
  const int64_t old = history + trial.kept, from = trial.kept + lane.rows - trial.tried;
  for (int64_t i = 0; i < history + trial.tried; ++i) {
    const float* row = from + i < old ? past + (from + i) * width : rows + (from + i - old) * width;
    if (row != past + i * width) std::copy_n(row, width, past + i * width);
  }
}

class CpuBackend : public Backend {
 public:
  explicit CpuBackend(const CpuOptions& options);

  std::string_view name() const override { return "cpu"; }
  DType kv_dtype() const override { return DType::F32; }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<CpuStream>(); }
  std::unique_ptr<Event> make_event() override { return std::make_unique<CpuEvent>(); }
  std::unique_ptr<Event> make_timed_event() override { return make_event(); }
  double elapsed_ns(Event& from, Event& to) override {
    return std::chrono::duration<double, std::nano>(static_cast<CpuEvent&>(to).at - static_cast<CpuEvent&>(from).at)
        .count();
  }
  void record(Stream&, Event& event) override { static_cast<CpuEvent&>(event).at = std::chrono::steady_clock::now(); }
  void wait(Stream&, Event&) override {}
  Buffer allocate(size_t bytes, Space space) override;
  uint64_t device_bytes() const override { return 0; }
  void reserve(Stream&, const std::function<void()>&) override {}
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>&) override { return nullptr; }
  std::unique_ptr<Linear> load_linear(LinearSource source) override;
  std::unique_ptr<ExpertBank> load_experts(std::vector<ExpertSource> experts, int64_t pooled) override;
  void copy(Stream&, View dst, View src) override;
  void clear(Stream&, View dst) override;
  void gather(Stream&, View ids, View from, View to, const RowCopies& copies) override;
  void embed(Stream&, View tokens, View table, View out) override;
  void grouped_norm(Stream&, const NormWeights&, int64_t group, View x, View out) override;
  void linear(Stream&, const Linear&, View x, View y) override;
  void linears(Stream& s, std::span<const Linear* const> list, View x, std::span<const View> y) override {
    for (size_t i = 0; i < list.size(); ++i) linear(s, *list[i], x, y[i]);
  }
  void add(Stream&, int64_t repeat, View a, View b, View out) override;
  void hc_mix(Stream&, const HcWeights&, const Injection& lacking, View stack, View u, View inj) override;
  void hc_inject(Stream&, const Injection& lacking, View stack) override;
  void gdn(Stream&, const GdnWeights&, const Batch&, View qkv, View z, View b, View a, const GdnState&,
           View out) override;
  void qsa_write(Stream&, const QsaWeights&, const Batch&, const QsaRows&, const KvCache&) override;
  void qsa_select(Stream&, const QsaWeights&, const Batch&, const QsaRows&, const KvCache&) override;
  void qsa_attend(Stream&, const QsaWeights&, const Batch&, const QsaRows&, const KvCache&, View out) override;
  void router(Stream&, bool normalise, View logits, View ids, View weights) override;
  void fill(Stream&, ExpertBank&, int32_t expert, View line) override;
  void serve(Stream&, ExpertBank&, std::span<const ServedExpert>) override;
  void plan_experts(Stream&, ExpertBank&, const PoolOptions&, int64_t k, View ids, View state, View lines,
                    const Foreseen&) override;
  void fill_planned(Stream&, ExpertBank&, const PoolOptions&, View state, View lines, const Foreseen&) override;
  void settle_planned(Stream&, ExpertBank&, const PoolOptions&, View state, View lines, const Foreseen&) override;
  void fill_foreseen(Stream&, ExpertBank&, const PoolOptions&, View state, const Foreseen&) override;
  void check_served(Stream&, const ExpertBank&) override;
  void experts(Stream&, const ExpertBank&, View x, View ids, View slots) override;
  void take_slots(Stream&, int64_t per_part, View ids, View parts, View slots) override;
  void join_columns(Stream&, std::span<const View> parts, View out) override;
  void swiglu(Stream&, View gate, View up, View out) override;
  void combine(Stream&, View slots, View weights, View shared, View shared_gate, View y) override;
  void ngram_decode(Stream&, int bits, View packed, View bias, View out) override;
  void ple_mix(Stream&, const PleWeights&, const Batch&, View key, View value, View state, View stack) override;
  void sample(Stream&, int64_t valid, bool greedy, View params, View logits, View ids) override;

 private:
  static void serve_from(CpuExperts& bank, int32_t expert, const std::byte* line);
  // fn(i) for every i: on the pool when the whole is worth waking it.
  void each(int64_t count, int64_t work_per_item, const std::function<void(int64_t)>& fn);

  ThreadPool pool_;
  DecodedBudget budget_;
};

}  // namespace fnx::cpu
