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
};

}  // namespace fnx
