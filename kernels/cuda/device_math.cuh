// Scalar functions, warp reductions and launch checks of the operation kernels.
#pragma once

#include <initializer_list>
#include <string>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/stream.h"

namespace fnx::cuda {

inline constexpr unsigned kFullWarp = 0xFFFFFFFFu;

// Throws Unsupported with the rule and the numbers that break it.
inline void require(bool ok, const char* kernel, const char* rule, std::initializer_list<int64_t> numbers) {
  if (ok) return;
  std::string what = std::string(kernel) + " needs " + rule + "; given";
  for (int64_t n : numbers) what += " " + std::to_string(n);
  throw Error(ErrorKind::Unsupported, what);
}

inline bool aligned16(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16 != 0) return false;
  return true;
}

// Every kernel calls this before it touches what a launch may have written; only weights, and what the launch before
// the previous one wrote, may be read earlier: linears beside one another count as one. Then the next kernel may start.
__device__ __forceinline__ void wait_previous() {
  wait_for_previous();
  let_next_start();
}

// Blocks of `size` that cover n, as a grid axis.
inline unsigned blocks_of(int64_t n, int64_t size) { return static_cast<unsigned>((n + size - 1) / size); }

__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ __forceinline__ float softplus(float x) { return x > 0 ? x + log1pf(expf(-x)) : log1pf(expf(x)); }

// Butterfly over `width` neighbouring lanes, nearest last; every lane gets the sum.
template <int kWidth = 32>
__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int d = kWidth / 2; d > 0; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);
  return v;
}

// Sum over a block of kWarps warps: butterfly in each, then warps in ascending order. `shared` has kWarps floats.
template <int kWarps>
__device__ __forceinline__ float block_sum(float v, float* shared) {
  v = warp_sum(v);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = v;
  __syncthreads();
  float sum = shared[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += shared[w];
  return sum;
}

__device__ __forceinline__ float dot4(float4 a, float4 b, float sum) {
  sum = fmaf(a.x, b.x, sum);
  sum = fmaf(a.y, b.y, sum);
  sum = fmaf(a.z, b.z, sum);
  return fmaf(a.w, b.w, sum);
}

// Exclusive sum over the warps of a block of 32 warps, from each warp's value in `warps`.
template <class T>
__device__ __forceinline__ T before_warp(const T* warps) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  T v = lane < warp ? warps[lane] : T{0};
  if constexpr (sizeof(T) == sizeof(int)) {
    return __reduce_add_sync(kFullWarp, v);
  } else {
#pragma unroll
    for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kFullWarp, v, d);
    return v;
  }
}

struct LaneRow {
  int slot = -1, first_row = 0, rows = 0, start = 0, lane = 0;
};

// The lane that holds a row; slot is -1 when there is none.
__device__ __forceinline__ LaneRow find_lane(const Lanes& lanes, int row) {
  for (int i = 0; i < lanes.count; ++i) {
    const int4 l = reinterpret_cast<const int4*>(lanes.table)[i];
    if (row >= l.y && row < l.y + l.z) return {l.x, l.y, l.z, l.w, i};
  }
  return {};
}

// Rows of a lane that its slot's last call tried and that stayed, and those that this call tries.
struct LaneTrial {
  int kept = 0, tried = 0;
};
__device__ __forceinline__ LaneTrial trial_of(const Lanes& lanes, int lane) {
  if (lanes.trials == nullptr) return {};
  const int2 t = reinterpret_cast<const int2*>(lanes.trials)[lane];
  return {t.x, t.y};
}

// One channel of what a convolution reads in the next call: the last history + tried rows of the `history` rows in
// `past`, the `kept` after them and the lane's own. A later row is read before an earlier one's place is overwritten.
__device__ __forceinline__ void keep_history(float* past, const float* rows, int64_t width, int64_t history,
                                             int lane_rows, const LaneTrial& trial) {
  const int64_t old = history + trial.kept, first = trial.kept + lane_rows - trial.tried;
  for (int64_t t = 0; t < history + trial.tried; ++t) {
    const int64_t from = first + t;
    past[t * width] = from < old ? past[from * width] : rows[(from - old) * width];
  }
}

}  // namespace fnx::cuda
