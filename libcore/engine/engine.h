// The forward pass: rows of several sequences through the trunk, the head and the draft head. Written against
// kernels/ops.h alone; the same code runs on every backend.
#pragma once

#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "libcore/engine/state.h"
#include "libcore/engine/weights.h"

namespace fnx {

// Tokens to append to one open sequence.
struct LaneInput {
  int32_t slot = 0;
  std::span<const int32_t> tokens;
};

struct EngineOptions {
  StateOptions state;
  int64_t max_rows = 256;  // most rows of one forward
};

class Engine {
 public:
  // Called with the stream stack [R, n, H] that enters layer `layer`; layer == layers() is the stack before the mixer.
  using Probe = std::function<void(int64_t layer, const View& stack)>;

  // Called with the router's choice [rows, k] of a layer, slots in order; layer layers() is the draft head.
  using Routing = std::function<void(int64_t layer, std::span<const int32_t> ids)>;

  // `weights` and `backend` outlive the engine; engines may share them, one running at a time.
  Engine(const Weights& weights, Backend& backend, const EngineOptions& options);

  const ModelConfig& config() const { return weights_.config; }
  const EngineOptions& options() const { return options_; }
  StatePool& state() { return state_; }
  bool has_draft_head() const { return weights_.mtp.has_value() && options_.state.draft_head; }

  // Appends the lanes' tokens, in lane order: row i of the forward is the i-th token overall. At most one lane a slot.
  // With a draft head, also absorbs the draft rows whose next token is now known.
  void forward(std::span<const LaneInput> lanes, const Probe& probe = nullptr);
  int64_t rows() const { return batch_.rows; }
  // Every layer of every later forward waits for the device and reports; null ends that.
  void on_routing(Routing routing) { routing_ = std::move(routing); }

  // Logits of rows of the last forward, in the order asked: F32 [rows.size(), V], valid until the next call.
  View logits(std::span<const int32_t> rows);
  // One draw a row from the logits of the last `logits` call; ids in [0, valid).
  std::vector<int32_t> sample(int64_t valid, std::span<const SampleParams> params);
  // The values of `logits`, on the host.
  std::vector<float> to_host(const View& v);

  // Draft rows absorbed by the last forward: of lane i, `count` rows, the first at position `start`. Row p proposes
  // token p + 2.
  struct DraftRows {
    int32_t first_row = 0, count = 0;
    int64_t start = 0;
  };
  std::span<const DraftRows> draft_rows() const { return draft_rows_; }
  View draft_logits(std::span<const int32_t> rows);

  // The last mixer's output of every row of the last forward, F32 [R, H].
  View mixed();

 private:
  // Scratch rows; every view holds max_rows rows.
  struct Activations {
    View tokens, positions, lanes;
    View stack, u, inj, y;
    View qkv, z, b, a, gdn_out;
    QsaRows qsa;
    View attended;
    View router, ids, weights, slots, shared_gate, shared_up, shared, shared_expert_gate;
    View ngram_packed, ngram, ple_key, ple_value;
    View gather, head_in, logits, sampled;
    View draft_stack, draft_hidden, draft_embed;
  };
  View make(DType dtype, std::initializer_list<int64_t> dims);
  Batch upload_batch(std::vector<Lane>& lanes, std::span<const int32_t> tokens);
  void run_layer(const Layer& layer, const GdnState* gdn, const KvCache* kv, const Batch& batch, const View& stack);
  void report_routing(const Layer& layer, const View& ids);
  void run_ple(const PleLayer& ple, const View& state, const View& stack);
  void absorb_drafts(std::span<const LaneInput> lanes, std::span<const Lane> trunk);
  void mix(const HyperConnection& mixer, const View& stack, const View& out);
  View head(const View& hidden);
  View gather_stacks(const View& stacks, std::span<const int32_t> rows);

  const Weights& weights_;
  Backend& backend_;
  EngineOptions options_;
  std::unique_ptr<Stream> stream_;
  StatePool state_;
  Routing routing_;
  std::vector<Buffer> buffers_;
  Activations a_;
  std::vector<Lane> lanes_;
  Batch batch_;
  std::vector<DraftRows> draft_rows_;
  std::vector<std::byte> ngram_host_;
};

}  // namespace fnx
