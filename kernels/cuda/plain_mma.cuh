// Tensor-core chain of plain fp16 weights against fp32 rows split into two fp16 numbers (kernels/cuda/plain_linear.h).
#pragma once

#include <cuda_fp16.h>

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/plain_linear.h"

namespace fnx::cuda {

inline constexpr int kUnit = 32;       // inputs of a unit
inline constexpr int kTileOut = 16;    // outputs of a tile
inline constexpr int kTileSlices = 8;  // slices of a split, one a warp

__device__ __forceinline__ void mma_f16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
                                        uint32_t b1) {
  mma_16816(c, {a0, a1, a2, a3}, b0, b1);
}

__device__ __forceinline__ uint32_t as_word(__half2 h) { return *reinterpret_cast<uint32_t*>(&h); }

__device__ __forceinline__ void split2(float a, float b, uint32_t& hi, uint32_t& lo) {
  const __half2 h = __floats2half2_rn(a, b);
  const float2 f = __half22float2(h);
  hi = as_word(h);
  lo = as_word(__floats2half2_rn(a - f.x, b - f.y));
}

// Where a warp's part of a product lies.
struct ChainPlace {
  const __half* w = nullptr;  // [outs, in]
  const float* x = nullptr;   // [rows, in]
  int64_t in = 0, first_out = 0, outs = 0, first_row = 0, rows = 0;
  int from = 0, to = 0;  // units
};

// The same as one lane sees it. Lane 4 g + t holds inputs 8 t .. 8 t + 7 of outputs g and g + 8 of each output tile and
// of row g of each row tile. Outputs, rows and inputs beyond the matrix count as zero.
struct ChainLane {
  const __half* w;  // output g of the first tile, input 8 t
  const float* x;   // row g of the first tile, input 8 t
  int64_t in;
  int outs, rows;  // that are left from these on
  int to;          // units that hold inputs of this lane
  __device__ explicit ChainLane(const ChainPlace& c) : in(c.in) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    w = c.w + (c.first_out + g) * in + 8 * t;
    x = c.x + (c.first_row + g) * in + 8 * t;
    outs = static_cast<int>(min(c.outs - c.first_out - g, int64_t{1} << 20));
    rows = static_cast<int>(min(c.rows - c.first_row - g, int64_t{1} << 20));
    to = min(c.to, (static_cast<int>(in) - 8 * t + kUnit - 1) / kUnit);
  }
};

// 16 bytes of weights, or zeros. Volatile, so that it stays ahead of wait_previous().
__device__ __forceinline__ uint4 load_weight(const __half* from, bool here) {
  uint4 v;
  asm volatile(
      "{.reg .pred p; setp.ne.b32 p, %5, 0; mov.b32 %0, 0; mov.b32 %1, 0; mov.b32 %2, 0; mov.b32 %3, 0;\n"
      "@p ld.global.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];}"
      : "=&r"(v.x), "=&r"(v.y), "=&r"(v.z), "=&r"(v.w)
      : "l"(from), "r"(static_cast<int>(here)));
  return v;
}

template <int kOutTiles>
__device__ __forceinline__ void load_weights(const ChainLane& c, int unit, uint4 (&w)[kOutTiles][2]) {
#pragma unroll
  for (int i = 0; i < 2 * kOutTiles; ++i)
    w[i / 2][i % 2] = load_weight(c.w + 8 * i * c.in + unit * kUnit, unit < c.to && 8 * i < c.outs);
}

template <int kRowTiles>
__device__ __forceinline__ void load_rows(const ChainLane& c, int unit, float4 (&x)[kRowTiles][2]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    const bool here = unit < c.to && 8 * n < c.rows;
    const float4* from = reinterpret_cast<const float4*>(c.x + 8 * n * c.in + unit * kUnit);
    x[n][0] = here ? from[0] : make_float4(0, 0, 0, 0);
    x[n][1] = here ? from[1] : make_float4(0, 0, 0, 0);
  }
}

// One unit of every chain of the warp. acc[o][n]: outputs (g, g, g + 8, g + 8) of tile o, rows (2 t, 2 t + 1) of tile
// n.
template <int kRowTiles, int kOutTiles>
__device__ __forceinline__ void mma_unit(const uint4 (&w)[kOutTiles][2], const float4 (&x)[kRowTiles][2],
                                         float (&acc)[kOutTiles][kRowTiles][4]) {
#pragma unroll
  for (int n = 0; n < kRowTiles; ++n) {
    uint32_t h0, h1, l0, l1, h2, h3, l2, l3;
    split2(x[n][0].x, x[n][0].y, h0, l0), split2(x[n][0].z, x[n][0].w, h1, l1);
    split2(x[n][1].x, x[n][1].y, h2, l2), split2(x[n][1].z, x[n][1].w, h3, l3);
#pragma unroll
    for (int o = 0; o < kOutTiles; ++o) mma_f16(acc[o][n], w[o][0].x, w[o][1].x, w[o][0].y, w[o][1].y, h0, h1);
#pragma unroll
    for (int o = 0; o < kOutTiles; ++o) mma_f16(acc[o][n], w[o][0].x, w[o][1].x, w[o][0].y, w[o][1].y, l0, l1);
#pragma unroll
    for (int o = 0; o < kOutTiles; ++o) mma_f16(acc[o][n], w[o][0].z, w[o][1].z, w[o][0].w, w[o][1].w, h2, h3);
#pragma unroll
    for (int o = 0; o < kOutTiles; ++o) mma_f16(acc[o][n], w[o][0].z, w[o][1].z, w[o][0].w, w[o][1].w, l2, l3);
  }
}

