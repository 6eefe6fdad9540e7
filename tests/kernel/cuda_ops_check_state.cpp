// Operations that carry a sequence's state: GDN and PLE. Whole prompts against the reference, chunks against the whole.
#include <algorithm>

#include "kernels/cuda/gdn.h"
#include "kernels/cuda/ple.h"
#include "ops_check.h"

namespace fnx::check {

namespace {

// Three sequences of a batch; they are also cut into launches of few rows.
const std::vector<int> kLengths = {1, 21, 350};
const std::vector<int> kSlots = {2, 0, 3};
constexpr int64_t kSlotCount = 4;

std::vector<Lane> whole_lanes() {
  std::vector<Lane> lanes;
  int first = 0;
  for (size_t i = 0; i < kLengths.size(); ++i) {
    lanes.push_back({kSlots[i], first, kLengths[i], 0});
    first += kLengths[i];
  }
  return lanes;
}

// Rows [from, from + count) of sequence i inside the whole batch.
int64_t row_of(size_t i, int from) {
  int64_t row = from;
  for (size_t j = 0; j < i; ++j) row += kLengths[j];
  return row;
}

void check_gdn(Backend& cpu, Stream& stream, int64_t kh, int64_t vh, bool silu_gate) {
  const int64_t taps = 4, channels = (2 * kh + vh) * 128, vd = vh * 128, history = taps - 1;
  Tables tables(whole_lanes(), kSlotCount, 1);
  const int64_t rows = tables.rows;
  std::vector<float> qkv = normal(rows * channels), z = normal(rows * vd), b = normal(rows * vh), a = normal(rows * vh),
                     conv = normal(channels * taps, 0.5f), a_log = normal(vh, 0.5f), dt = normal(vh),
                     norm = normal(vd, 0.1f, 1), conv_state = normal(kSlotCount * history * channels),
                     delta = normal(kSlotCount * vh * 128 * 128, 0.1f), out(rows * vd);
  const std::vector<float> conv0 = conv_state, delta0 = delta;
  Device<float> dq(qkv), dz(z), db(b), da(a), dconv(conv), dal(a_log), ddt(dt), dn(norm), dcs(conv0), dd(delta0),
      dout(rows * vd), convolved(rows * channels), gates(rows * vh * 2);
  const auto launch = [&](const std::vector<int32_t>& table, int64_t first, int64_t count) {
    Device<int32_t> lanes(table);
    cuda::GdnParams p;
    p.qkv = dq + first * channels, p.z = dz + first * vd, p.b = db + first * vh, p.a = da + first * vh;
    p.out = dout + first * vd, p.conv = dconv, p.a_log = dal, p.dt_bias = ddt, p.norm = dn, p.eps = 1e-6f;
    p.silu_gate = silu_gate, p.conv_state = dcs, p.delta = dd;
    p.lanes = {lanes, static_cast<int64_t>(table.size() / 4)};
    p.rows = count, p.key_heads = kh, p.value_heads = vh, p.taps = taps, p.convolved = convolved, p.gates = gates;
    cuda::gdn(p, nullptr);
    cuda(cudaDeviceSynchronize(), "gdn");
  };
  launch(tables.lane_table(), 0, rows);
  const std::vector<float> whole = dout.take(), whole_delta = dd.take(), whole_conv = dcs.take();

  GdnWeights w{kh,
               vh,
               128,
               128,
               taps,
               view(conv, {channels, taps}),
               view(a_log, {vh}),
               view(dt, {vh}),
               view(norm, {128}),
               1e-6f,
               silu_gate ? Gate::Silu : Gate::Sigmoid};
  GdnState state{view(conv_state, {kSlotCount, history, channels}), view(delta, {kSlotCount, vh, 128, 128}), {}};
  cpu.gdn(stream, w, tables.batch(), view(qkv, {rows, channels}), view(z, {rows, vd}), view(b, {rows, vh}),
          view(a, {rows, vh}), state, view(out, {rows, vd}));
  const std::string name = "gdn " + std::to_string(kh) + "/" + std::to_string(vh);
  near(name, whole, out, 5e-6);
  near(name + " delta state", whole_delta, delta);
  same(name + " conv state", whole_conv, conv_state);

  dcs.put(conv0), dd.put(delta0), dout.poison();
  for (size_t i = 0; i < kLengths.size(); ++i)
    for (int from = 0, step = 1; from < kLengths[i]; from += step, step = step % 7 + 1) {
      const int count = std::min(step, kLengths[i] - from);
      launch({kSlots[i], 0, count, from}, row_of(i, from), count);
    }
  same(name + " chunked", dout.take(), whole);
  same(name + " chunked delta state", dd.take(), whole_delta);
  same(name + " chunked conv state", dcs.take(), whole_conv);
}

void check_ple(Backend& cpu, Stream& stream, int64_t hidden) {
  const int64_t n = 4, taps = 4, dilation = 3, history = (taps - 1) * dilation, wide = n * hidden;
  Tables tables(whole_lanes(), kSlotCount, 1);
  const int64_t rows = tables.rows;
  std::vector<float> nk = normal(wide, 0.1f), nq = normal(wide, 0.1f), nc = normal(wide, 0.1f),
                     conv = normal(wide * taps, 0.5f), key = normal(rows * wide), value = normal(rows * hidden),
                     state = normal(kSlotCount * history * wide), stack = normal(rows * wide, 2);
  const std::vector<float> state0 = state, stack0 = stack;
  Device<float> dnk(nk), dnq(nq), dnc(nc), dconv(conv), dk(key), dv(value), ds(state0), dst(stack0), gate(rows * n),
      normed(rows * wide);
  const auto launch = [&](const std::vector<int32_t>& table, int64_t first, int64_t count) {
    Device<int32_t> lanes(table);
    cuda::PleMixParams p;
    p.norm_key = dnk, p.norm_query = dnq, p.norm_conv = dnc;
    p.key_eps = p.query_eps = p.conv_eps = 1e-6f;
    p.conv = dconv, p.key = dk + first * wide, p.value = dv + first * hidden, p.state = ds,
    p.stack = dst + first * wide;
    p.lanes = {lanes, static_cast<int64_t>(table.size() / 4)};
    p.rows = count, p.streams = n, p.hidden = hidden, p.taps = taps, p.dilation = dilation;
    p.gate = gate, p.normed = normed;
    cuda::ple_mix(p, nullptr);
    cuda(cudaDeviceSynchronize(), "ple_mix");
  };
  launch(tables.lane_table(), 0, rows);
  const std::vector<float> whole = dst.take(), whole_state = ds.take();
  PleWeights w{{view(nk, {wide}), 1e-6f},
               {view(nq, {wide}), 1e-6f},
               {view(nc, {wide}), 1e-6f},
               view(conv, {wide, taps}),
               taps,
               dilation};
  cpu.ple_mix(stream, w, tables.batch(), view(key, {rows, wide}), view(value, {rows, hidden}),
              view(state, {kSlotCount, history, wide}), view(stack, {rows, n, hidden}));
  const std::string name = "ple_mix " + std::to_string(hidden);
  near(name, whole, stack);
  near(name + " state", whole_state, state);

  ds.put(state0), dst.put(stack0);
  for (size_t i = 0; i < kLengths.size(); ++i)
    for (int from = 0, step = 1; from < kLengths[i]; from += step, step = step % 11 + 1) {
      const int count = std::min(step, kLengths[i] - from);
      launch({kSlots[i], 0, count, from}, row_of(i, from), count);
    }
  same(name + " chunked", dst.take(), whole);
  same(name + " chunked state", ds.take(), whole_state);
}

void check_ngram(Backend& cpu, Stream& stream) {
  const int64_t rows = 5, heads = 16, dim = 160;
  for (int bits = 0; bits <= 8; ++bits) {
    const int64_t width = bits == 0 ? dim : 1 + dim * bits / 16;
    std::vector<uint16_t> packed(rows * heads * width);
    for (uint16_t& x : packed) x = static_cast<uint16_t>(generator()());
    for (int64_t i = 0; i < rows * heads; ++i) packed[i * width] = f32_to_f16(0.01f * static_cast<float>(i + 1));
    if (bits == 0) packed = halves(packed.size(), 1, DType::BF16);
    std::vector<float> bias = normal(heads * dim), out(rows * heads * dim);
    const DType type = bits == 0 ? DType::BF16 : DType::I16;
    cpu.ngram_decode(stream, bits, view(packed, type, {rows, heads, width}), view(bias, {heads, dim}),
                     view(out, {rows, heads * dim}));
    Device<uint16_t> dp(packed);
    Device<float> db(bias), dout(out.size());
    cuda::ngram_decode({dp.get(), type, db, dout, rows, heads, dim, bits}, nullptr);
    same("ngram_decode " + std::to_string(bits) + " bits", dout.take(), out);
  }
}

}  // namespace

void check_state(Backend& cpu) {
  auto stream = cpu.make_stream();
  check_gdn(cpu, *stream, 1, 3, false);
  check_gdn(cpu, *stream, 16, 48, true);
  check_ngram(cpu, *stream);
  check_ple(cpu, *stream, 256);
  check_ple(cpu, *stream, 2560);
}

}  // namespace fnx::check
