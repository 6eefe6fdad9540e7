#include "kernels/cuda/moe.h"

#include <climits>

#include "kernels/cuda/device_math.cuh"

namespace fnx::cuda {

namespace {

constexpr int kMostSlots = 32;

constexpr int kRouterThreads = 128, kRouterWarps = kRouterThreads / 32;

// One block a row; thread t holds experts t, t + 128, ..
template <int kEach>
__global__ void __launch_bounds__(kRouterThreads) router_kernel(RouterParams p) {
  __shared__ float e[kEach * kRouterThreads], highest[kRouterWarps], chosen[kMostSlots];
  __shared__ int2 candidates[kEach * kRouterThreads];  // rank and expert
  __shared__ int bounds[kRouterWarps], count;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const int experts = static_cast<int>(p.experts), k = static_cast<int>(p.k);
  if (tid == 0) count = 0;
  wait_previous();
  const float* logits = p.logits + int64_t{blockIdx.x} * experts;
  float x[kEach], most = -INFINITY;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    x[j] = j * kRouterThreads + tid < experts ? logits[j * kRouterThreads + tid] : -INFINITY;
    most = fmaxf(most, x[j]);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) most = fmaxf(most, __shfl_xor_sync(kFullWarp, most, d));
  if (lane == 0) highest[warp] = most;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kRouterWarps; ++w) most = fmaxf(most, highest[w]);
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    e[j * kRouterThreads + tid] = j * kRouterThreads + tid < experts ? x[j] = expf(x[j] - most) : 0.0f;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int j = 0; j < kEach * kRouterWarps; ++j)
    if (j * 32 + lane < experts) total += e[j * 32 + lane];
  total = warp_sum(total);
  // Ranks: the bits of p, which are ordered as p is; NaN below them, then the missing.
  int rank[kEach], mine = INT_MIN;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float prob = x[j] / total;
    rank[j] = j * kRouterThreads + tid >= experts ? INT_MIN : isnan(prob) ? -1 : __float_as_int(prob);
    mine = max(mine, rank[j]);
  }
  // Each warp has this many lanes that hold its bound or more, so that k experts lie at or above the least bound.
  const int lanes = (k + kRouterWarps - 1) / kRouterWarps;
  int bound = INT_MIN;
  for (int i = 0; i < lanes; ++i) {
    bound = __reduce_max_sync(kFullWarp, mine);
    if (lane == __ffs(__ballot_sync(kFullWarp, mine == bound)) - 1) mine = INT_MIN;
  }
  if (lane == 0) bounds[warp] = bound;
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kRouterWarps; ++w) bound = min(bound, bounds[w]);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int expert = j * kRouterThreads + tid;
    if (expert < experts && rank[j] >= bound) candidates[atomicAdd(&count, 1)] = make_int2(rank[j], expert);
  }
  __syncthreads();
  const int found = count;
  for (int c = tid; c < found; c += kRouterThreads) {
    const int2 me = candidates[c];
    int before = 0;
#pragma unroll 4
    for (int i = 0; i < found; ++i) {
      const int2 other = candidates[i];
      before += other.x > me.x || (other.x == me.x && other.y < me.y);
    }
    if (before >= k) continue;
    p.ids[int64_t{blockIdx.x} * (k + p.one_more) + before] = me.y;
    chosen[before] = me.x == -1 ? NAN : __int_as_float(me.x);
  }
  __syncthreads();
  if (tid >= k) {
    if (tid == k && p.one_more) p.ids[int64_t{blockIdx.x} * (k + 1) + k] = experts;
    return;
  }
  float sum = 0;
  for (int slot = 0; slot < k; ++slot) sum += chosen[slot];
  p.weights[int64_t{blockIdx.x} * k + tid] = p.normalise ? chosen[tid] / sum : chosen[tid];
}

__global__ void __launch_bounds__(256) swiglu_kernel(SwigluParams p) {
  wait_previous();
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i < p.count) p.out[i] = silu(p.gate[i]) * p.up[i];
}

