#include "kernels/cuda/moe.h"

#include <climits>

#include "kernels/cuda/device_math.cuh"

namespace fnx::cuda {

namespace {

constexpr int kMostSlots = 32;

// One warp a row; lane i holds experts i, i + 32, ..
template <int kEach>
__global__ void __launch_bounds__(32) router_kernel(RouterParams p) {
  wait_previous();
  const int lane = threadIdx.x, experts = static_cast<int>(p.experts), k = static_cast<int>(p.k);
  const float* logits = p.logits + int64_t{blockIdx.x} * experts;
  float x[kEach];
  float highest = -INFINITY;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    x[j] = j * 32 + lane < experts ? logits[j * 32 + lane] : -INFINITY;
    highest = fmaxf(highest, x[j]);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) highest = fmaxf(highest, __shfl_xor_sync(kFullWarp, highest, d));
  float total = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j)
    if (j * 32 + lane < experts) total += x[j] = expf(x[j] - highest);
  total = warp_sum(total);
  // Ranks: the bits of p, which are ordered as p is; NaN below them, then the taken and the missing.
  int rank[kEach];
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const float prob = x[j] / total;
    rank[j] = j * 32 + lane >= experts ? INT_MIN : isnan(prob) ? -1 : __float_as_int(prob);
  }
  int id = 0;
  float weight = 0, sum = 0;
  for (int slot = 0; slot < k; ++slot) {
    // The highest rank of this lane, the lowest expert of those: a tree, so that the comparisons overlap.
    int tree[kEach], place[kEach];
#pragma unroll
    for (int j = 0; j < kEach; ++j) tree[j] = rank[j], place[j] = j;
#pragma unroll
    for (int step = 1; step < kEach; step *= 2)
#pragma unroll
      for (int j = 0; j + step < kEach; j += 2 * step)
        if (tree[j + step] > tree[j]) tree[j] = tree[j + step], place[j] = place[j + step];
    const int best = tree[0], at = place[0];
    const int top = __reduce_max_sync(kFullWarp, best);
    const int winner = __reduce_min_sync(kFullWarp, best == top ? at * 32 + lane : INT_MAX);
    const float w = top == -1 ? NAN : __int_as_float(top);
    sum += w;
    if (slot == lane) id = winner, weight = w;
#pragma unroll
    for (int j = 0; j < kEach; ++j)
      if (j * 32 + lane == winner) rank[j] = INT_MIN;
  }
  const int columns = k + p.one_more;
  if (lane == 0 && p.one_more) p.ids[int64_t{blockIdx.x} * columns + k] = experts;
  if (lane >= k) return;
  p.ids[int64_t{blockIdx.x} * columns + lane] = id;
  p.weights[int64_t{blockIdx.x} * k + lane] = p.normalise ? weight / sum : weight;
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
  wait_previous();
  const int64_t quads = p.hidden / 4, i = int64_t{blockIdx.x} * 128 + threadIdx.x;
  if (i >= p.rows * quads) return;
  const int64_t row = i / quads, h = i % quads;
  const float4* slots = reinterpret_cast<const float4*>(p.slots) + row * (p.k + p.one_more) * quads + h;
  float4 sum = make_float4(0, 0, 0, 0);
  const auto step = [&](float w, float4 v) {
    sum = make_float4(fmaf(w, v.x, sum.x), fmaf(w, v.y, sum.y), fmaf(w, v.z, sum.z), fmaf(w, v.w, sum.w));
  };
#pragma unroll 5
  for (int64_t j = 0; j < p.k; ++j) step(p.weights[row * p.k + j], slots[j * quads]);
  step(sigmoid(p.shared_gate[row]), p.one_more ? slots[p.k * quads] : reinterpret_cast<const float4*>(p.shared)[i]);
  reinterpret_cast<float4*>(p.y)[i] = sum;
}

}  // namespace

void router(const RouterParams& p, cudaStream_t stream) {
  require(p.k >= 1 && p.k <= p.experts && p.experts <= 1024 && p.k <= kMostSlots && p.rows >= 0, "router",
          "at most 1024 experts and 1 to 32 slots (experts, k, rows)", {p.experts, p.k, p.rows});
  if (p.rows == 0) return;
  const auto blocks = static_cast<unsigned>(p.rows);
  if (p.experts <= 128)
    launch("router", router_kernel<4>, blocks, 32, 0, stream, p);
  else if (p.experts <= 512)
    launch("router", router_kernel<16>, blocks, 32, 0, stream, p);
  else
    launch("router", router_kernel<32>, blocks, 32, 0, stream, p);
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
  require(p.hidden > 0 && p.hidden % 4 == 0 && p.k >= 1 && p.rows >= 0 && aligned16({p.slots, p.shared, p.y}),
          "combine", "H a multiple of 4 and 16-byte alignment (H, k, rows)", {p.hidden, p.k, p.rows});
  if (p.rows == 0) return;
  launch("combine", combine_kernel, blocks_of(p.rows * p.hidden / 4, 128), 128, 0, stream, p);
}

}  // namespace fnx::cuda
