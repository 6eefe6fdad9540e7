// Tiles of weights and rows in shared memory for kernels of many rows; the chains of kernels/cuda/plain_mma.cuh.
#pragma once

#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

// What a lane holds of one row in a unit, as the tensor cores take it.
struct RowHalves {
  uint32_t hi[4], lo[4];
  __device__ __forceinline__ explicit RowHalves(const float4 (&x)[2]) {
    split2(x[0].x, x[0].y, hi[0], lo[0]), split2(x[0].z, x[0].w, hi[1], lo[1]);
    split2(x[1].x, x[1].y, hi[2], lo[2]), split2(x[1].z, x[1].w, hi[3], lo[3]);
  }
  RowHalves() = default;
};

// Sixteen rows as the first operand: lane 4 g + t has rows g and g + 8. The product is then rows by outputs, and
// weights and rows go to the tensor cores as they come.
struct RowPair {
  uint32_t hi[2][4], lo[2][4];  // of the even and of the odd groups
  __device__ __forceinline__ RowPair(const RowHalves& a, const RowHalves& b) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
      hi[i / 2][i % 2 * 2] = a.hi[i], hi[i / 2][i % 2 * 2 + 1] = b.hi[i], lo[i / 2][i % 2 * 2] = a.lo[i],
                        lo[i / 2][i % 2 * 2 + 1] = b.lo[i];
  }
  RowPair() = default;
};

// Step i of the four of a unit's chain, the even groups' hi and lo, then the odd groups': rows g (0, 1) and g + 8 (2,
// 3), outputs 2 t and 2 t + 1 of eight.
__device__ __forceinline__ void mma_step(float (&acc)[4], const RowPair& x, const uint4& w, int i) {
  mma_16816(acc, i % 2 == 0 ? x.hi[i / 2] : x.lo[i / 2], i < 2 ? w.x : w.z, i < 2 ? w.y : w.w);
}

inline constexpr int kRowChunks = kUnit / 4;     // pieces of 16 bytes of a unit of a row
inline constexpr int kWeightChunks = kUnit / 8;  // and of an output's weights

// A unit of rows lies as [row][32 inputs]; odd rows have neighbouring pieces swapped, so that the lanes of two rows
// read different banks.
__device__ __forceinline__ float* row_piece(float* tile, int row, int piece) {
  return tile + row * kUnit + (piece ^ (row & 1)) * 4;
}

// What lane 4 g + t multiplies: inputs 8 t .. 8 t + 7 of row g of a row tile.
__device__ __forceinline__ RowHalves staged_row(const float* tile, int row) {
  const int t = threadIdx.x % 4;
  float* from = const_cast<float*>(tile);
  const float4 x[2] = {*reinterpret_cast<const float4*>(row_piece(from, row, 2 * t)),
                       *reinterpret_cast<const float4*>(row_piece(from, row, 2 * t + 1))};
  return RowHalves(x);
}

// A unit of weights lies as [output][32 inputs]. Output g of the eight that begin at `out`.
__device__ __forceinline__ uint4 staged_eight(const __half* tile, int out) {
  return *(reinterpret_cast<const uint4*>(tile + out * kUnit) + threadIdx.x % 32);
}

}  // namespace fnx::cuda
