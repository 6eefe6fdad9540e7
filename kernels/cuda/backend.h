// The cuda backend behind kernels/ops.h: memory, streams, graphs, weights; each operation is one call of this folder's
// launchers. Which sums an operation makes stands in the launcher's header.
#pragma once

#include <array>
#include <map>

#include "kernels/cuda/device_memory.h"
#include "kernels/cuda/exl3_experts.h"
#include "kernels/cuda/expert_pool.h"
#include "kernels/cuda/norm_hc.h"
#include "kernels/expert_extent.h"
#include "kernels/ops.h"

struct CUgraphExec_st;

namespace fnx::cuda {

// Memory that operations of one stream use between them. Counters are zero between launches.
enum class Area : uint8_t {
  PlainCounters,
  PlainPartials,
  HcNormed,
  HcLow,
  Linear,
  Experts,
  GdnConvolved,
  GdnGates,
  QsaScores,
  QsaPartials,
  PleGate,
  PleNormed,
  SampleMasses,
  SampleBest,
  SampleBins,
  kCount
};

class BackendStream : public Stream {
 public:
  explicit BackendStream(std::shared_ptr<DeviceMemory> memory);
  ~BackendStream() override;
  void synchronize() override;

  // To put one more operation there.
  cudaStream_t handle() {
    ++operations_;
    return handle_;
  }
  // A router of `experts` experts has filled `ids`, of one more column; and whether that is the last operation there.
  void routed(const int32_t* ids, int64_t experts) { routed_ = {ids, experts, operations_}; }
  bool routed_last(const int32_t* ids, int64_t experts) const {
    return routed_.ids == ids && routed_.experts == experts && routed_.operation == operations_;
  }
  // At least `bytes`; what Backend::reserve provided. While it measures: null, and the need is noted.
  void* area(Area which, size_t bytes);
  template <class T>
  T* area(Area which, int64_t count) {
    return static_cast<T*>(area(which, static_cast<size_t>(count) * sizeof(T)));
  }
  // False while reserve() measures and in a plan: the operation ends there.
  bool running() const override { return !measuring_ && !memory_->plan(); }
  void reserve(const std::function<void()>& calls);

 private:
  std::shared_ptr<DeviceMemory> memory_;
  cudaStream_t handle_ = nullptr;
  uint64_t operations_ = 0;
  struct {
    const int32_t* ids = nullptr;
    int64_t experts = 0;
    uint64_t operation = 0;
  } routed_;
  bool measuring_ = false;
  std::array<Buffer, static_cast<size_t>(Area::kCount)> areas_;
  std::array<size_t, static_cast<size_t>(Area::kCount)> need_{};
};

struct CudaLinear : Linear {
  Buffer memory;
  Exl3Weight exl3;  // trellis is null for plain weights
  const void* plain = nullptr;
  DType plain_dtype = DType::F16;
  const float* bias = nullptr;
  bool is_plain() const { return exl3.in == 0; }
};

struct CudaExperts : ExpertBank {
  Buffer memory;  // expert after expert that is not pooled (gate, up, down trellis), then scales, then the table
  Buffer arena;   // pinned: extent after extent
  exl3::Codebook codebook = exl3::Codebook::Mul1;
  Exl3Expert* table = nullptr;
  std::vector<Exl3Expert> entries;      // of the table, as served
  std::vector<ExpertExtent> extents;    // of the pooled
  std::vector<int64_t> at;              // of each extent in the arena
  const PooledExpert* homes = nullptr;  // device [pooled]
  // Host memory that the device reads too.
  std::byte* home(int32_t expert) const;
};

// Table entries on their way to the device, in pinned memory: ids, then entries.
struct ServeBlock {
  Buffer host;
  std::unique_ptr<Event> read;
};

class CudaBackend : public Backend {
 public:
  explicit CudaBackend(const CudaOptions& options);
  ~CudaBackend() override;

  std::string_view name() const override { return "cuda"; }
  DType kv_dtype() const override { return DType::BF16; }
  std::unique_ptr<Stream> make_stream() override { return std::make_unique<BackendStream>(memory_); }
  std::unique_ptr<Event> make_event() override;
  std::unique_ptr<Event> make_timed_event() override;
  double elapsed_ns(Event& from, Event& to) override;
  void record(Stream&, Event&) override;
  void wait(Stream&, Event&) override;
  Buffer allocate(size_t bytes, Space space) override;
  uint64_t device_bytes() const override { return memory_->in_use(); }
  void reserve(Stream&, const std::function<void()>& calls) override;
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>& calls) override;
  std::unique_ptr<Linear> load_linear(LinearSource source) override;
  std::unique_ptr<ExpertBank> load_experts(std::vector<ExpertSource> experts, int64_t pooled) override;
  void copy(Stream&, View dst, View src) override;
  void clear(Stream&, View dst) override;
  void gather(Stream&, View ids, View from, View to, const RowCopies& copies) override;
  void embed(Stream&, View tokens, View table, View out) override;
  void grouped_norm(Stream&, const NormWeights&, int64_t group, View x, View out) override;
  void linear(Stream&, const Linear&, View x, View y) override;
  void linears(Stream&, std::span<const Linear* const>, View x, std::span<const View> y) override;
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
  std::shared_ptr<DeviceMemory> memory_;
  cudaStream_t load_stream_ = nullptr;
  Uploader& uploader();
  std::unique_ptr<Uploader> uploader_;     // made at the first weight
  int64_t hidden_ = 0, expert_width_ = 0;  // of the expert banks, which share one workspace
  // For tables of that many experts.
  void make_serve_blocks(int64_t experts);
  std::array<ServeBlock, 8> serving_;
  size_t next_serving_ = 0;
};

}  // namespace fnx::cuda
