// Grouped norms and hyper-connections. fp32; `s / n` of HC is one fp32 division of the finished sum.
#pragma once

#include "kernels/cuda/plain_linear.h"

namespace fnx::cuda {

// out = x * rsqrt(mean(x^2) + eps) * (1 + weight), each group by itself. The sum of squares: thread t of 256 adds
// float4 t, t + 256, .. of the group in one fma chain, then a butterfly of 32 lanes, then warps in ascending order.
// Domain: group % 4 == 0; pointers 16-byte aligned; out may be x.
struct GroupedNormParams {
  const float* x = nullptr;       // [R, groups * group]
  const float* weight = nullptr;  // [weight_groups * group]
  float* out = nullptr;           // [R, groups * group]
  int64_t rows = 0, groups = 0, group = 0;
  float eps = 0;
};
void grouped_norm(const GroupedNormParams& p, cudaStream_t stream);

// stack = fma(lacking_inj, lacking_y, stack) where given; u[h] = mean_s sigmoid(Up silu(Down xn / n))_s * xn_s; inj = 2
// sigmoid(inject xn / n). Three launches: the norm; down with silu, and inject, summed as plain_linear does; up, one
// mma chain (hi before lo) over each half of the rank's units, the first half being the longer, their sum, then the
// mean over streams ascending. One row takes two launches with the same sums (kernels/cuda/hc_row.h). Domain: F16
// weights, 2 <= n <= 8, H % 16 == 0, rank % 8 == 0, 16-byte alignment; inj is not lacking_inj.
struct HcMixParams {
  float* stack = nullptr;              // [R, n, H], written where it lacks something
  const float* norm_weight = nullptr;  // [n * H]
  float eps = 0;
  const void* down = nullptr;    // F16 [rank, n * H]
  const void* up = nullptr;      // F16 [n * H, rank]
  const void* inject = nullptr;  // F16 [n, n * H] or null
  float* u = nullptr;            // [R, H]
  float* inj = nullptr;          // [R, n], unused without inject
  int64_t rows = 0, streams = 0, hidden = 0, rank = 0;
  float* normed = nullptr;             // workspace [R, n * H]
  float* low = nullptr;                // workspace [R, rank]
  PlainWorkspace work;                 // hc_partials() and hc_counters()
  const float* lacking_inj = nullptr;  // [R, n] or null
  const float* lacking_y = nullptr;    // [R, H] or null
};
int64_t hc_partials(int64_t rows, int64_t streams, int64_t hidden, int64_t rank);
int64_t hc_counters(int64_t streams, int64_t hidden, int64_t rank);
void hc_mix(const HcMixParams& p, cudaStream_t stream);
// Its two halves: norm, down and inject; then up.
void hc_down(const HcMixParams& p, cudaStream_t stream);
void hc_up(const HcMixParams& p, cudaStream_t stream);

// stack[r, s, :] = fma(inj[r, s], y[r, :], stack[r, s, :]). Domain: H % 4 == 0, 16-byte alignment.
struct HcInjectParams {
  const float* inj = nullptr;  // [R, n]
  const float* y = nullptr;    // [R, H]
  float* stack = nullptr;      // [R, n, H]
  int64_t rows = 0, streams = 0, hidden = 0;
};
void hc_inject(const HcInjectParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
