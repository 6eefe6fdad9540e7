// Tensor-core chain of plain fp16 weights against fp32 rows split into two fp16 numbers (kernels/cuda/plain_linear.h).
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/device_math.cuh"

namespace fnx::cuda {

inline constexpr int kUnit = 32;           // inputs of a unit
inline constexpr int kTileOut = 16;        // outputs of a tile
inline constexpr int kTileSlices = 8;      // slices of a split, one a warp
inline constexpr int kSpreadRowsMax = 64;  // launches of more rows take the splits one after another

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint32_t as_word(__half2 h) { return *reinterpret_cast<uint32_t*>(&h); }

__device__ __forceinline__ void split2(float a, float b, uint32_t& hi, uint32_t& lo) {
  const __half2 h = __floats2half2_rn(a, b);
  const float2 f = __half22float2(h);
  hi = as_word(h);
  lo = as_word(__floats2half2_rn(a - f.x, b - f.y));
}

// acc += W[first_out .. +16) x[first_row .. + 8 kRowTiles) over units [from, to), one chain a tile of 16 x 8. Lane 4 g
// + t holds inputs 8 t .. 8 t + 7 of outputs g and g + 8 and of row g of each row tile. acc[n]: outputs (g, g, g + 8, g
// + 8), rows (2 t, 2 t + 1) of tile n. Outputs and rows beyond the matrix count as zero.
template <int kRowTiles>
__device__ __forceinline__ void mma_chain(const __half* w, int64_t in, int64_t first_out, int64_t outs, const float* x,
                                          int64_t first_row, int64_t rows, int from, int to,
                                          float (&acc)[kRowTiles][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const bool low = first_out + g < outs, high = first_out + g + 8 < outs;
  const __half* w0 = w + (first_out + g) * in + 8 * t;
  const __half* w1 = w0 + 8 * in;
  const float* x0 = x + (first_row + g) * in + 8 * t;
  constexpr int kAhead = 4;
  for (int u0 = from; u0 < to; u0 += kAhead) {
    uint4 a[kAhead], b[kAhead];
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      const int64_t k = int64_t{u0 + i} * kUnit;
      const bool inside = u0 + i < to && k + 8 * t < in;
      a[i] = inside && low ? __ldg(reinterpret_cast<const uint4*>(w0 + k)) : make_uint4(0, 0, 0, 0);
      b[i] = inside && high ? __ldg(reinterpret_cast<const uint4*>(w1 + k)) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (u0 + i >= to) break;
      const int64_t k = int64_t{u0 + i} * kUnit;
      const bool inside = k + 8 * t < in;
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n) {
        float4 p = make_float4(0, 0, 0, 0), q = p;
        if (inside && first_row + 8 * n + g < rows) {
          const float4* from_x = reinterpret_cast<const float4*>(x0 + 8 * n * in + k);
          p = __ldg(from_x), q = __ldg(from_x + 1);
        }
        uint32_t h0, h1, l0, l1;
        split2(p.x, p.y, h0, l0), split2(p.z, p.w, h1, l1);
        mma_f16(acc[n], a[i].x, b[i].x, a[i].y, b[i].y, h0, h1);
        mma_f16(acc[n], a[i].x, b[i].x, a[i].y, b[i].y, l0, l1);
        split2(q.x, q.y, h0, l0), split2(q.z, q.w, h1, l1);
        mma_f16(acc[n], a[i].z, b[i].z, a[i].w, b[i].w, h0, h1);
        mma_f16(acc[n], a[i].z, b[i].z, a[i].w, b[i].w, l0, l1);
      }
    }
  }
}

enum class Finish { None, SiluMean, InjectMean };  // v; silu(v / n); 2 sigmoid(v / n)

struct PlainMatrix {
  const __half* w = nullptr;  // [out, in]
  const float* bias = nullptr;
  float* y = nullptr;  // [R, out]
  int64_t out = 0;
  Finish finish = Finish::None;
};

// Up to two matrices over the same rows: tiles of the first, then tiles of the second.
struct PlainLaunch {
  PlainMatrix matrix[2];
  int64_t tiles = 0;  // of the first
  const float* x = nullptr;
  int64_t rows = 0, in = 0;
  float streams = 1;  // n of the finishes
  int units = 0, slice_units = 0, splits = 0;
  float* partials = nullptr;
  uint32_t* counters = nullptr;
};
// Launches both; shared by plain_linear and hc_down.
void launch_plain(const PlainLaunch& p, const char* name, cudaStream_t stream);

}  // namespace fnx::cuda
