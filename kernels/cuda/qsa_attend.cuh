// What the attention kernels of few and of many rows share: key lists, splits, the merge of parts.
#pragma once

#include <cuda_bf16.h>

#include "kernels/cuda/qsa_device.cuh"

namespace fnx::cuda {

inline constexpr int kSplit = 3;          // bf16 numbers of an fp32 one
inline constexpr float kScale = 0.0625f;  // 1 / sqrt(256)

// A row's key list: selected blocks, then the tail.
struct KeyList {
  int slot = 0, chosen = 0, tail = 0, count = 0;
  const int32_t* selected = nullptr;
};

__device__ __forceinline__ KeyList key_list(const QsaAttendParams& p, int r) {
  const LaneRow l = find_lane(p.shape.lanes, r);
  const int ratio = static_cast<int>(p.shape.ratio), position = l.start + r - l.first_row;
  const int complete = (position + 1) / ratio;
  KeyList k;
  k.slot = l.slot;
  k.chosen = min(static_cast<int>(p.shape.blocks), complete) * ratio;
  k.tail = complete * ratio;
  k.count = l.slot < 0 ? 0 : k.chosen + (position + 1) % ratio;
  k.selected = p.selected + r * p.shape.blocks;
  return k;
}

// The running (max, sum, values) of a head and its merge with the next part's.
struct Running {
  float highest = 0, total = 0;
  // Returns the factors of what was and of what comes.
  __device__ float2 merge(float m, float l, bool first) {
    if (first) {
      highest = m, total = l;
      return make_float2(0, 1);
    }
    const float top = fmaxf(highest, m), a = expf(highest - top), b = expf(m - top);
    highest = top;
    total = __fmaf_rn(total, a, __fmul_rn(l, b));
    return make_float2(a, b);
  }
};
__device__ __forceinline__ float merged(float was, float part, float2 f, bool first) {
  return first ? part : __fmaf_rn(was, f.x, __fmul_rn(part, f.y));
}
// gate: its sigmoid.
__device__ __forceinline__ float gated(float sum, float total, float gate) {
  return __fmul_rn(__fdiv_rn(sum, total), gate);
}

__device__ __forceinline__ void mma_bf16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Four neighbours, each as kSplit bf16 numbers, `stride` apart.
__device__ __forceinline__ void split3x4(float4 x, __nv_bfloat16* to, int stride) {
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    const __nv_bfloat162 a = __floats2bfloat162_rn(x.x, x.y), b = __floats2bfloat162_rn(x.z, x.w);
    const float2 fa = __bfloat1622float2(a), fb = __bfloat1622float2(b);
    *reinterpret_cast<uint2*>(to + i * stride) =
        make_uint2(*reinterpret_cast<const uint32_t*>(&a), *reinterpret_cast<const uint32_t*>(&b));
    x = make_float4(x.x - fa.x, x.y - fa.y, x.z - fb.x, x.w - fb.y);
  }
}

// BF16 pages and more than kSpreadRows rows.
void attend_rows(const QsaAttendParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
