#include "libcore/engine/engine.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "kernels/error.h"

namespace fnx {

namespace {
template <class T>
View host_view(const T* data, DType dtype, int64_t count) {
  return {reinterpret_cast<std::byte*>(const_cast<T*>(data)), dtype, Space::Host, 1, {count}};
}
}  // namespace

Engine::Engine(const Weights& weights, Backend& backend, const EngineOptions& options)
    : weights_(weights),
      backend_(backend),
      options_(options),
      stream_(backend.make_stream()),
      state_(weights_.config, backend, options.state) {
  const ModelConfig& c = weights_.config;
  const int64_t R = options.max_rows, n = c.streams, H = c.hidden_size;
  a_.tokens = make(DType::I32, {R});
  a_.positions = make(DType::I32, {R});
  a_.lanes = make(DType::I32, {options.state.slots, 4});
  a_.stack = make(DType::F32, {R, n, H});
  a_.u = make(DType::F32, {R, H});
  a_.inj = make(DType::F32, {R, n});
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
  a_.ids = make(DType::I32, {R, c.experts_per_token});
  a_.weights = make(DType::F32, {R, c.experts_per_token});
  a_.slots = make(DType::F32, {R, c.experts_per_token, H});
  a_.shared_gate = make(DType::F32, {R, c.shared_expert_size});
  a_.shared_up = make(DType::F32, {R, c.shared_expert_size});
  a_.shared = make(DType::F32, {R, H});
  a_.shared_expert_gate = make(DType::F32, {R, 1});
  int64_t row_bytes = 0;
  for (const Layer& l : weights_.layers)
    if (l.ple) row_bytes = std::max(row_bytes, l.ple->table.row_bytes());
  if (row_bytes > 0) {
    a_.ngram_packed = make(DType::U8, {R, c.ngram_heads() * row_bytes});
    a_.ngram = make(DType::F32, {R, c.ple_embed_dim});
    a_.ple_key = make(DType::F32, {R, n * H});
    a_.ple_value = make(DType::F32, {R, H});
  }
  a_.gather = make(DType::F32, {R, n, H});
  a_.head_in = make(DType::F32, {R, H});
  a_.sampled = make(DType::I32, {R});
  if (has_draft_head()) {
    a_.draft_stack = make(DType::F32, {R, n, H});
    a_.draft_hidden = make(DType::F32, {R, n, H});
    a_.draft_embed = make(DType::F32, {R, 1, H});
  }
}

View Engine::make(DType dtype, std::initializer_list<int64_t> dims) {
  size_t bytes = dtype_size(dtype);
  for (int64_t d : dims) bytes *= static_cast<size_t>(d);
  buffers_.push_back(backend_.allocate(bytes, Space::Device));
  return buffers_.back().view(dtype, dims);
}

Batch Engine::upload_batch(std::vector<Lane>& lanes, std::span<const int32_t> tokens) {
  Batch batch;
  batch.lanes = lanes;
  batch.rows = static_cast<int64_t>(tokens.size());
  batch.lane_table = a_.lanes.rows(0, static_cast<int64_t>(lanes.size()));
  batch.positions = a_.positions.rows(0, batch.rows);
  batch.block_table = state_.block_table();
  std::vector<int32_t> positions;
  for (const Lane& lane : lanes)
    for (int32_t i = 0; i < lane.rows; ++i) positions.push_back(lane.start + i);
  backend_.copy(*stream_, batch.positions, host_view(positions.data(), DType::I32, batch.rows));
  backend_.copy(*stream_, a_.tokens.rows(0, batch.rows), host_view(tokens.data(), DType::I32, batch.rows));
  backend_.copy(
      *stream_, batch.lane_table,
      host_view(reinterpret_cast<const int32_t*>(lanes.data()), DType::I32, 4 * static_cast<int64_t>(lanes.size())));
  stream_->synchronize();  // the host copies may go
  return batch;
}

void Engine::forward(std::span<const LaneInput> inputs, const Probe& probe) {
  const ModelConfig& c = config();
  std::vector<int32_t> tokens;
  for (const LaneInput& in : inputs) {
    for (int32_t t : in.tokens)
      if (t < 0 || t >= c.vocab_size)
        throw Error(ErrorKind::Input, fmt::format("token id {} is outside the vocabulary of {}", t, c.vocab_size));
    tokens.insert(tokens.end(), in.tokens.begin(), in.tokens.end());
  }
  if (tokens.empty() || static_cast<int64_t>(tokens.size()) > options_.max_rows)
    throw Error(ErrorKind::Internal,
                fmt::format("a forward of {} rows, 1 to {} are possible", tokens.size(), options_.max_rows));
  lanes_.clear();
  int32_t row = 0;
  for (const LaneInput& in : inputs) {
    const auto count = static_cast<int32_t>(in.tokens.size());
    lanes_.push_back({in.slot, row, count, static_cast<int32_t>(state_.length(in.slot))});
    state_.append(in.slot, in.tokens);
    row += count;
  }
  batch_ = upload_batch(lanes_, tokens);
  const View stack = a_.stack.rows(0, batch_.rows);
  backend_.embed(*stream_, a_.tokens.rows(0, batch_.rows), weights_.embed, stack);
  size_t ple = 0;
  for (int64_t l = 0; l < c.layers(); ++l) {
    if (probe) probe(l, stack);
    const Layer& layer = weights_.layers[l];
    if (layer.ple) run_ple(*layer.ple, state_.ple(ple++), stack);
    run_layer(layer, layer.gdn ? &state_.gdn(l) : nullptr, layer.qsa ? &state_.kv(l) : nullptr, batch_, stack);
  }
  if (probe) probe(c.layers(), stack);
  draft_rows_.clear();
  if (has_draft_head()) absorb_drafts(inputs, lanes_);
}

void Engine::run_layer(const Layer& layer, const GdnState* gdn, const KvCache* kv, const Batch& batch,
                       const View& stack) {
  const int64_t R = batch.rows;
  const auto rows = [R](const View& v) { return v.rows(0, R); };
  const View u = rows(a_.u), inj = rows(a_.inj), y = rows(a_.y);
  Backend& ops = backend_;
  Stream& s = *stream_;

  ops.hc_mix(s, layer.attn_hc.ops, stack, u, inj);
  if (gdn != nullptr) {
    const GdnLayer& g = *layer.gdn;
    ops.linear(s, *g.qkv, u, rows(a_.qkv));
    ops.linear(s, *g.z, u, rows(a_.z));
    ops.linear(s, *g.b, u, rows(a_.b));
    ops.linear(s, *g.a, u, rows(a_.a));
    ops.gdn(s, g.ops, batch, rows(a_.qkv), rows(a_.z), rows(a_.b), rows(a_.a), *gdn, rows(a_.gdn_out));
    ops.linear(s, *g.out, rows(a_.gdn_out), y);
  } else {
    const QsaLayer& q = *layer.qsa;
    const QsaRows qr{rows(a_.qsa.query_gate), rows(a_.qsa.key), rows(a_.qsa.value), rows(a_.qsa.index),
                     rows(a_.qsa.selected)};
    ops.linear(s, *q.q, u, qr.query_gate);
    ops.linear(s, *q.k, u, qr.key);
    ops.linear(s, *q.v, u, qr.value);
    ops.linear(s, *q.index_qk, u, qr.index);
    ops.qsa_write(s, q.ops, batch, qr, *kv);
    ops.qsa_select(s, q.ops, batch, qr, *kv);
    ops.qsa_attend(s, q.ops, batch, qr, *kv, rows(a_.attended));
    ops.linear(s, *q.o, rows(a_.attended), y);
  }
  ops.hc_inject(s, inj, y, stack);

  const MoeLayer& m = layer.moe;
  ops.hc_mix(s, layer.mlp_hc.ops, stack, u, inj);
  ops.linear(s, *m.router, u, rows(a_.router));
  ops.router(s, config().normalise_top_k, rows(a_.router), rows(a_.ids), rows(a_.weights));
  if (routing_) report_routing(layer, rows(a_.ids));
  ops.experts(s, *m.experts, u, rows(a_.ids), rows(a_.slots));
  ops.linear(s, *m.shared_gate, u, rows(a_.shared_gate));
  ops.linear(s, *m.shared_up, u, rows(a_.shared_up));
  ops.swiglu(s, rows(a_.shared_gate), rows(a_.shared_up), rows(a_.shared_gate));
  ops.linear(s, *m.shared_down, rows(a_.shared_gate), rows(a_.shared));
  ops.linear(s, *m.shared_expert_gate, u, rows(a_.shared_expert_gate));
  ops.combine(s, rows(a_.slots), rows(a_.weights), rows(a_.shared), rows(a_.shared_expert_gate), y);
  ops.hc_inject(s, inj, y, stack);
}

void Engine::report_routing(const Layer& layer, const View& ids) {
  std::vector<int32_t> host(ids.size());
  backend_.copy(*stream_, host_view(host.data(), DType::I32, ids.size()).reshape({ids.shape[0], ids.shape[1]}), ids);
  stream_->synchronize();
  const bool draft = weights_.mtp && &layer == &weights_.mtp->layer;
  routing_(draft ? config().layers() : &layer - weights_.layers.data(), host);
}

void Engine::run_ple(const PleLayer& ple, const View& state, const View& stack) {
  const int64_t R = batch_.rows, heads = ple.hash.heads(), bytes = ple.table.row_bytes();
  ngram_host_.resize(R * heads * bytes);
  std::vector<int64_t> index(heads);
  for (const Lane& lane : lanes_) {
    const std::span<const int32_t> history = state_.tokens(lane.slot);
    for (int32_t i = 0; i < lane.rows; ++i) {
      ple.hash.rows(history.first(lane.start + i + 1), index.data());
      std::byte* to = ngram_host_.data() + (lane.first_row + i) * heads * bytes;
      for (int64_t h = 0; h < heads; ++h) std::memcpy(to + h * bytes, ple.table.row(index[h]), bytes);
    }
  }
  View packed = a_.ngram_packed;
  packed.dtype = ple.table.bits() > 0 ? DType::I16 : ple.table.plain_dtype();
  packed.rank = 3;
  packed.shape = {R, heads, bytes / static_cast<int64_t>(dtype_size(packed.dtype))};
  View host = packed;
  host.space = Space::Host, host.data = ngram_host_.data();
  backend_.copy(*stream_, packed, host);
  stream_->synchronize();  // the gathered rows may be overwritten
  const View e = a_.ngram.rows(0, R), key = a_.ple_key.rows(0, R), value = a_.ple_value.rows(0, R);
  backend_.ngram_decode(*stream_, ple.table.bits(), packed, ple.head_bias, e);
  backend_.linear(*stream_, *ple.key, e, key);
  backend_.linear(*stream_, *ple.value, e, value);
  backend_.ple_mix(*stream_, ple.ops, batch_, key, value, state, stack);
}

void Engine::absorb_drafts(std::span<const LaneInput> inputs, std::span<const Lane> trunk) {
  const MtpHead& m = *weights_.mtp;
  std::vector<Lane> lanes;
  std::vector<int32_t> next;
  int32_t row = 0;
  for (size_t i = 0; i < trunk.size(); ++i) {
    const Lane& lane = trunk[i];
    // The row before this forward waited for this lane's first token; the lane's last row waits for the next forward.
    const bool waiting = lane.start > 0;
    const int32_t count = lane.rows - (waiting ? 0 : 1);
    const View rows = a_.stack.rows(lane.first_row, lane.rows);
    if (waiting) backend_.copy(*stream_, a_.gather.rows(row, 1), state_.last_stack(lane.slot));
    if (lane.rows > 1)
      backend_.copy(*stream_, a_.gather.rows(row + (waiting ? 1 : 0), lane.rows - 1), rows.rows(0, lane.rows - 1));
    backend_.copy(*stream_, state_.last_stack(lane.slot), rows.rows(lane.rows - 1, 1));
    draft_rows_.push_back({row, count, lane.start - (waiting ? 1 : 0)});
    if (count > 0) lanes.push_back({lane.slot, row, count, lane.start - (waiting ? 1 : 0)});
    const auto tokens = inputs[i].tokens.subspan(waiting ? 0 : 1);
    next.insert(next.end(), tokens.begin(), tokens.end());
    row += count;
  }
  if (next.empty()) return;
  const Batch batch = upload_batch(lanes, next);
  const int64_t R = batch.rows, n = config().streams, H = config().hidden_size;
  const View stacks = a_.gather.rows(0, R), hidden = a_.draft_hidden.rows(0, R), out = a_.draft_stack.rows(0, R);
  const View embedded = a_.draft_embed.rows(0, R), projected = a_.y.rows(0, R);
  backend_.embed(*stream_, a_.tokens.rows(0, R), weights_.embed, embedded);
  backend_.grouped_norm(*stream_, m.norm_embedding, H, embedded, embedded);
  backend_.linear(*stream_, *m.fc_embedding, embedded, projected);
  backend_.grouped_norm(*stream_, m.norm_hidden, H, stacks, stacks);
  backend_.linear(*stream_, *m.fc_hidden, stacks.reshape({R * n, H}), hidden.reshape({R * n, H}));
  backend_.add(*stream_, n, hidden.reshape({R * n, H}), projected, out.reshape({R * n, H}));
  run_layer(m.layer, nullptr, &state_.draft_kv(), batch, out);
}

View Engine::gather_stacks(const View& stacks, std::span<const int32_t> rows) {
  if (static_cast<int64_t>(rows.size()) > options_.max_rows)
    throw Error(ErrorKind::Internal,
                fmt::format("logits of {} rows, at most {} at once", rows.size(), options_.max_rows));
  for (size_t i = 0; i < rows.size(); ++i)
    backend_.copy(*stream_, a_.gather.rows(static_cast<int64_t>(i), 1), stacks.rows(rows[i], 1));
  return a_.gather.rows(0, static_cast<int64_t>(rows.size()));
}

void Engine::mix(const HyperConnection& mixer, const View& stack, const View& out) {
  backend_.hc_mix(*stream_, mixer.ops, stack, out, View{});
}

View Engine::head(const View& hidden) {
  const int64_t rows = hidden.shape[0], vocab = config().vocab_size;
  if (!a_.logits || a_.logits.shape[0] < rows) a_.logits = make(DType::F32, {rows, vocab});
  const View out = a_.logits.rows(0, rows);
  backend_.linear(*stream_, *weights_.lm_head, hidden, out);
  return out;
}

View Engine::logits(std::span<const int32_t> rows) {
  const View hidden = a_.head_in.rows(0, static_cast<int64_t>(rows.size()));
  mix(weights_.mixer, gather_stacks(a_.stack, rows), hidden);
  return head(hidden);
}

View Engine::draft_logits(std::span<const int32_t> rows) {
  const View hidden = a_.head_in.rows(0, static_cast<int64_t>(rows.size()));
  mix(weights_.mtp->mixer, gather_stacks(a_.draft_stack, rows), hidden);
  return head(hidden);
}

View Engine::mixed() {
  const View out = a_.head_in.rows(0, batch_.rows);
  mix(weights_.mixer, a_.stack.rows(0, batch_.rows), out);
  return out;
}

std::vector<int32_t> Engine::sample(int64_t valid, std::span<const SampleParams> params) {
  const auto rows = static_cast<int64_t>(params.size());
  std::vector<int32_t> ids(rows);
  const View out = a_.sampled.rows(0, rows);
  backend_.sample(*stream_, valid, params, a_.logits.rows(0, rows), out);
  backend_.copy(*stream_, host_view(ids.data(), DType::I32, rows), out);
  stream_->synchronize();
  return ids;
}

std::vector<float> Engine::to_host(const View& v) {
  std::vector<float> out(v.size());
  backend_.copy(*stream_, host_view(out.data(), DType::F32, v.size()), v);
  stream_->synchronize();
  return out;
}

}  // namespace fnx
