// Linear layers of plain weights, y = W x + bias, for any number of rows.
//
// F16 weights with in % 8 == 0 run on tensor cores. x is split into two fp16 numbers, hi = fp16(x) and
// lo = fp16(x - hi), so |x| must stay under 65504; a product so keeps 22 bits of x. Inputs are taken in units of 32.
// Sum order, for any number of rows: a slice of `slice_units` units is one mma.sync m16n8k16 chain (within a unit: the
// even and odd groups of four inputs of each eight, hi before lo); 8 slices are added in ascending order to a split's
// sum; the splits' sums in ascending order to the output; then the bias. BF16 and F32 weights, and any other `in`, take
// one fp32 fma chain a lane over inputs lane, lane + 32, .. and a butterfly over the 32 lanes.
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

struct PlainPlan {
  int64_t units = 0, slice_units = 0, splits = 0;
};
// A pure function of the full shape.
PlainPlan plain_plan(int64_t in, int64_t out);

// Partial sums of the splits; `counters` are zero before the first launch and zero again after each.
struct PlainWorkspace {
  float* partials = nullptr;     // plain_partials() floats
  uint32_t* counters = nullptr;  // plain_counters() counters
};
int64_t plain_partials(int64_t rows, int64_t in, int64_t out);
int64_t plain_counters(int64_t in, int64_t out);

// Domain: weights and x 16-byte aligned on the tensor-core path.
struct PlainLinearParams {
  const void* weights = nullptr;  // [out, in]
  DType dtype = DType::F16;       // F16, BF16 or F32
  const float* bias = nullptr;    // [out] or null
  const float* x = nullptr;       // [R, in]
  float* y = nullptr;             // [R, out]
  int64_t rows = 0, in = 0, out = 0;
  PlainWorkspace work;
  // x is of the launch before the previous one, beside which up to 64 rows of tensor-core products may run.
  bool beside = false;
};
void plain_linear(const PlainLinearParams& p, cudaStream_t stream);

// Two matrices over the same rows in one launch, F16 with in % 8 == 0: the second is summed by the plan of the first.
// a.work serves both: plain_pair_partials() floats and the counters of both.
bool plain_pairs(const PlainLinearParams& a, const PlainLinearParams& b);  // whether they can be launched so
int64_t plain_pair_partials(int64_t rows, int64_t in, int64_t out_a, int64_t out_b);
void plain_linear_pair(const PlainLinearParams& a, const PlainLinearParams& b, cudaStream_t stream);

}  // namespace fnx::cuda