// Few rows: kAhead units of weights are in flight, the first of them before `begin`, which waits for the previous
// launch; after it the rows are loaded.
template <int kRowTiles, int kAhead, class Begin>
__device__ __forceinline__ void mma_chain_few(const ChainPlace& place, float (&acc)[1][kRowTiles][4], Begin begin) {
  const ChainLane c(place);
  constexpr int kGroup = kRowTiles == 1 ? kAhead : 1;  // units of rows loaded together
  uint4 w[kAhead][1][2];
#pragma unroll
  for (int i = 0; i < kAhead; ++i) load_weights(c, place.from + i, w[i]);
  begin();
  for (int first = place.from; first < place.to;) {
    float4 x[2][kGroup][kRowTiles][2];  // this group and the next
#pragma unroll
    for (int i = 0; i < kGroup; ++i) load_rows(c, first + i, x[0][i]);
#pragma unroll
    for (int i0 = 0; i0 < kAhead; i0 += kGroup) {
      const int now = i0 / kGroup % 2;
      if (i0 + kGroup < kAhead)
#pragma unroll
        for (int i = 0; i < kGroup; ++i) load_rows(c, first + i0 + kGroup + i, x[1 - now][i]);
#pragma unroll
      for (int i = 0; i < kGroup; ++i)
        if (first + i0 + i < place.to) mma_unit(w[i0 + i], x[now][i], acc);
    }
    first += kAhead;
    if (first < place.to)
#pragma unroll
      for (int i = 0; i < kAhead; ++i) load_weights(c, first + i, w[i]);
  }
}

// Many rows: the next unit is loaded while this one is multiplied.
template <int kRowTiles, int kOutTiles>
__device__ __forceinline__ void mma_chain_many(const ChainPlace& place, float (&acc)[kOutTiles][kRowTiles][4]) {
  const ChainLane c(place);
  uint4 w[2][kOutTiles][2];
  float4 x[2][kRowTiles][2];
  load_weights(c, place.from, w[0]), load_rows(c, place.from, x[0]);
  for (int u = place.from; u < place.to; u += 2) {
    load_weights(c, u + 1, w[1]), load_rows(c, u + 1, x[1]);
    mma_unit(w[0], x[0], acc);
    load_weights(c, u + 2, w[0]), load_rows(c, u + 2, x[0]);
    if (u + 1 < place.to) mma_unit(w[1], x[1], acc);
  }
}

// v; silu(v / n); 2 sigmoid(v / n); silu(v / n) as split2 cuts it, in pieces of 16 bytes that ldmatrix takes: of each
// 32 neighbours the hi and then the lo numbers, in each the first two of every eight, then the next two, and so on.
enum class Finish { None, SiluMean, InjectMean, SiluMeanHalves };

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
  bool beside = false;
};
__device__ __forceinline__ float finish(Finish f, float v, float n) {
  if (f == Finish::SiluMean || f == Finish::SiluMeanHalves) return silu(v / n);
  if (f == Finish::InjectMean) return 2.0f * sigmoid(v / n);
  return v;
}

__device__ __forceinline__ void put_output(const PlainLaunch& p, const PlainMatrix& m, int64_t row, int64_t out,
                                           float v) {
  if (row >= p.rows || out >= m.out) return;
  if (m.bias != nullptr) v += m.bias[out];
  v = finish(m.finish, v, p.streams);
  if (m.finish != Finish::SiluMeanHalves) {
    m.y[row * m.out + out] = v;
    return;
  }
  __half* to = reinterpret_cast<__half*>(m.y + row * m.out + out / kUnit * kUnit);
  to += out % 8 / 2 * 8 + out % kUnit / 8 * 2 + out % 2;
  const __half hi = __float2half_rn(v);
  to[0] = hi, to[kUnit] = __float2half_rn(v - __half2float(hi));
}

// Of a first matrix [out, in]; the caller sets the matrices.
PlainLaunch plain_launch(int64_t in, int64_t out, const float* x, int64_t rows, const PlainWorkspace& work);
// Launches both; shared by plain_linear and hc_down.
void launch_plain(const PlainLaunch& p, const char* name, cudaStream_t stream);
// The part of it for more than kSpreadRows rows, and the floats of `partials` that it needs.
void launch_plain_tile(const PlainLaunch& p, const char* name, cudaStream_t stream);
int64_t plain_tile_partials(int64_t rows, int64_t tiles, int64_t splits);

}  // namespace fnx::cuda
