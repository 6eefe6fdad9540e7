// Measurements of the operations of a decode round, each with arguments as the backend gives them.
#include <random>
#include <string>

#include "kernels/cuda/embed.h"
#include "kernels/cuda/gdn.h"
#include "kernels/cuda/kernel_bench_run.h"
#include "kernels/cuda/moe.h"
#include "kernels/cuda/norm_hc.h"
#include "kernels/cuda/ple.h"
#include "kernels/cuda/sample.h"

namespace fnx::cuda {

namespace {

constexpr BenchModel kModel;

BenchSeries bench_norm_hc(BenchRun& run, const BenchOperation& op) {
  BenchArena arena;
  const int64_t R = op.rows, n = kModel.streams, h = kModel.hidden, wide = n * h, rank = kModel.hc_rank;
  HcMixParams p;
  p.rows = R, p.streams = n, p.hidden = h, p.rank = rank, p.eps = 1e-6f;
  p.stack = arena.rows(R * wide, 1), p.norm_weight = arena.rows(wide, 2);
  p.u = arena.take<float>(R * h), p.inj = arena.take<float>(R * n);
  p.lacking_inj = arena.rows(R * n, 3), p.lacking_y = arena.rows(R * h, 4);
  p.normed = arena.take<float>(R * wide), p.low = arena.take<float>(R * rank);
  const cudaStream_t s = run.stream();
  if (op.kind == BenchKind::GroupedNorm)
    return run.rotate(1, [&](int) { grouped_norm({p.stack, p.norm_weight, p.normed, R, n, h, p.eps}, s); });
  if (op.kind == BenchKind::HcInject)
    return run.rotate(1, [&](int) { hc_inject({p.lacking_inj, p.lacking_y, p.stack, R, n, h}, s); });
  p.work = {arena.take<float>(hc_partials(R, n, h, rank)), arena.take<uint32_t>(hc_counters(n, h, rank))};
  const int64_t matrix = wide * rank, inject = n * wide, set = 2 * matrix + inject;
  const int copies = run.copies_of(2 * matrix);
  const uint16_t* weights = arena.scales(copies * set, 5);
  return run.rotate(copies, [&](int copy) {
    p.down = weights + copy * set, p.up = weights + copy * set + matrix;
    p.inject = weights + copy * set + 2 * matrix;
    op.kind == BenchKind::HcDown ? hc_down(p, s) : op.kind == BenchKind::HcUp ? hc_up(p, s) : hc_mix(p, s);
  });
}

// One matrix, or two over the same rows.
BenchSeries bench_product(BenchRun& run, const BenchOperation& op, int64_t in, int64_t out, int64_t second = 0) {
  BenchArena arena;
  const int64_t R = op.rows, set = (out + second) * in;
  const int copies = run.copies_of(2 * set);
  const uint16_t* weights = arena.scales(copies * set, 1);
  PlainLinearParams a, b;
  a.rows = R, a.in = in, a.out = out, a.x = arena.rows(R * in, 2), a.y = arena.take<float>(R * out);
  b = a, b.out = second, b.y = arena.take<float>(R * second);
  const bool pair = second > 0;
  const int64_t partials = pair ? plain_pair_partials(R, in, out, second) : plain_partials(R, in, out);
  const int64_t counters = plain_counters(in, out) + (pair ? plain_counters(in, second) : 0);
  a.work = {arena.take<float>(partials), arena.take<uint32_t>(counters)};
  return run.rotate(copies, [&](int copy) {
    a.weights = weights + copy * set, b.weights = weights + copy * set + out * in;
    pair ? plain_linear_pair(a, b, run.stream()) : plain_linear(a, run.stream());
  });
}

// The shared expert is a routed row's last slot.
BenchSeries bench_moe(BenchRun& run, const BenchOperation& op) {
  BenchArena arena;
  const int64_t R = op.rows, k = kModel.chosen, h = kModel.hidden;
  const cudaStream_t s = run.stream();
  if (op.kind == BenchKind::Router) {
    const RouterParams p{arena.rows(R * kModel.experts, 1),
                         arena.take<int32_t>(R * (k + 1)),
                         arena.take<float>(R * k),
                         R,
                         kModel.experts,
                         k,
                         true,
                         true};
    return run.rotate(1, [&](int) { router(p, s); });
  }
  if (op.kind == BenchKind::Swiglu) {
    const int64_t count = R * kModel.expert_width;
    const SwigluParams p{arena.rows(count, 1), arena.rows(count, 2), arena.take<float>(count), count};
    return run.rotate(1, [&](int) { swiglu(p, s); });
  }
  const CombineParams p{arena.rows(R * (k + 1) * h, 1),
                        arena.rows(R * k, 2),
                        nullptr,
                        arena.rows(R, 3),
                        arena.take<float>(R * h),
                        R,
                        k,
                        h,
                        true};
  return run.rotate(1, [&](int) { combine(p, s); });
}

Lanes lanes_of(BenchArena& arena, int64_t rows) {
  std::vector<int32_t> table;
  for (int32_t i = 0; i < rows; ++i) table.insert(table.end(), {i, i, 1, 0});
  return {arena.put(table), rows};
}

BenchSeries bench_gdn(BenchRun& run, const BenchOperation& op) {
  BenchArena arena;
  const int64_t R = op.rows, heads = kModel.value_heads, dim = kModel.gdn_dim, taps = kModel.gdn_taps;
  const int64_t channels = (2 * kModel.key_heads + heads) * dim, width = heads * dim;
  const int64_t conv = R * (taps - 1) * channels, delta = R * width * dim;
  const bool convolves = op.kind != BenchKind::GdnNorm, steps = convolves && op.kind != BenchKind::GdnConv;
  const int copies = convolves ? run.copies_of(4 * (conv + (steps ? delta : 0))) : 1;
  GdnParams p{arena.rows(R * channels, 1), arena.rows(R * width, 2), arena.rows(R * heads, 3),
              arena.rows(R * heads, 4)};
  p.out = arena.rows(R * width, 5);
  p.conv = arena.rows(channels * taps, 6), p.a_log = arena.rows(heads, 7), p.dt_bias = arena.rows(heads, 8);
  p.norm = arena.rows(dim, 9), p.eps = 1e-6f;
  p.lanes = lanes_of(arena, R), p.rows = R, p.key_heads = kModel.key_heads, p.value_heads = heads, p.taps = taps;
  p.convolved = arena.take<float>(R * channels), p.gates = arena.take<float>(R * heads * 2);
  auto *conv_state = arena.take<float>(copies * conv), *state = arena.take<float>((steps ? copies : 1) * delta);
  return run.rotate(copies, [&](int copy) {
    p.conv_state = conv_state + copy * conv, p.delta = state + (steps ? copy : 0) * delta;
    switch (op.kind) {
      case BenchKind::GdnConv:
        return gdn_conv(p, run.stream());
      case BenchKind::GdnRecurrence:
        return gdn_recurrence(p, run.stream());
      case BenchKind::GdnNorm:
        return gdn_norm(p, run.stream());
      default:
        return gdn(p, run.stream());
    }
  });
}

BenchSeries bench_ple(BenchRun& run, const BenchOperation& op) {
  BenchArena arena;
  const int64_t R = op.rows, n = kModel.streams, h = kModel.hidden, wide = n * h;
  if (op.kind == BenchKind::NgramDecode) {
    const int64_t words = kModel.ngram_heads * (1 + kModel.ngram_dim * kModel.ngram_bits / 16);
    const NgramDecodeParams p{arena.scales(R * words, 1),
                              DType::I16,
                              nullptr,
                              arena.take<float>(R * kModel.ngram_heads * kModel.ngram_dim),
                              R,
                              kModel.ngram_heads,
                              kModel.ngram_dim,
                              static_cast<int>(kModel.ngram_bits)};
    return run.rotate(1, [&](int) { ngram_decode(p, run.stream()); });
  }
  const int64_t state = R * (kModel.ple_taps - 1) * kModel.ple_dilation * wide;
  const int copies = run.copies_of(4 * state);
  PleMixParams p;
  p.norm_key = arena.rows(wide, 1), p.norm_query = arena.rows(wide, 2), p.norm_conv = arena.rows(wide, 3);
  p.key_eps = p.query_eps = p.conv_eps = 1e-6f;
  p.conv = arena.rows(wide * kModel.ple_taps, 4), p.key = arena.rows(R * wide, 5), p.value = arena.rows(R * h, 6);
  p.stack = arena.rows(R * wide, 7), p.lanes = lanes_of(arena, R);
  p.rows = R, p.streams = n, p.hidden = h, p.taps = kModel.ple_taps, p.dilation = kModel.ple_dilation;
  p.gate = arena.take<float>(R * n), p.normed = arena.take<float>(R * wide);
  float* states = arena.take<float>(copies * state);
  return run.rotate(copies, [&](int copy) {
    p.state = states + copy * state;
    ple_mix(p, run.stream());
  });
}

BenchSeries bench_embed(BenchRun& run, const BenchOperation& op) {
  BenchArena arena;
  std::vector<int32_t> tokens;
  for (int64_t r = 0; r < op.rows; ++r) tokens.push_back(static_cast<int32_t>(r * 9973 % kModel.vocabulary));
  const int64_t h = kModel.hidden, n = kModel.streams;
  const EmbedParams p{arena.put(tokens),
                      arena.scales(kModel.vocabulary * h, 1),
                      DType::BF16,
                      arena.take<float>(op.rows * n * h),
                      op.rows,
                      n,
                      h};
  return run.rotate(1, [&](int) { embed(p, run.stream()); });
}

BenchSeries bench_sample(BenchRun& run, const BenchOperation& op) {
  BenchArena arena;
  const int64_t R = op.rows, V = kModel.vocabulary;
  std::mt19937 generator(12345);
  std::normal_distribution<float> normal(0, 3);
  std::vector<float> logits(V * R);
  for (float& x : logits) x = normal(generator);
  std::vector<SampleRow> rows(R);
  for (int64_t r = 0; r < R; ++r) {
    rows[r].temperature = op.kind == BenchKind::Argmax ? 0.0f : 1.0f;
    rows[r].top_p = op.kind == BenchKind::SampleTopP ? 0.95f : 1.0f;
    rows[r].top_k = op.kind == BenchKind::SampleTopK ? 40 : 0;
    rows[r].seed = static_cast<uint64_t>(r);
  }
  SampleLaunch p;
  p.logits = arena.put(logits), p.rows = arena.put(rows), p.ids = arena.take<int32_t>(R);
  p.count = R, p.valid = p.vocabulary = V, p.greedy = op.kind == BenchKind::Argmax;
  p.best = arena.take<uint64_t>(R * sample_chunks(V));
  if (!p.greedy) p.masses = arena.take<uint64_t>(R * V), p.bins = arena.take<uint64_t>(R * 2 * 2048);
  return run.rotate(1, [&](int) { sample(p, run.stream()); });
}

BenchSeries measure(BenchRun& run, const BenchOperation& op) {
  const BenchModel& m = kModel;
  switch (op.kind) {
    case BenchKind::GroupedNorm:
    case BenchKind::HcDown:
    case BenchKind::HcUp:
    case BenchKind::HcMix:
    case BenchKind::HcInject:
      return bench_norm_hc(run, op);
    case BenchKind::RouterProduct:
      return bench_product(run, op, m.hidden, m.experts, 1);
    case BenchKind::GdnProduct:
      return bench_product(run, op, m.hidden, m.value_heads, m.value_heads);
    case BenchKind::PleKeyProduct:
      return bench_product(run, op, m.ngram_heads * m.ngram_dim, m.streams * m.hidden);
    case BenchKind::PleValueProduct:
      return bench_product(run, op, m.ngram_heads * m.ngram_dim, m.hidden);
    case BenchKind::Router:
    case BenchKind::Swiglu:
    case BenchKind::Combine:
      return bench_moe(run, op);
    case BenchKind::GdnConv:
    case BenchKind::GdnRecurrence:
    case BenchKind::GdnNorm:
    case BenchKind::Gdn:
      return bench_gdn(run, op);
    case BenchKind::QsaWrite:
    case BenchKind::QsaScores:
    case BenchKind::QsaSelect:
    case BenchKind::QsaAttend:
      return bench_qsa(run, op);
    case BenchKind::PleMix:
    case BenchKind::NgramDecode:
      return bench_ple(run, op);
    case BenchKind::Embed:
      return bench_embed(run, op);
    case BenchKind::Argmax:
    case BenchKind::Sample:
    case BenchKind::SampleTopP:
    case BenchKind::SampleTopK:
      return bench_sample(run, op);
  }
  throw Error(ErrorKind::Internal, op.name + ": an operation without a measurement");
}

}  // namespace

BenchSeries bench_operation(BenchRun& run, const BenchOperation& op) {
  BenchSeries s = measure(run, op);
  s.bytes = op.bytes;
  return s;
}

}  // namespace fnx::cuda
