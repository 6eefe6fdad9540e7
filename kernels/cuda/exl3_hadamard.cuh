// The 128-point transform on a warp, lane l holding elements 4l .. 4l+3, and what stands before and after it.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace fnx::cuda {

// Butterflies over strides 1, 2, 4, ... 64, then times 1/sqrt(128).
__device__ __forceinline__ float4 hadamard128(float4 v, int lane) {
  const float a = __fadd_rn(v.x, v.y), b = __fsub_rn(v.x, v.y), c = __fadd_rn(v.z, v.w), d = __fsub_rn(v.z, v.w);
  v = {__fadd_rn(a, c), __fadd_rn(b, d), __fsub_rn(a, c), __fsub_rn(b, d)};
#pragma unroll
  for (int m = 1; m < 32; m *= 2) {
    const float4 o = {__shfl_xor_sync(~0u, v.x, m), __shfl_xor_sync(~0u, v.y, m), __shfl_xor_sync(~0u, v.z, m),
                      __shfl_xor_sync(~0u, v.w, m)};
    // The upper lane holds (other - own), which is (own + other) with the own value's sign flipped.
    const uint32_t flip = lane & m ? 0x80000000u : 0u;
    const auto signed_own = [&](float f) { return __uint_as_float(__float_as_uint(f) ^ flip); };
    v = {__fadd_rn(o.x, signed_own(v.x)), __fadd_rn(o.y, signed_own(v.y)), __fadd_rn(o.z, signed_own(v.z)),
         __fadd_rn(o.w, signed_own(v.w))};
  }
  constexpr float kScale = 0.088388347648318447f;
  return {__fmul_rn(v.x, kScale), __fmul_rn(v.y, kScale), __fmul_rn(v.z, kScale), __fmul_rn(v.w, kScale)};
}

// Four F16 numbers at 8-byte alignment.
__device__ __forceinline__ float4 load_half4(const uint16_t* p) {
  const uint2 u = *reinterpret_cast<const uint2*>(p);
  const float2 a = __half22float2(*reinterpret_cast<const __half2*>(&u.x));
  const float2 b = __half22float2(*reinterpret_cast<const __half2*>(&u.y));
  return {a.x, a.y, b.x, b.y};
}

__device__ __forceinline__ float4 times(float4 a, float4 b) {
  return {__fmul_rn(a.x, b.x), __fmul_rn(a.y, b.y), __fmul_rn(a.z, b.z), __fmul_rn(a.w, b.w)};
}
__device__ __forceinline__ float4 plus(float4 a, float4 b) {
  return {__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w)};
}

// Stores elements 4l .. 4l+3 of 128-block `block` of row r into a rotated array of `rows` rows (exl3_rotated_index).
__device__ __forceinline__ void store_rotated(uint16_t* xh, int64_t rows, int64_t r, int64_t block, int lane,
                                              float4 v) {
  uint32_t* tile = reinterpret_cast<uint32_t*>(xh + ((block * 8 + lane / 4) * rows + r) * 16);
  const int pair = lane % 2 * 4 + lane % 4 / 2;
  const __half2 low = __floats2half2_rn(v.x, v.y), high = __floats2half2_rn(v.z, v.w);
  tile[pair] = *reinterpret_cast<const uint32_t*>(&low);
  tile[pair + 2] = *reinterpret_cast<const uint32_t*>(&high);
}

// Rotation of one 128-block: v is x, scale is suh.
__device__ __forceinline__ float4 rotate_block(float4 v, float4 suh, int lane) {
  return hadamard128(times(v, suh), lane);
}

// Rotates rows of tiles [first, first + tiles), which need not begin or end with a 128-block, into shared memory laid
// out as TileChain<.., Rows> reads it. Rows from `rows` on are left alone. x F32 [rows, in].
template <int Rows, int Threads>
__device__ __forceinline__ void rotate_rows(std::byte* shared, const float* x, const uint16_t* suh, int64_t in,
                                            int rows, int first, int tiles) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int begin = first / 8, blocks = (first + tiles + 7) / 8 - begin;
#pragma unroll 1
  for (int i = warp; i < rows * blocks; i += Threads / 32) {
    const int r = Rows == 1 ? 0 : i / blocks, block = begin + i - r * blocks;
    const float4 v = *reinterpret_cast<const float4*>(x + r * in + block * 128 + 4 * lane);
    const float4 h = rotate_block(v, load_half4(suh + block * 128 + 4 * lane), lane);
    const int tile = block * 8 - first;
    if (tile + lane / 4 >= 0 && tile + lane / 4 < tiles)
      store_rotated(reinterpret_cast<uint16_t*>(shared) + tile * Rows * 16, Rows, r, 0, lane, h);
  }
}

// Output transform of one 128-block of z; svh is this lane's four, bias the block's 128 or null.
__device__ __forceinline__ float4 output_block(float4 z, float4 svh, const float* bias, int lane) {
  const float4 y = times(hadamard128(z, lane), svh);
  return bias == nullptr ? y : plus(y, *reinterpret_cast<const float4*>(bias + 4 * lane));
}
__device__ __forceinline__ void store_output(void* y, bool bf16, int64_t at, float4 v) {
  if (!bf16) {
    *reinterpret_cast<float4*>(static_cast<float*>(y) + at) = v;
    return;
  }
  const __nv_bfloat162 a = __floats2bfloat162_rn(v.x, v.y), b = __floats2bfloat162_rn(v.z, v.w);
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(y) + at) = {*reinterpret_cast<const uint32_t*>(&a),
                                                               *reinterpret_cast<const uint32_t*>(&b)};
}

}  // namespace fnx::cuda
