// Times kernels of the cuda backend on weights that lie in device memory. Implemented where CUDA is built.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels/exl3.h"

namespace fnx {

// One series: microseconds of a launch, from replays of a graph that holds `launches` of them.
struct BenchSeries {
  std::vector<double> us;
  int launches = 0, copies = 0;  // copies of the weights that the launches go through
  double bytes = 0;              // read and written by a launch, each once
  double values = 0;             // trellis values decoded, each once
  double flops = 0;
};

// Sizes of the published model; the bench's operations have no others.
struct BenchModel {
  int64_t hidden = 2560, streams = 4, hc_rank = 320, vocabulary = 248320;
  int64_t experts = 512, chosen = 10, expert_width = 640;
  int64_t key_heads = 16, value_heads = 48, gdn_dim = 128, gdn_taps = 4;
  int64_t heads = 24, kv_heads = 2, head_dim = 256, rotary = 64;
  int64_t index_heads = 4, index_dim = 128, index_ratio = 4, index_blocks = 512;
  int64_t ngram_heads = 16, ngram_dim = 160, ngram_bits = 3, ple_taps = 4, ple_dilation = 3;
};

enum class BenchKind {
  GroupedNorm,
  HcDown,
  HcUp,
  HcMix,
  HcInject,
  RouterProduct,
  GdnProduct,
  PleKeyProduct,
  PleValueProduct,
  Router,
  Swiglu,
  Combine,
  GdnConv,
  GdnRecurrence,
  GdnNorm,
  Gdn,
  QsaWrite,
  QsaScores,
  QsaSelect,
  QsaAttend,
  PleMix,
  NgramDecode,
  Embed,
  Argmax,
  Sample,
  SampleTopP,
  SampleTopK
};

// An operation, or a launch of one, of a decode round: `rows` sequences of one row each.
struct BenchOperation {
  BenchKind kind = BenchKind::GroupedNorm;
  std::string name;               // "hc_mix", "qsa_attend at 32768"
  int64_t rows = 0, context = 0;  // context: tokens of a sequence with the row; 0 where they do not matter
  double bytes = 0;      // weights, state, inputs and outputs, each read or written once; workspaces do not count
  bool limited = false;  // operation_limit_us() is asked of one row
};
// Every operation at each of `rows`, those of the index and of attention at 32768 and 262144 tokens.
std::vector<BenchOperation> bench_operations(const std::vector<int64_t>& rows);
// Microseconds: the larger of twice the floor and 3.
double operation_limit_us(double floor_us);

class KernelBench {
 public:
  // Throws Unsupported when there is no device `index`; Device when CUDA fails.
  static std::unique_ptr<KernelBench> open(int index, int repeat);
  virtual ~KernelBench() = default;

  virtual std::string device_name() const = 0;
  virtual std::string architecture() const = 0;  // "sm_90"
  virtual double l2_bytes() const = 0;

  // Ceilings: `bytes` of a read or copy, `values` decoded from registers, `flops` of mma.m16n8k16.
  virtual BenchSeries read_ceiling() = 0;
  virtual BenchSeries copy_ceiling() = 0;
  virtual BenchSeries decode_ceiling(exl3::Codebook codebook, int half_bits) = 0;
  virtual BenchSeries mma_ceiling() = 0;

  // cold: weights rotate over more copies than fit the L2; otherwise one copy. path: "auto", "few" or "many".
  virtual BenchSeries linear(int64_t in, int64_t out, exl3::Codebook codebook, int half_bits, int64_t rows, bool cold,
                             const std::string& path) = 0;
  // Routed experts, every row with `slots` different experts.
  virtual BenchSeries experts(int64_t hidden, int64_t width, exl3::Codebook codebook, int half_bits, int64_t experts,
                              int64_t slots, int64_t rows, const std::string& path) = 0;
  // Weights, states and caches rotate as in cold linears; an operation that has none of them has copies = 1.
  virtual BenchSeries operation(const BenchOperation& operation) = 0;
};

}  // namespace fnx
