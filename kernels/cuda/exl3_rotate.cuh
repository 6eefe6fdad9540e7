// The rotation kernel: one warp a 128-block of a row.
#pragma once

#include "kernels/cuda/exl3_hadamard.cuh"

namespace fnx::cuda {

inline constexpr int kRotateThreads = 128;

inline __device__ void rotate_row_block(const float* x, const uint16_t* suh, uint16_t* xh, int64_t in, int64_t rows,
                                        int64_t from, int64_t to, int64_t block, int lane) {
  const float4 v = *reinterpret_cast<const float4*>(x + from * in + block * 128 + 4 * lane);
  store_rotated(xh, rows, to, block, lane, rotate_block(v, load_half4(suh + block * 128 + 4 * lane), lane));
}

}  // namespace fnx::cuda
