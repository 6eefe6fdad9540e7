// Eight rows of 128 numbers on a warp: lane 4r + q holds elements 16i + 4q .. 16i + 4q + 3 of row r in v[i], i = 0..7.
// The same numbers as the one-row pieces of exl3_hadamard.cuh with fewer exchanges between lanes.
#pragma once

#include "kernels/cuda/exl3_hadamard.cuh"

namespace fnx::cuda {

using Octet = float4[8];

inline constexpr float kOctetScale = 0.088388347648318447f;  // 1/sqrt(128), as hadamard128

// Row r0 + lane / 4 of z [..][stride].
__device__ __forceinline__ void load_octet(Octet& v, const float* z, int stride, int r0, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i)
    v[i] = *reinterpret_cast<const float4*>(z + (r0 + lane / 4) * stride + 16 * i + lane % 4 * 4);
}

// Butterflies over strides 1, 2, 4, ... 64, then times 1/sqrt(128).
__device__ __forceinline__ void hadamard_octet(Octet& v, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float a = __fadd_rn(v[i].x, v[i].y), b = __fsub_rn(v[i].x, v[i].y);
    const float c = __fadd_rn(v[i].z, v[i].w), d = __fsub_rn(v[i].z, v[i].w);
    v[i] = {__fadd_rn(a, c), __fadd_rn(b, d), __fsub_rn(a, c), __fsub_rn(b, d)};
  }
#pragma unroll
  for (int m = 1; m < 4; m *= 2) {
    // The upper lane holds (other - own): the product with +-1 is exact.
    const float sign = lane & m ? -1.0f : 1.0f;
    const auto turn = [&](float own) { return __fmaf_rn(own, sign, __shfl_xor_sync(~0u, own, m)); };
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = {turn(v[i].x), turn(v[i].y), turn(v[i].z), turn(v[i].w)};
  }
#pragma unroll
  for (int m = 1; m < 8; m *= 2)
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if ((i & m) == 0) {
        const float4 a = v[i], b = v[i + m];
        v[i] = plus(a, b);
        v[i + m] = {__fsub_rn(a.x, b.x), __fsub_rn(a.y, b.y), __fsub_rn(a.z, b.z), __fsub_rn(a.w, b.w)};
      }
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = times(v[i], {kOctetScale, kOctetScale, kOctetScale, kOctetScale});
}

// Times the scales of a 128-block, F16 at 8-byte alignment.
__device__ __forceinline__ void scale_octet(Octet& v, const uint16_t* scales, int lane) {
#pragma unroll
  for (int i = 0; i < 8; ++i) v[i] = times(v[i], load_half4(scales + 16 * i + lane % 4 * 4));
}

// Stores this lane's row as row r of 128-block `block` of a rotated array of `rows` rows (exl3_rotated_index). All
// lanes take part; `live` says whether this one stores.
__device__ __forceinline__ void store_rotated_octet(uint16_t* xh, int64_t rows, int64_t r, int64_t block, int lane,
                                                    const Octet& v, bool live) {
  const bool upper = lane & 2;
  uint16_t* at = xh + (block * 8 * rows + r) * 16 + (lane % 2 * 2 + upper) * 4;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const __half2 first = __floats2half2_rn(v[i].x, v[i].y), second = __floats2half2_rn(v[i].z, v[i].w);
    const uint32_t low = *reinterpret_cast<const uint32_t*>(&first), high = *reinterpret_cast<const uint32_t*>(&second);
    const uint32_t other = __shfl_xor_sync(~0u, upper ? low : high, 2);
    if (live) *reinterpret_cast<uint2*>(at + i * rows * 16) = upper ? uint2{other, high} : uint2{low, other};
  }
}

}  // namespace fnx::cuda
