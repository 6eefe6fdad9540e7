// The forward pass: rows of several sequences through the trunk, the head and the draft head. Written against
// kernels/ops.h alone; the same code runs on every backend.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "libcore/engine/graphs.h"
#include "libcore/engine/staging.h"
#include "libcore/engine/state.h"
#include "libcore/engine/weights.h"

namespace fnx {

class Communicator;  // libcore/dist

// Tokens to append to one open sequence.
struct LaneInput {
  int32_t slot = 0;
  std::span<const int32_t> tokens;
  int32_t tried = 0;  // the last of them are drafts: Engine::propose() keeps some and takes the others back
};

// A token to draw from the logits of a row of the forward.
struct Draw {
  int32_t row = 0;
  SampleParams params;
};

// Faults in what ranks exchange, for tests of the comparison that must find them: ranks that add their sums, and slots
// out of order.
enum class Plant : uint8_t { None, Add, Order };

// What became of a lane of the last round, and what to draft behind it.
struct Proposal {
  int32_t lane = 0;     // of the round
  int32_t kept = 0;     // of its tried tokens, from the first on
  int32_t next = 0;     // the token after them
  int32_t depth = 0;    // tokens to draft behind that one
  SampleParams params;  // position is set here
};

struct EngineOptions {
  StateOptions state;
  int64_t max_rows = 256;               // most rows of one forward
  bool graphs = false;                  // record rounds of one row a lane and replay them
  int64_t inject_capture_failures = 0;  // the first recordings fail; on the last rank alone
  Communicator* ranks = nullptr;        // of weights that are a shard; outlives the engine
  Plant plant = Plant::None;
};

class Engine {
 public:
  // Called with the stream stack [R, n, H] that enters layer `layer`; layer == layers() is the stack before the mixer.
  using Probe = std::function<void(int64_t layer, const View& stack)>;

  // Called with the router's choice [rows, k] of a layer, slots in order; layer layers() is the draft head.
  using Routing = std::function<void(int64_t layer, std::span<const int32_t> ids)>;

  // What the experts of a layer gave, whoever holds them.
  struct SlotOutputs {
    int64_t layer = 0, columns = 0;
    std::span<const int32_t> ids;   // [rows, columns]
    std::span<const float> values;  // [rows, columns, H]
  };
  using SlotProbe = std::function<void(const SlotOutputs&)>;

  // `weights` and `backend` outlive the engine; engines may share them, one running at a time.
  // Ranks do the same calls in the same order.
  Engine(const Weights& weights, Backend& backend, const EngineOptions& options);
  ~Engine();

  const ModelConfig& config() const { return weights_.config; }
  const EngineOptions& options() const { return options_; }
  StatePool& state() { return state_; }
  Stream& stream() { return *stream_; }  // of all its operations
  // Of the ranks' model; rank 0 runs it.
  bool has_draft_head() const { return weights_.has_draft_head && options_.state.draft_head; }

  // Appends the lanes' tokens, in lane order: row i of the forward is the i-th token overall. At most one lane a slot.
  // With a draft head, also absorbs the draft rows whose next token is now known, but for rows that may wait. Does not
  // wait for the device.
  void forward(std::span<const LaneInput> lanes, const Probe& probe = nullptr);
  int64_t rows() const { return batch_.rows; }
  // Every layer of every later forward waits for the device and reports, and no round is recorded; null ends that.
  void on_routing(Routing routing) { routing_ = std::move(routing); }
  void on_slots(SlotProbe probe) { slots_ = std::move(probe); }

