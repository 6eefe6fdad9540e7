// What the benchmark's operations move, and the measuring interface where CUDA is not built.
#include "kernels/kernel_bench.h"

#include <algorithm>

#include "kernels/error.h"

namespace fnx {

std::vector<BenchOperation> bench_operations(const std::vector<int64_t>& rows) {
  using enum BenchKind;
  constexpr BenchModel m;
  constexpr double f32 = 4, f16 = 2, h = m.hidden, n = m.streams, wide = n * h, rank = m.hc_rank;
  constexpr double E = m.experts, k = m.chosen, V = m.vocabulary;
  std::vector<BenchOperation> list;
  // bytes = fixed + each * rows.
  const auto add = [&](BenchKind kind, const std::string& name, bool limited, double fixed, double each,
                       int64_t context = 0) {
    for (const int64_t r : rows)
      list.push_back({kind, name, r, context, fixed + each * static_cast<double>(r), limited});
  };

  // A mix takes what the stack lacks, y times inj, and writes the stack, u and the next inj.
  const double down = f16 * wide * rank, inject = f16 * n * wide, norm = f32 * wide, lacks = f32 * (2 * wide + h + n);
  add(GroupedNorm, "grouped_norm", true, norm, f32 * 2 * wide);
  add(HcDown, "hc_down", true, down + inject + norm, lacks + f32 * (rank + n));
  add(HcUp, "hc_up", true, down, f32 * (rank + wide + h));
  add(HcMix, "hc_mix", true, 2 * down + inject + norm, lacks + f32 * (h + n));
  add(HcInject, "hc_inject", true, 0, lacks);

  const auto product = [&](BenchKind kind, const std::string& name, bool limited, double in, double out) {
    add(kind, name, limited, f16 * in * out, f32 * (in + out));
  };
  constexpr double embed_dim = m.ngram_heads * m.ngram_dim;
  product(RouterProduct, "linear 512 + 1 x 2560", true, h, E + 1);
  product(GdnProduct, "linear 48 + 48 x 2560", false, h, 2 * m.value_heads);
  product(PleKeyProduct, "linear 10240 x 2560", false, embed_dim, wide);
  product(PleValueProduct, "linear 2560 x 2560", false, embed_dim, h);

  add(Router, "router", true, 0, f32 * (E + 2 * k + 1));
  add(Swiglu, "swiglu", false, 0, f32 * 3 * m.expert_width);
  add(Combine, "combine", false, 0, f32 * ((k + 1) * h + k + 1 + h));

  constexpr double heads = m.value_heads, width = heads * m.gdn_dim, channels = (2 * m.key_heads + heads) * m.gdn_dim;
  constexpr double delta = f32 * width * m.gdn_dim, conv = f32 * (m.gdn_taps - 1) * channels;
  constexpr double taps = f32 * channels * m.gdn_taps, gate_weights = f32 * 2 * heads, head_norm = f32 * m.gdn_dim;
  add(GdnConv, "gdn_conv", true, taps + gate_weights, conv + f32 * (2 * channels + 4 * heads));
  add(GdnRecurrence, "gdn_recurrence", true, 0, 2 * delta + conv + f32 * (channels + 2 * heads + width));
  add(GdnNorm, "gdn_norm", true, head_norm, f32 * 3 * width);
  add(Gdn, "gdn", true, taps + gate_weights + head_norm,
      2 * delta + 2 * conv + f32 * (channels + 2 * heads + 2 * width));

  for (const int64_t context : {32768, 262144}) {
    const std::string at = " at " + std::to_string(context);
    constexpr double kv = m.kv_heads * m.head_dim, query = m.heads * m.head_dim, index = m.index_heads * m.index_dim;
    const double keys = f32 * m.index_dim * static_cast<double>(context / m.index_ratio);
    const double chosen = f32 * m.index_blocks, tokens = m.index_blocks * m.index_ratio;
    // The row completes a block: its raw index keys are read and the pooled one is written.
    const double pooled = f32 * m.index_dim * (m.index_ratio + 2);
    add(QsaWrite, "qsa_write" + at, true, f32 * (m.rotary / 2 + 2 * m.head_dim + 2 * m.index_dim),
        f32 * 2 * (query + index) + (f32 + f16) * 2 * kv + pooled, context);
    add(QsaScores, "qsa_scores" + at, true, 0, keys + f32 * (index + static_cast<double>(context / m.index_ratio)),
        context);
    add(QsaSelect, "qsa_select" + at, true, 0, keys + f32 * index + chosen, context);
    add(QsaAttend, "qsa_attend" + at, true, 0, f16 * 2 * kv * tokens + chosen + f32 * 3 * query, context);
  }

  constexpr double history = (m.ple_taps - 1) * m.ple_dilation;
  add(PleMix, "ple_mix", false, f32 * wide * (3 + m.ple_taps), f32 * (wide * (3 + 2 * history) + h));
  add(NgramDecode, "ngram_decode 3 bits", false, 0,
      f16 * (m.ngram_heads + embed_dim * m.ngram_bits / 16) + f32 * embed_dim);
  add(Embed, "embed", false, 0, f32 + f16 * h + f32 * wide);
  add(Argmax, "argmax", false, 0, f32 * V);
  add(Sample, "sample", false, 0, f32 * V);
  add(SampleTopP, "sample top-p", false, 0, f32 * V);
  add(SampleTopK, "sample top-k", false, 0, f32 * V);
  return list;
}

double operation_limit_us(double floor_us) { return std::max(2 * floor_us, 3.0); }

#ifndef FNX_HAS_CUDA
std::unique_ptr<KernelBench> KernelBench::open(int, int) {
  throw Error(ErrorKind::Unsupported,
              "this build has no cuda backend; configure with FNX_CUDA=ON where nvcc is installed");
}
#endif

}  // namespace fnx
