// Greedy and seeded sampling, as kernels/cpu/sample.cpp defines it. Weights exp((logit - max) / T) are held as
// integers, round(2^44 w), so that every mass is exact and no order of addition exists; against the reference's fp64
// sums a draw can differ only where it falls within 2^-26 of a boundary.
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

// As fnx::SampleParams (kernels/ops.h), in device memory.
struct SampleRow {
  float temperature = 0, top_p = 1, min_p = 0;
  int32_t top_k = 0;
  uint64_t seed = 0, stream = 0;
  int64_t position = 0;
};

// Domain: 1 <= valid <= V < 2^31, R < 65536. A row whose weights are not finite numbers draws its highest-ranked id.
struct SampleLaunch {
  const float* logits = nullptr;    // [R, V]
  const SampleRow* rows = nullptr;  // [R]
  int32_t* ids = nullptr;           // [R]
  int64_t count = 0, valid = 0, vocabulary = 0;
  bool greedy = false;         // every row has temperature 0: the masses are not needed
  uint64_t* masses = nullptr;  // workspace [R, valid], null when greedy
  uint64_t* best = nullptr;    // workspace [R, sample_chunks(valid)]
  uint64_t* bins = nullptr;    // workspace [R, 2, 2048], null when greedy
};
int64_t sample_chunks(int64_t valid);
void sample(const SampleLaunch& p, cudaStream_t stream);

}  // namespace fnx::cuda