  // forward(), with the draws before the draft head absorbs, at most 1 + trials a slot: ids in [0, valid) in the order
  // of `draws`. Waits for these once, and not at all without draws; the host's own work comes before, `meanwhile`.
  std::vector<int32_t> round(std::span<const LaneInput> lanes, std::span<const Draw> draws, int64_t valid,
                             const std::function<void()>& meanwhile = nullptr);
  // After a round and before the next, once: every lane that tried rows, and others that want drafts, ids in [0,
  // valid). Takes back what was not kept, absorbs what was, and returns each proposal's drafts, which are only guesses.
  std::vector<std::vector<int32_t>> propose(std::span<const Proposal> proposals, int64_t valid);
  // Brings all states up to the sequence's last token, for a dump or a snapshot.
  void settle(int32_t slot);
  // What the last round drew from: F32 [draws, V].
  View drawn_logits() const { return a_.draw_logits.rows(0, static_cast<int64_t>(in_.params.host.shape[0])); }
  uint64_t workspace_bytes() const { return workspace_bytes_; }  // device memory of the operations' workspaces
  const GraphCounters& graph_counters() const { return graphs_.counters(); }

  // Logits of rows of the last forward, in the order asked: F32 [rows.size(), V], valid until the next call.
  View logits(std::span<const int32_t> rows);
  // Values of a view, on the host.
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
    View stack, u, attn_inj, mlp_inj, y;
    View qkv, z, b, a, gdn_out;
    QsaRows qsa;
    View attended;
    View router, ids, weights, slots, shared_gate, shared_up, shared, shared_expert_gate;
    View ngram, ple_key, ple_value;
    View gather, head_in, draw_logits, sampled;
    View draft_stack, draft_hidden, draft_embed;
    View next_u, next_inj, next_router, next_weights;  // of what is foreseen, up to kMostForeseen rows
    std::array<View, 2> next_ids, stages;              // of layers in turn
    View parts, head_parts;  // of all ranks: slots; head columns, and behind them this rank's own
  };
  // What a forward is given: trunk, draws, draft head.
  struct Inputs {
    Staged tokens, positions, lanes, trials, tables, draw_rows, params;
    std::vector<Staged> ngram;  // one a PLE layer
    Staged draft_tokens, draft_positions, draft_lanes;
    Staged from_last, from_stack;   // of each draft row: a slot's last stack or a row of the trunk, or -1
    Staged keep;                    // of each draw, or row to absorb: the place of last_stacks() that keeps it, or -1
    Staged late_rows, late_places;  // of the trunk, kept once the rows that are absorbed were read
    Staged first_drafts;            // of each lane that drafts: its row among the absorbed ones
  };
  // Rows of one step of a chain of drafts: a row a lane.
  struct ChainStep {
    Staged positions, lane_table;
    std::vector<Lane> lanes;
    Batch batch;
  };
  // Rows of a round beyond which misses keep the link busy anyway.
  static constexpr int64_t kMostForeseen = PoolStage::kForeseen;
  View make(DType dtype, std::initializer_list<int64_t> dims);
  void make_activations();
  void reserve();

  // On the host, ahead of the launches.
  void stage(std::span<const LaneInput> inputs, std::span<const Draw> draws);
  void begin_experts(bool round);
  void run_round(const RoundKey& key, bool recordable, const std::function<void()>& work);
  void place_proposal(int64_t rows, int64_t lanes, const std::vector<int64_t>& step_lanes);
  void place_draft_rows(int64_t rows, int64_t lanes);
  void place_late_rows(int64_t rows);
  void place(int64_t rows, int64_t lanes, int64_t draws, int64_t draft_rows, int64_t draft_lanes);
  void list_drafts(const LaneInput& input, int32_t waiting);
  void add_draft_rows(const Lane& lane, int32_t waiting, int32_t count, int32_t start);
  int32_t last_place(int32_t slot) const;
  void list_kept_stacks(std::span<const Draw> draws);
  RowCopies kept_stacks(const View& places) const;
  bool runs_draft_head() const { return has_draft_head() && weights_.mtp; }  // this rank
  void make_room(std::span<const LaneInput> inputs);
  // Absorbs all but the last of the rows that wait in these sequences.
  void catch_up(std::span<const int32_t> slots);
  bool lags_or_tries() const;
  void clear_draft_rows();
  void fill_draft_rows();
  void fill_inputs(std::span<const LaneInput> inputs, std::span<const Draw> draws);
  void gather_ngrams();
  void stage_proposal(std::span<const Proposal> proposals, std::span<const size_t> order);
  void place_tables();
  void fill_tables();
  View page_table(int64_t i) const;  // the i-th of PagePool::tables()
  Batch make_batch(const Staged& lane_table, const Staged& positions, std::span<const Lane> lanes) const;

