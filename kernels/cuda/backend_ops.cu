// The operations of the cuda backend: views to parameters, workspaces, one launcher each.
#include "kernels/cuda/backend.h"
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/embed.h"
#include "kernels/cuda/gdn.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/ple.h"
#include "kernels/cuda/qsa.h"
#include "kernels/cuda/sample.h"

namespace fnx::cuda {

namespace {

static_assert(sizeof(SampleRow) == sizeof(SampleParams) && offsetof(SampleRow, seed) == offsetof(SampleParams, seed) &&
              offsetof(SampleRow, position) == offsetof(SampleParams, position));

constexpr int64_t kMostScores = int64_t{18} << 20;  // index scores at a time; further rows are taken in turns

BackendStream& of(Stream& stream) { return static_cast<BackendStream&>(stream); }
float* f32(const View& v) { return reinterpret_cast<float*>(v.data); }
int32_t* i32(const View& v) { return reinterpret_cast<int32_t*>(v.data); }

Lanes lanes_of(const Batch& batch) {
  return {i32(batch.lane_table), static_cast<int64_t>(batch.lanes.size()),
          batch.trials.rank > 0 ? i32(batch.trials) : nullptr};
}

QsaShape shape_of(const QsaWeights& w, const Batch& batch, const KvCache& kv) {
  QsaShape s;
  s.rows = batch.rows, s.heads = w.heads, s.kv_heads = w.kv_heads, s.head_dim = w.head_dim;
  s.index_heads = w.index_heads, s.index_dim = w.index_dim, s.ratio = w.ratio, s.blocks = w.blocks;
  s.rotary = w.rotary, s.page_tokens = kv.page_tokens;
  s.block_table = i32(batch.block_table), s.table_width = batch.block_table.shape[1];
  s.kv_table = batch.kv_table.rank > 0 ? i32(batch.kv_table) : s.block_table;
  s.lanes = lanes_of(batch);
  return s;
}

QsaCache cache_of(const KvCache& kv) {
  return {kv.keys.dtype,
          {kv.keys.data, kv.far_keys.data},
          {kv.values.data, kv.far_values.data},
          f32(kv.index_keys),
          f32(kv.raw_keys),
          kv.raw_keys.shape[1],
          kv.keys.shape[0] * kv.page_tokens};
}

const CudaLinear& plain_f16(const Linear& linear, const char* what) {
  const auto& l = static_cast<const CudaLinear&>(linear);
  if (!l.is_plain() || l.plain_dtype != DType::F16 || l.bias != nullptr)
    throw Error(ErrorKind::Unsupported, std::string("hyper-connection weight ") + what +
                                            " is not a plain F16 matrix, which the cuda backend needs; use --backend "
                                            "cpu");
  return l;
}

}  // namespace

void CudaBackend::gather(Stream& stream, View ids, View from, View to, const RowCopies& copies) {
  BackendStream& s = of(stream);
  const int64_t bytes = to.row_size() * static_cast<int64_t>(dtype_size(to.dtype));
  const int32_t* const places = copies ? i32(copies.places) : nullptr;
  if (s.running())
    move_rows({i32(ids), from.data, to.data, ids.size(), bytes, false, places, copies.to.data}, s.handle());
}

void CudaBackend::embed(Stream& stream, View tokens, View table, View out) {
  BackendStream& s = of(stream);
  if (s.running())
    cuda::embed({i32(tokens), table.data, table.dtype, f32(out), tokens.size(), out.shape[1], out.shape[2]},
                s.handle());
}

void CudaBackend::grouped_norm(Stream& stream, const NormWeights& w, int64_t group, View x, View out) {
  BackendStream& s = of(stream);
  const int64_t width = w.weight.size();
  if (s.running())
    cuda::grouped_norm({f32(x), f32(w.weight), f32(out), x.size() / width, width / group, group, w.eps}, s.handle());
}

void CudaBackend::linear(Stream& stream, const Linear& linear, View x, View y) {
  BackendStream& s = of(stream);
  const auto& l = static_cast<const CudaLinear&>(linear);
  const int64_t rows = x.shape[0];
  if (l.is_plain()) {
    PlainLinearParams p{l.plain, l.plain_dtype, l.bias, f32(x), f32(y), rows, l.in, l.out, {}};
    p.work.partials = s.area<float>(Area::PlainPartials, plain_partials(rows, l.in, l.out));
    p.work.counters = s.area<uint32_t>(Area::PlainCounters, plain_counters(l.in, l.out));
    if (s.running()) plain_linear(p, s.handle());
    return;
  }
  Exl3Linear p{l.exl3, rows, f32(x), y.data, DType::F32, nullptr, 0};
  p.workspace_bytes = exl3_workspace_bytes(l.in, l.out, rows);
  p.workspace = s.area(Area::Linear, p.workspace_bytes);
  if (s.running()) exl3_linear(p, s.handle());
}

// The quantized ones first, then the plain ones beside them; neighbours of plain weights share a launch.
void CudaBackend::linears(Stream& stream, std::span<const Linear* const> list, View x, std::span<const View> y) {
  BackendStream& s = of(stream);
  const int64_t rows = x.shape[0];
  std::vector<Exl3Weight> weights;
  std::vector<Exl3Linear> quantized;
  std::vector<PlainLinearParams> plain;
  for (size_t i = 0; i < list.size(); ++i) {
    const auto& l = static_cast<const CudaLinear&>(*list[i]);
    if (l.is_plain()) {
      plain.push_back({l.plain, l.plain_dtype, l.bias, f32(x), f32(y[i]), rows, l.in, l.out, {}});
    } else {
      weights.push_back(l.exl3);
      quantized.push_back({l.exl3, rows, f32(x), y[i].data, DType::F32, nullptr, 0});
    }
  }
  if (!quantized.empty()) {
    const size_t bytes = exl3_linears_workspace_bytes(weights, rows);
    void* workspace = s.area(Area::Linear, bytes);
    for (Exl3Linear& p : quantized) p.workspace = workspace, p.workspace_bytes = bytes;
    if (s.running()) exl3_linears(quantized, s.handle());
  }
  bool beside = !quantized.empty();
  for (size_t i = 0; i < plain.size(); ++i, beside = false) {
    PlainLinearParams& a = plain[i];
    a.beside = beside;
    const bool pair = i + 1 < plain.size() && plain_pairs(a, plain[i + 1]);
    const int64_t counters = plain_counters(a.in, a.out) + (pair ? plain_counters(a.in, plain[i + 1].out) : 0);
    a.work.partials = s.area<float>(Area::PlainPartials, pair ? plain_pair_partials(rows, a.in, a.out, plain[i + 1].out)
                                                              : plain_partials(rows, a.in, a.out));
    a.work.counters = s.area<uint32_t>(Area::PlainCounters, counters);
    if (s.running()) pair ? plain_linear_pair(a, plain[i + 1], s.handle()) : plain_linear(a, s.handle());
    i += pair ? 1 : 0;
  }
}

void CudaBackend::add(Stream& stream, int64_t repeat, View a, View b, View out) {
  BackendStream& s = of(stream);
  if (s.running()) cuda::add({f32(a), f32(b), f32(out), a.shape[0], a.row_size(), repeat}, s.handle());
}

void CudaBackend::hc_mix(Stream& stream, const HcWeights& w, const Injection& lacking, View stack, View u, View inj) {
  BackendStream& s = of(stream);
  HcMixParams p;
  p.rows = stack.shape[0], p.streams = stack.shape[1], p.hidden = stack.shape[2], p.rank = w.down->out;
  p.stack = f32(stack), p.norm_weight = f32(w.norm.weight), p.eps = w.norm.eps;
  p.down = plain_f16(*w.down, "down").plain, p.up = plain_f16(*w.up, "up").plain;
  p.inject = w.inject == nullptr ? nullptr : plain_f16(*w.inject, "inject").plain;
  p.lacking_inj = f32(lacking.inj), p.lacking_y = f32(lacking.y);
  p.u = f32(u), p.inj = f32(inj);
  p.normed = s.area<float>(Area::HcNormed, p.rows * p.streams * p.hidden);
  p.low = s.area<float>(Area::HcLow, p.rows * p.rank);
  p.work.partials = s.area<float>(Area::PlainPartials, hc_partials(p.rows, p.streams, p.hidden, p.rank));
  p.work.counters = s.area<uint32_t>(Area::PlainCounters, hc_counters(p.streams, p.hidden, p.rank));
  if (s.running()) cuda::hc_mix(p, s.handle());
}

void CudaBackend::hc_inject(Stream& stream, const Injection& lacking, View stack) {
  BackendStream& s = of(stream);
  if (s.running())
    cuda::hc_inject({f32(lacking.inj), f32(lacking.y), f32(stack), stack.shape[0], stack.shape[1], stack.shape[2]},
                    s.handle());
}

void CudaBackend::gdn(Stream& stream, const GdnWeights& w, const Batch& batch, View qkv, View z, View b, View a,
                      const GdnState& state, View out) {
  BackendStream& s = of(stream);
  if (w.key_dim != 128 || w.value_dim != 128)
    throw Error(ErrorKind::Unsupported, "linear attention heads of " + std::to_string(w.key_dim) + " and " +
                                            std::to_string(w.value_dim) +
                                            ": the cuda backend takes 128; use --backend cpu");
  GdnParams p;
  p.qkv = f32(qkv), p.z = f32(z), p.b = f32(b), p.a = f32(a), p.out = f32(out);
  p.conv = f32(w.conv), p.a_log = f32(w.a_log), p.dt_bias = f32(w.dt_bias), p.norm = f32(w.norm);
  p.eps = w.eps, p.silu_gate = w.gate == Gate::Silu;
  p.conv_state = f32(state.conv), p.delta = f32(state.delta);
  p.lanes = lanes_of(batch);
  p.rows = batch.rows, p.key_heads = w.key_heads, p.value_heads = w.value_heads, p.taps = w.taps;
  p.trials = state.trials(), p.tried = p.trials > 0 ? f32(state.tried) : nullptr;
  const int64_t slots = state.delta.shape[0];
  p.convolved = s.area<float>(Area::GdnConvolved, (p.rows + slots * p.trials) * qkv.shape[1]);
  p.gates = s.area<float>(Area::GdnGates, (p.rows + slots * p.trials) * p.value_heads * 2);
  if (s.running()) cuda::gdn(p, s.handle());
}

void CudaBackend::qsa_write(Stream& stream, const QsaWeights& w, const Batch& batch, const QsaRows& rows,
                            const KvCache& kv) {
  BackendStream& s = of(stream);
  QsaWriteParams p;
  p.shape = shape_of(w, batch, kv), p.cache = cache_of(kv);
  p.query_gate = f32(rows.query_gate), p.key = f32(rows.key), p.value = f32(rows.value), p.index = f32(rows.index);
  p.inv_freq = f32(w.inv_freq);
  p.q_norm = f32(w.q_norm.weight), p.k_norm = f32(w.k_norm.weight);
  p.index_q_norm = f32(w.index_q_norm.weight), p.index_k_norm = f32(w.index_k_norm.weight);
  p.q_eps = w.q_norm.eps, p.k_eps = w.k_norm.eps;
  p.index_q_eps = w.index_q_norm.eps, p.index_k_eps = w.index_k_norm.eps;
  if (s.running()) cuda::qsa_write(p, s.handle());
}

void CudaBackend::qsa_select(Stream& stream, const QsaWeights& w, const Batch& batch, const QsaRows& rows,
                             const KvCache& kv) {
  BackendStream& s = of(stream);
  QsaSelectParams p;
  p.shape = shape_of(w, batch, kv), p.cache = cache_of(kv);
  p.index = f32(rows.index), p.selected = i32(rows.selected);
  p.max_complete = batch.most_positions / w.ratio;
  if (p.max_complete > w.blocks) {
    const int64_t width = qsa_score_width(p.max_complete);
    p.score_rows = std::clamp<int64_t>(kMostScores / width, 1, p.shape.rows);
    // Grows with rows and context, so that what the largest call reserves serves the others.
    const bool whole = p.shape.rows * width <= kMostScores;
    p.scores = s.area<float>(Area::QsaScores, whole ? p.shape.rows * width : std::max(kMostScores, width));
  }
  if (s.running()) cuda::qsa_select(p, s.handle());
}

void CudaBackend::qsa_attend(Stream& stream, const QsaWeights& w, const Batch& batch, const QsaRows& rows,
                             const KvCache& kv, View out) {
  BackendStream& s = of(stream);
  QsaAttendParams p;
  p.shape = shape_of(w, batch, kv), p.cache = cache_of(kv);
  p.query_gate = f32(rows.query_gate), p.selected = i32(rows.selected), p.out = f32(out);
  p.partials = s.area<float>(Area::QsaPartials, qsa_partials(p.shape));
  if (s.running()) cuda::qsa_attend(p, s.handle());
}

void CudaBackend::router(Stream& stream, bool normalise, View logits, View ids, View weights) {
  BackendStream& s = of(stream);
  if (!s.running()) return;
  const bool one_more = ids.shape[1] > weights.shape[1];
  cuda::router(
      {f32(logits), i32(ids), f32(weights), logits.shape[0], logits.shape[1], weights.shape[1], normalise, one_more},
      s.handle());
  if (one_more) s.routed(i32(ids), logits.shape[1]);
}

void CudaBackend::experts(Stream& stream, const ExpertBank& bank, View x, View ids, View slots) {
  BackendStream& s = of(stream);
  const auto& b = static_cast<const CudaExperts&>(bank);
  Exl3Experts p;
  p.rows = ids.shape[0], p.slots_per_row = ids.shape[1], p.experts = b.experts, p.hidden = b.in, p.width = b.width;
  p.codebook = b.codebook, p.table = b.table, p.ids = i32(ids), p.x = f32(x), p.slots = f32(slots);
  p.last_known = s.routed_last(p.ids, p.experts - 1);
  p.workspace_bytes = exl3_experts_workspace_bytes(p.rows, p.slots_per_row, p.experts, p.hidden, p.width);
  p.workspace = s.area(Area::Experts, p.workspace_bytes);
  if (s.running()) exl3_experts(p, s.handle());
}

void CudaBackend::take_slots(Stream& stream, int64_t per_part, View ids, View parts, View slots) {
  BackendStream& s = of(stream);
  if (s.running())
    cuda::take_slots(
        {i32(ids), f32(parts), f32(slots), ids.size(), slots.size() / ids.size(), parts.shape[0], per_part},
        s.handle());
}

void CudaBackend::swiglu(Stream& stream, View gate, View up, View out) {
  BackendStream& s = of(stream);
  if (s.running()) cuda::swiglu({f32(gate), f32(up), f32(out), gate.size()}, s.handle());
}

void CudaBackend::combine(Stream& stream, View slots, View weights, View shared, View shared_gate, View y) {
  BackendStream& s = of(stream);
  if (s.running())
    cuda::combine({f32(slots), f32(weights), f32(shared), f32(shared_gate), f32(y), slots.shape[0], weights.shape[1],
                   slots.shape[2], slots.shape[1] > weights.shape[1]},
                  s.handle());
}

void CudaBackend::ngram_decode(Stream& stream, int bits, View packed, View bias, View out) {
  BackendStream& s = of(stream);
  const int64_t rows = packed.shape[0], heads = packed.shape[1];
  if (s.running())
    cuda::ngram_decode({packed.data, packed.dtype, f32(bias), f32(out), rows, heads, out.size() / (rows * heads), bits},
                       s.handle());
}

void CudaBackend::ple_mix(Stream& stream, const PleWeights& w, const Batch& batch, View key, View value, View state,
                          View stack) {
  BackendStream& s = of(stream);
  PleMixParams p;
  p.norm_key = f32(w.norm_key.weight), p.norm_query = f32(w.norm_query.weight), p.norm_conv = f32(w.norm_conv.weight);
  p.key_eps = w.norm_key.eps, p.query_eps = w.norm_query.eps, p.conv_eps = w.norm_conv.eps;
  p.conv = f32(w.conv), p.key = f32(key), p.value = f32(value), p.state = f32(state), p.stack = f32(stack);
  p.lanes = lanes_of(batch);
  p.rows = batch.rows, p.streams = stack.shape[1], p.hidden = stack.shape[2];
  p.taps = w.taps, p.dilation = w.dilation, p.trials = state.shape[1] - (w.taps - 1) * w.dilation;
  p.gate = s.area<float>(Area::PleGate, p.rows * p.streams);
  p.normed = s.area<float>(Area::PleNormed, p.rows * p.streams * p.hidden);
  if (s.running()) cuda::ple_mix(p, s.handle());
}

void CudaBackend::sample(Stream& stream, int64_t valid, bool greedy, View params, View logits, View ids) {
  BackendStream& s = of(stream);
  SampleLaunch p;
  p.logits = f32(logits), p.rows = reinterpret_cast<const SampleRow*>(params.data), p.ids = i32(ids);
  p.count = ids.size(), p.valid = valid, p.vocabulary = logits.shape[1], p.greedy = greedy;
  p.best = s.area<uint64_t>(Area::SampleBest, p.count * sample_chunks(valid));
  if (!greedy) {
    p.masses = s.area<uint64_t>(Area::SampleMasses, p.count * valid);
    p.bins = s.area<uint64_t>(Area::SampleBins, p.count * 2 * 2048);
  }
  if (s.running()) cuda::sample(p, s.handle());
}

}  // namespace fnx::cuda
