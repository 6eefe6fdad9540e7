// Staging of tiles of weights and rows in shared memory for the kernels of many rows (kernels/cuda/plain_mma.cuh).
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

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

// A unit of weights lies as [output][32 inputs]; outputs g and g + 8 of the tile that begins at `out`.
__device__ __forceinline__ void staged_weights(const __half* tile, int out, uint4 (&w)[2]) {
  const int lane = threadIdx.x % 32;
  const uint4* from = reinterpret_cast<const uint4*>(tile + out * kUnit) + lane;
  w[0] = from[0], w[1] = from[32];
}

}  // namespace fnx::cuda