__global__ void __launch_bounds__(256) take_slots_kernel(TakeSlotsParams p) {
  wait_previous();
  const int64_t quads = p.hidden / 4, i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.count * quads) return;
  const int64_t part = min(p.ids[i / quads] / static_cast<int>(p.per_part), static_cast<int>(p.parts) - 1);
  reinterpret_cast<float4*>(p.slots)[i] = reinterpret_cast<const float4*>(p.from)[part * p.count * quads + i];
}

__global__ void __launch_bounds__(128) combine_kernel(CombineParams p) {
  let_next_start();  // what follows reads nothing but weights before it has waited
  const unsigned i = blockIdx.x * 128 + threadIdx.x, quads = static_cast<unsigned>(p.hidden / 4), row = i / quads;
  const int k = static_cast<int>(p.k);
  const float4* slots = reinterpret_cast<const float4*>(p.slots) + int64_t{row} * (k + p.one_more) * quads + i % quads;
  const float* weights = p.weights + int64_t{row} * k;
  wait_previous();
  if (row >= p.rows) return;
  const float gate = p.shared_gate[row];
  const float4 shared = p.one_more ? slots[int64_t{k} * quads] : reinterpret_cast<const float4*>(p.shared)[i];
  float4 sum = make_float4(0, 0, 0, 0);
  const auto step = [&](float w, float4 v) {
    sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
  };
  constexpr int kTogether = 10;  // slots in flight
  for (int j0 = 0; j0 < k; j0 += kTogether, weights += kTogether, slots += int64_t{kTogether} * quads) {
    float w[kTogether];
    float4 v[kTogether];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (j0 + j < k) w[j] = weights[j], v[j] = slots[int64_t{j} * quads];
#pragma unroll
    for (int j = 0; j < kTogether; ++j)
      if (j0 + j < k) step(w[j], v[j]);
  }
  step(sigmoid(gate), shared);
  reinterpret_cast<float4*>(p.y)[i] = sum;
}

}  // namespace

void router(const RouterParams& p, cudaStream_t stream) {
  require(p.k >= 1 && p.k <= p.experts && p.experts <= 1024 && p.k <= kMostSlots && p.rows >= 0, "router",
          "at most 1024 experts and 1 to 32 slots (experts, k, rows)", {p.experts, p.k, p.rows});
  if (p.rows == 0) return;
  const auto blocks = static_cast<unsigned>(p.rows);
  if (p.experts <= 128)
    launch("router", router_kernel<1>, blocks, kRouterThreads, 0, stream, p);
  else if (p.experts <= 512)
    launch("router", router_kernel<4>, blocks, kRouterThreads, 0, stream, p);
  else
    launch("router", router_kernel<8>, blocks, kRouterThreads, 0, stream, p);
}

void swiglu(const SwigluParams& p, cudaStream_t stream) {
  require(p.count >= 0, "swiglu", "a count of 0 or more", {p.count});
  if (p.count == 0) return;
  launch("swiglu", swiglu_kernel, blocks_of(p.count, 256), 256, 0, stream, p);
}

void take_slots(const TakeSlotsParams& p, cudaStream_t stream) {
  require(p.hidden > 0 && p.hidden % 4 == 0 && p.count >= 0 && p.parts >= 1 && p.per_part >= 1 &&
              aligned16({p.from, p.slots}),
          "take_slots", "H a multiple of 4, parts and 16-byte alignment (H, slots, parts, experts of a part)",
          {p.hidden, p.count, p.parts, p.per_part});
  if (p.count == 0) return;
  launch("take_slots", take_slots_kernel, blocks_of(p.count * p.hidden / 4, 256), 256, 0, stream, p);
}

void combine(const CombineParams& p, cudaStream_t stream) {
  require(p.hidden > 0 && p.hidden % 4 == 0 && p.k >= 1 && p.rows >= 0 && p.rows * p.hidden <= INT_MAX &&
              aligned16({p.slots, p.shared, p.y}),
          "combine", "H a multiple of 4, rows of at most 2^31 elements and 16-byte alignment (H, k, rows)",
          {p.hidden, p.k, p.rows});
  if (p.rows == 0) return;
  launch("combine", combine_kernel, blocks_of(p.rows * p.hidden / 4, 128), 128, 0, stream, p);
}

}  // namespace fnx::cuda