  // Operations alone: no copies from the host, no waiting.
  void launch_trunk(const Probe& probe);
  void launch_draws(int64_t valid, bool greedy);
  // Takes a stack that lacks an injection and leaves one that lacks the returned.
  Injection run_layer(const Layer& layer, const GdnState* gdn, const KvCache* kv, const Batch& batch, const View& stack,
                      const Injection& lacking);
  void complete(Injection& lacking, const View& stack);
  void attend(const QsaLayer& layer, const Batch& batch, const QsaRows& rows, const KvCache& kv, const View& out);
  bool stages(const Batch& batch) const;
  void run_experts(const Layer& layer, const View& x, const View& ids, const View& slots, const Foreseen& next);
  // What the rows of a stack, of this layer's experts, will probably choose in the next one: on a stream of its own.
  Foreseen foresee(const Layer& layer, const View& stack);
  // [R, those of each row that have a place].
  View foreseen_rows(const View& v, int64_t rows) const;
  void launch_foresight(const Layer& next, const View& stack, const View& ids);
  std::span<const int32_t> fetch_routing(const View& ids);
  void report_slots(const Layer& layer, const View& ids, const View& slots);
  int64_t layer_number(const Layer& layer) const;
  void run_ple(size_t index, const PleLayer& ple, const View& stack);
  // What follows the trunk: stacks that wait are kept, draft rows absorbed.
  void launch_absorption();
  void gather_draft_stacks(const RowCopies& kept);
  void absorb_drafts();
  // Rows of the draft head: tokens I32 [R], stacks [R, n, H], which are normed in place; out as stacks, or the same.
  void run_draft_head(const View& tokens, const View& stacks, const Batch& batch, const View& out);
  void launch_proposal(int64_t valid, bool greedy);
  int64_t most_draws() const { return options_.state.slots * (1 + options_.state.trials); }
  void mix(const HyperConnection& mixer, const View& stack, const View& out);
  // With the other ranks (exchange.cpp).
  void make_exchange();
  void all_gather(const View& own, const View& all);
  void share_draft(const View& hidden);
  void exchange_slots(const MoeLayer& m, const View& ids, const View& slots);
  int64_t pool_choices(int64_t rows) const;
  void add_planted_parts(const View& y);
  void head(const View& hidden, const View& out);
  void head_shard(const View& hidden, const View& out);
  void wait();
  void wait_drawn();
  View logits_of(const View& stacks, const HyperConnection* mixer, std::span<const int32_t> rows);

  const Weights& weights_;
  Backend& backend_;
  EngineOptions options_;
  std::unique_ptr<Stream> stream_;
  StatePool state_;
  Routing routing_;
  SlotProbe slots_;
  Staging staging_;
  GraphCache graphs_;
  std::vector<Buffer> buffers_;
  uint64_t workspace_bytes_ = 0;
  Buffer asked_logits_, drawn_;  // of logits(), and the ids of a round on the host
  std::unique_ptr<Event> has_drawn_;
  Buffer routed_;                      // the router's ids of one layer on the host
  std::unique_ptr<Stream> foresight_;  // beside the layer's own stream; null unless pools look ahead
  std::unique_ptr<Event> stack_mixed_, foreseen_;
  bool reserving_ = false;  // launches are counted and not made
  Activations a_;
  Inputs in_;
  std::vector<Lane> lanes_, draft_lanes_;
  Batch batch_, draft_batch_;
  std::vector<DraftRows> draft_rows_;
  std::vector<int32_t> draft_tokens_, from_last_, from_stack_;
  std::vector<int32_t> late_rows_, late_places_;
  std::vector<Trial> trials_;  // of the lanes
  std::vector<ChainStep> chain_;
};

}  // namespace fnx
