// The launches of a forward: trunk, draft head, draws. Nothing here reads host memory that a replay would not.
#include "libcore/engine/engine.h"

#include <algorithm>
#include <array>

namespace fnx {

void Engine::launch_trunk(const Probe& probe) {
  const ModelConfig& c = config();
  const View stack = a_.stack.rows(0, batch_.rows);
  backend_.embed(*stream_, in_.tokens.device, weights_.embed, stack);
  size_t ple = 0;
  Injection lacking;
  for (int64_t l = 0; l < c.layers(); ++l) {
    const Layer& layer = weights_.layers[l];
    if (probe || layer.ple) complete(lacking, stack);
    if (probe) probe(l, stack);
    if (layer.ple) run_ple(ple++, *layer.ple, stack);
    lacking = run_layer(layer, layer.gdn ? &state_.gdn(l) : nullptr, layer.qsa ? &state_.kv(l) : nullptr, batch_, stack,
                        lacking);
  }
  complete(lacking, stack);
  if (probe) probe(c.layers(), stack);
}

void Engine::launch_absorption() {
  if (!runs_draft_head()) return;
  gather_draft_stacks({});
  absorb_drafts();
  if (late_rows_.empty()) return;
  const View kept = a_.gather.rows(0, static_cast<int64_t>(late_rows_.size()));
  backend_.gather(*stream_, in_.late_rows.device, a_.stack, kept, kept_stacks(in_.late_places.device));
}

RowCopies Engine::kept_stacks(const View& places) const {
  return runs_draft_head() ? RowCopies{places, state_.last_stacks()} : RowCopies{};
}

void Engine::complete(Injection& lacking, const View& stack) {
  if (lacking) backend_.hc_inject(*stream_, lacking, stack);
  lacking = {};
}

Injection Engine::run_layer(const Layer& layer, const GdnState* gdn, const KvCache* kv, const Batch& batch,
                            const View& stack, const Injection& lacking) {
  const int64_t R = batch.rows;
  const auto rows = [R](const View& v) { return v.rows(0, R); };
  const View u = rows(a_.u), y = rows(a_.y);
  const Injection attn{rows(a_.attn_inj), y}, mlp{rows(a_.mlp_inj), y};
  Backend& ops = backend_;
  Stream& s = *stream_;

  ops.hc_mix(s, layer.attn_hc.ops, lacking, stack, u, attn.inj);
  if (gdn != nullptr) {
    const GdnLayer& g = *layer.gdn;
    const Linear* const from_u[] = {g.qkv.get(), g.z.get(), g.b.get(), g.a.get()};
    ops.linears(s, from_u, u, std::array{rows(a_.qkv), rows(a_.z), rows(a_.b), rows(a_.a)});
    ops.gdn(s, g.ops, batch, rows(a_.qkv), rows(a_.z), rows(a_.b), rows(a_.a), *gdn, rows(a_.gdn_out));
    ops.linear(s, *g.out, rows(a_.gdn_out), y);
  } else {
    const QsaLayer& q = *layer.qsa;
    const QsaRows qr{rows(a_.qsa.query_gate), rows(a_.qsa.key), rows(a_.qsa.value), rows(a_.qsa.index),
                     rows(a_.qsa.selected)};
    const Linear* const from_u[] = {q.q.get(), q.k.get(), q.v.get(), q.index_qk.get()};
    ops.linears(s, from_u, u, std::array{qr.query_gate, qr.key, qr.value, qr.index});
    ops.qsa_write(s, q.ops, batch, qr, *kv);
    ops.qsa_select(s, q.ops, batch, qr, *kv);
    attend(q, batch, qr, *kv, rows(a_.attended));
    ops.linear(s, *q.o, rows(a_.attended), y);
  }

  const MoeLayer& m = layer.moe;
  ops.hc_mix(s, layer.mlp_hc.ops, attn, stack, u, mlp.inj);
  const Foreseen next = foresee(layer, stack);
  const int64_t columns = config().experts_per_token + (m.shared_in_bank() ? 1 : 0);
  const auto narrowed = [&](View v) {
    v.shape[1] = columns;
    return rows(v);
  };
  const View ids = narrowed(a_.ids), slots = narrowed(a_.slots);
  const Linear* const gates[] = {m.router.get(), m.shared_expert_gate.get()};
  ops.linears(s, gates, u, std::array{rows(a_.router), rows(a_.shared_expert_gate)});
  ops.router(s, config().normalise_top_k, rows(a_.router), ids, rows(a_.weights));
  run_experts(layer, u, ids, slots, next);
  if (slots_) report_slots(layer, ids, slots);
  View shared;
  if (!m.shared_in_bank()) {
    shared = rows(a_.shared);
    const Linear* const from_u[] = {m.shared_gate.get(), m.shared_up.get()};
    ops.linears(s, from_u, u, std::array{rows(a_.shared_gate), rows(a_.shared_up)});
    ops.swiglu(s, rows(a_.shared_gate), rows(a_.shared_up), rows(a_.shared_gate));
    ops.linear(s, *m.shared_down, rows(a_.shared_gate), shared);
  }
  ops.combine(s, slots, rows(a_.weights), shared, rows(a_.shared_expert_gate), y);
  if (m.per_rank > 0 && options_.plant == Plant::Add) add_planted_parts(y);
  return mlp;
}

bool Engine::stages(const Batch& batch) const {
  return std::any_of(batch.lanes.begin(), batch.lanes.end(), [&](const Lane& lane) { return state_.stages(lane); });
}

// Lanes of few rows read pages in host memory where they are. For one of many rows its pages are brought to the device,
// a cache at a time.
void Engine::attend(const QsaLayer& layer, const Batch& batch, const QsaRows& rows, const KvCache& kv,
                    const View& out) {
  for (size_t first = 0, end = 0; first < batch.lanes.size(); first = end) {
    const bool staged = state_.stages(batch.lanes[first]);
    for (end = first + 1; !staged && end < batch.lanes.size() && !state_.stages(batch.lanes[end]);) ++end;
    Batch part = batch;
    part.lanes = batch.lanes.subspan(first, end - first);
    part.lane_table = batch.lane_table.rows(static_cast<int64_t>(first), static_cast<int64_t>(end - first));
    if (staged) {
      part.kv_table = page_table(2);
      state_.stage(part.lanes[0].slot, kv);
    }
    backend_.qsa_attend(*stream_, layer.ops, part, rows, staged ? state_.staged(kv) : kv, out);
  }
}

// The stack lacks this layer's experts and the next one's attention: most of what a router sees is there.
Foreseen Engine::foresee(const Layer& layer, const View& stack) {
  const int64_t l = layer_number(layer);
  if (reserving_ || !foresight_ || !weights_.pools->looks_ahead() || stack.shape[0] > kMostForeseen ||
      l + 1 >= config().layers())
    return {};
  const auto turn = static_cast<size_t>(l % 2);
  const View ids = foreseen_rows(a_.next_ids[turn], stack.shape[0]);
  backend_.record(*stream_, *stack_mixed_);
  backend_.wait(*foresight_, *stack_mixed_);
  launch_foresight(weights_.layers[static_cast<size_t>(l + 1)], stack, ids);
  backend_.record(*foresight_, *foreseen_);
  return {ids, a_.stages[turn], l + 2 < config().layers() ? a_.stages[1 - turn] : View{}, weights_.pools->line_bytes()};
}

View Engine::foreseen_rows(const View& v, int64_t rows) const {
  const int64_t each = std::min(PoolStage::kForeseen / rows, config().experts);
  return v.rows(0, rows * each).reshape({rows, each});
}

void Engine::launch_foresight(const Layer& next, const View& stack, const View& ids) {
  const auto rows = [&](const View& v) { return v.rows(0, stack.shape[0]); };
  backend_.hc_mix(*foresight_, next.mlp_hc.ops, {}, stack, rows(a_.next_u), rows(a_.next_inj));
  backend_.linear(*foresight_, *next.moe.router, rows(a_.next_u), rows(a_.next_router));
  backend_.router(*foresight_, config().normalise_top_k, rows(a_.next_router), ids,
                  foreseen_rows(a_.next_weights, stack.shape[0]));
}

void Engine::run_experts(const Layer& layer, const View& x, const View& ids, const View& slots, const Foreseen& next) {
  const MoeLayer& m = layer.moe;
  if (m.per_rank > 0 && options_.plant == Plant::Add) backend_.clear(*stream_, slots);
  const auto compute = [&] { backend_.experts(*stream_, *m.experts, x, ids, slots); };
  ExpertPools* const pools = reserving_ ? nullptr : weights_.pools.get();
  const bool planned = pools != nullptr && pools->on_device(), reports = !reserving_ && routing_;
  const int64_t l = layer_number(layer), k = config().experts_per_token;
  std::span<const int32_t> routed;
  if (reports || (pools != nullptr && !planned)) routed = fetch_routing(ids);
  if (reports) routing_(l, routed);
  if (planned)
    pools->run_planned(*stream_, l, k, ids, next, foreseen_.get(), compute);
  else if (pools != nullptr)
    pools->run(*stream_, l, routed, compute);
  else
    compute();
  exchange_slots(m, ids, slots);
}

// Of a bank's pooled experts, about: ranks share the choices.
int64_t Engine::pool_choices(int64_t rows) const { return rows * config().experts_per_token / weights_.shard.world; }

// Without the shared expert's column, where the bank holds it.
std::span<const int32_t> Engine::fetch_routing(const View& ids) {
  const View to = routed_.view(DType::I32, {ids.shape[0], ids.shape[1]});
  backend_.copy(*stream_, to, ids);
  stream_->synchronize();
  auto* host = to.as<int32_t>();
  const auto columns = static_cast<size_t>(ids.shape[1]), routed = static_cast<size_t>(config().experts_per_token);
  size_t kept = 0;
  for (size_t i = 0; i < static_cast<size_t>(ids.size()); ++i)
    if (i % columns < routed) host[kept++] = host[i];
  return {host, kept};
}

int64_t Engine::layer_number(const Layer& layer) const {
  const bool draft = weights_.mtp && &layer == &weights_.mtp->layer;
  return draft ? config().layers() : &layer - weights_.layers.data();
}

void Engine::run_ple(size_t index, const PleLayer& ple, const View& stack) {
  const int64_t R = batch_.rows;
  const View e = a_.ngram.rows(0, R), key = a_.ple_key.rows(0, R), value = a_.ple_value.rows(0, R);
  backend_.ngram_decode(*stream_, ple.table.bits(), in_.ngram[index].device, ple.head_bias, e);
  backend_.linear(*stream_, *ple.key, e, key);
  backend_.linear(*stream_, *ple.value, e, value);
  backend_.ple_mix(*stream_, ple.ops, batch_, key, value, state_.ple(index), stack);
}

void Engine::gather_draft_stacks(const RowCopies& kept) {
  const View stacks = a_.gather.rows(0, draft_batch_.rows);
  if (draft_batch_.rows == 0) return;
  backend_.gather(*stream_, in_.from_last.device, state_.last_stacks(), stacks, {});
  backend_.gather(*stream_, in_.from_stack.device, a_.stack, stacks, kept);
}

void Engine::absorb_drafts() {
  const int64_t R = draft_batch_.rows;
  if (R > 0) run_draft_head(in_.draft_tokens.device, a_.gather.rows(0, R), draft_batch_, a_.draft_stack.rows(0, R));
}

void Engine::run_draft_head(const View& tokens, const View& stacks, const Batch& batch, const View& out) {
  const MtpHead& m = *weights_.mtp;
  const int64_t R = batch.rows, n = config().streams, H = config().hidden_size;
  const View hidden = a_.draft_hidden.rows(0, R);
  const View embedded = a_.draft_embed.rows(0, R), projected = a_.y.rows(0, R);
  backend_.embed(*stream_, tokens, weights_.embed, embedded);
  backend_.grouped_norm(*stream_, m.norm_embedding, H, embedded, embedded);
  backend_.linear(*stream_, *m.fc_embedding, embedded, projected);
  backend_.grouped_norm(*stream_, m.norm_hidden, H, stacks, stacks);
  backend_.linear(*stream_, *m.fc_hidden, stacks.reshape({R * n, H}), hidden.reshape({R * n, H}));
  backend_.add(*stream_, n, hidden.reshape({R * n, H}), projected, out.reshape({R * n, H}));
  Injection lacking = run_layer(m.layer, nullptr, &state_.draft_kv(), batch, out, {});
  complete(lacking, out);
}

void Engine::mix(const HyperConnection& mixer, const View& stack, const View& out) {
  backend_.hc_mix(*stream_, mixer.ops, {}, stack, out, View{});
}

void Engine::launch_draws(int64_t valid, bool greedy) {
  const int64_t D = in_.params.device.shape[0];
  const View stacks = a_.gather.rows(0, D), hidden = a_.head_in.rows(0, D), logits = a_.draw_logits.rows(0, D);
  backend_.gather(*stream_, in_.draw_rows.device, a_.stack, stacks, kept_stacks(in_.keep.device));
  mix(weights_.mixer, stacks, hidden);
  head(hidden, logits);
  backend_.sample(*stream_, valid, greedy, in_.params.device, logits, a_.sampled.rows(0, D));
  backend_.copy(*stream_, drawn_.view(DType::I32, {D}), a_.sampled.rows(0, D));
}

}  // namespace fnx
