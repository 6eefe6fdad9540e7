#include "libcore/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/error.h"
#include "libcore/dist/communicator.h"

namespace fnx {

namespace {
// Only the rank that runs the draft head has its states.
StateOptions states_of(StateOptions o, const Weights& weights) {
  o.draft_head = o.draft_head && weights.mtp;
  return o;
}
}  // namespace

Engine::Engine(const Weights& weights, Backend& backend, const EngineOptions& options)
    : weights_(weights),
      backend_(backend),
      options_(options),
      stream_(backend.make_stream()),
      state_(weights_.config, backend, *stream_, states_of(options.state, weights)),
      staging_(backend),
      graphs_(backend, options.graphs, options.inject_capture_failures, options.ranks) {
  make_activations();
  make_exchange();
  reserve();
  if (options_.ranks != nullptr) options_.ranks->agree(true);  // the last step that may fail on one rank alone
}

Engine::~Engine() {
  try {
    if (weights_.pools) weights_.pools->release(*stream_);
  } catch (const Error&) {  // of a device that failed: nobody asks for its counts
  }
}

void Engine::make_activations() {
  const ModelConfig& c = weights_.config;
  const int64_t R = options_.max_rows, n = c.streams, H = c.hidden_size, draws = most_draws();
  a_.stack = make(DType::F32, {R, n, H});
  a_.u = make(DType::F32, {R, H});
  a_.attn_inj = make(DType::F32, {R, n});
  a_.mlp_inj = make(DType::F32, {R, n});
  a_.y = make(DType::F32, {R, H});
  a_.qkv = make(DType::F32, {R, c.gdn_conv_width()});
  a_.z = make(DType::F32, {R, c.gdn_value_width()});
  a_.b = make(DType::F32, {R, c.gdn_value_heads});
  a_.a = make(DType::F32, {R, c.gdn_value_heads});
  a_.gdn_out = make(DType::F32, {R, c.gdn_value_width()});
  if (c.index_ratio > 0) {
    a_.qsa.query_gate = make(DType::F32, {R, c.heads, 2 * c.head_dim});
    a_.qsa.key = make(DType::F32, {R, c.kv_heads, c.head_dim});
    a_.qsa.value = make(DType::F32, {R, c.kv_heads, c.head_dim});
    a_.qsa.index = make(DType::F32, {R, c.index_heads + 1, c.index_head_dim});
    a_.qsa.selected = make(DType::I32, {R, c.index_blocks()});
    a_.attended = make(DType::F32, {R, c.heads * c.head_dim});
  }
  a_.router = make(DType::F32, {R, c.experts});
  a_.ids = make(DType::I32, {R, c.experts_per_token + 1});  // the shared expert last, or apart
  a_.weights = make(DType::F32, {R, c.experts_per_token});
  a_.slots = make(DType::F32, {R, c.experts_per_token + 1, H});
  a_.shared_gate = make(DType::F32, {R, c.shared_expert_size});
  a_.shared_up = make(DType::F32, {R, c.shared_expert_size});
  a_.shared = make(DType::F32, {R, H});
  a_.shared_expert_gate = make(DType::F32, {R, 1});
  if (weights_.pools && weights_.pools->options().planner == Planner::Ahead) {
    const int64_t rows = std::min(R, kMostForeseen), line = weights_.pools->line_bytes();
    foresight_ = backend_.make_stream(), stack_mixed_ = backend_.make_event(), foreseen_ = backend_.make_event();
    a_.next_u = make(DType::F32, {rows, H});
    a_.next_inj = make(DType::F32, {rows, n});
    a_.next_router = make(DType::F32, {rows, c.experts});
    for (View& ids : a_.next_ids) ids = make(DType::I32, {PoolStage::kForeseen});
    a_.next_weights = make(DType::F32, {PoolStage::kForeseen});
    for (View& stage : a_.stages) {
      stage = make(DType::U8, {PoolStage::bytes(line)});
      backend_.clear(*stream_, stage);
    }
  }
  if (!c.ple_layers.empty()) {
    a_.ngram = make(DType::F32, {R, c.ple_embed_dim});
    a_.ple_key = make(DType::F32, {R, n * H});
    a_.ple_value = make(DType::F32, {R, H});
  }
  a_.gather = make(DType::F32, {std::max(R, draws), n, H});
  a_.head_in = make(DType::F32, {std::max(R, draws), H});
  a_.draw_logits = make(DType::F32, {draws, c.vocab_size});
  a_.sampled = make(DType::I32, {draws});
  routed_ = backend_.allocate(a_.ids.bytes(), Space::Host);
  drawn_ = backend_.allocate(draws * sizeof(int32_t), Space::Host);
  has_drawn_ = backend_.make_event();
  if (has_draft_head()) {
    a_.draft_stack = make(DType::F32, {R, n, H});
    a_.draft_hidden = make(DType::F32, {R, n, H});
    a_.draft_embed = make(DType::F32, {R, 1, H});
  }
}

// Inputs and workspaces of the largest forward: all rows in one sequence that is as long as it may be, every slot drawn
// from, and the logits of every row.
void Engine::reserve() {
  const int64_t R = options_.max_rows, slots = options_.state.slots;
  place_proposal(R, slots, std::vector<int64_t>(static_cast<size_t>(options_.state.trials), slots));
  trials_ = {{0, static_cast<int32_t>(options_.state.trials)}};
  place(R, slots, most_draws(), R, slots);
  place_late_rows(slots);
  staging_.allocate();
  place(R, slots, most_draws(), R, slots);
  const Lane lane{0, 0, static_cast<int32_t>(R),
                  static_cast<int32_t>(std::max<int64_t>(0, options_.state.max_tokens - R))};
  lanes_ = draft_lanes_ = {lane};
  batch_ = make_batch(in_.lanes, in_.positions, lanes_);
  draft_batch_ = make_batch(in_.draft_lanes, in_.draft_positions, draft_lanes_);
  const uint64_t before = backend_.device_bytes();
  reserving_ = true;
  backend_.reserve(*stream_, [&] {
    launch_trunk(nullptr);
    launch_draws(config().vocab_size, false);
    launch_absorption();
    const View hidden = a_.head_in.rows(0, R), stacks = a_.gather.rows(0, R);
    mix(weights_.mixer, stacks, hidden);
    if (weights_.mtp) mix(weights_.mtp->mixer, stacks, hidden);
    head(hidden, View{nullptr, DType::F32, hidden.space, 2, {R, config().vocab_size}});
  });
  if (foresight_)
    backend_.reserve(*foresight_, [&] {
      const int64_t rows = a_.next_u.shape[0];
      for (const Layer& layer : weights_.layers)
        launch_foresight(layer, a_.stack.rows(0, rows), foreseen_rows(a_.next_ids[0], rows));
    });
  reserving_ = false;
  workspace_bytes_ = backend_.device_bytes() - before;
  batch_ = draft_batch_ = {};
}

View Engine::make(DType dtype, std::initializer_list<int64_t> dims) {
  size_t bytes = dtype_size(dtype);
  for (int64_t d : dims) bytes *= static_cast<size_t>(d);
  buffers_.push_back(backend_.allocate(bytes, Space::Device));
  return buffers_.back().view(dtype, dims);
}

void Engine::forward(std::span<const LaneInput> inputs, const Probe& probe) {
  stage(inputs, {});
  begin_experts(false);
  launch_trunk(probe);
  launch_absorption();
}

void Engine::begin_experts(bool round) {
  if (weights_.pools)
    weights_.pools->begin(*stream_, pool_choices(batch_.rows),
                          config().layers() + (runs_draft_head() && draft_batch_.rows > 0), round);
}

std::vector<int32_t> Engine::round(std::span<const LaneInput> inputs, std::span<const Draw> draws, int64_t valid,
                                   const std::function<void()>& meanwhile) {
  stage(inputs, draws);
  const bool greedy = std::all_of(draws.begin(), draws.end(), [](const Draw& d) { return d.params.temperature <= 0; });
  const auto work = [&] {
    launch_trunk(nullptr);
    if (!draws.empty()) launch_draws(valid, greedy);
  };
  RoundKey key;
  key.rows = batch_.rows, key.lanes = static_cast<int64_t>(lanes_.size());
  key.draws = static_cast<int64_t>(draws.size());
  key.most_positions = batch_.most_positions, key.valid = valid, key.greedy = greedy, key.trials = lags_or_tries();
  key.ahead = foresight_ && weights_.pools->options().planner == Planner::Ahead;
  const bool decoding = key.rows == key.lanes || key.rows == key.draws;
  begin_experts(decoding);
  run_round(key, decoding, work);
  backend_.record(*stream_, *has_drawn_);
  launch_absorption();  // while the host goes on
  if (meanwhile) meanwhile();
  if (draws.empty()) return {};
  wait_drawn();
  const auto* ids = drawn_.view(DType::I32, {key.draws}).as<int32_t>();
  return {ids, ids + key.draws};
}

void Engine::run_round(const RoundKey& key, bool recordable, const std::function<void()>& work) {
  // Planning on the host waits for every layer's routing, as reporting does.
  recordable = recordable && !routing_ && !slots_ && (!weights_.pools || weights_.pools->records());
  recordable = recordable && !stages(batch_) && !stages(draft_batch_);
  if (graphs_.replay(key, recordable, *stream_)) return;
  work();  // this call's result; the recording serves the rounds to come
  if (recordable) graphs_.record(key, *stream_, work);
}

View Engine::logits_of(const View& stacks, const HyperConnection* mixer, std::span<const int32_t> rows) {
  const auto count = static_cast<int64_t>(rows.size());
  if (count > options_.max_rows)
    throw Error(ErrorKind::Internal, fmt::format("logits of {} rows, at most {} at once", count, options_.max_rows));
  staging_.begin();
  const Staged ids = staging_.place(DType::I32, {count});
  ids.fill(rows.data(), rows.size());
  staging_.send(*stream_);
  const size_t bytes = rows.size() * config().vocab_size * sizeof(float);
  if (asked_logits_.bytes() < bytes) {
    stream_->synchronize();
    asked_logits_ = {};
    asked_logits_ = backend_.allocate(bytes, Space::Device);
  }
  const View hidden = a_.head_in.rows(0, count), gathered = a_.gather.rows(0, count);
  const View out = asked_logits_.view(DType::F32, {count, config().vocab_size});
  if (mixer != nullptr) {
    backend_.gather(*stream_, ids.device, stacks, gathered, {});
    mix(*mixer, gathered, hidden);
  }
  if (&stacks == &a_.draft_stack) share_draft(hidden);
  head(hidden, out);
  return out;
}

View Engine::logits(std::span<const int32_t> rows) { return logits_of(a_.stack, &weights_.mixer, rows); }

View Engine::draft_logits(std::span<const int32_t> rows) {
  return logits_of(a_.draft_stack, weights_.mtp ? &weights_.mtp->mixer : nullptr, rows);
}

View Engine::mixed() {
  const View out = a_.head_in.rows(0, batch_.rows);
  mix(weights_.mixer, a_.stack.rows(0, batch_.rows), out);
  return out;
}

std::vector<float> Engine::to_host(const View& v) {
  std::vector<float> out(v.size());
  View host = v;
  host.data = reinterpret_cast<std::byte*>(out.data()), host.space = Space::Host;
  backend_.copy(*stream_, host, v);
  wait();
  return out;
}

}  // namespace fnx
