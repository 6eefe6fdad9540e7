// Tiles of weights and rows in shared memory for kernels of many rows; the chains of kernels/cuda/plain_mma.cuh.
#pragma once

#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

// What a lane holds of sixteen rows in half a unit, the even or the odd groups, as the first operand: lane 4 g + t has
// rows g and g + 8. The product is then rows by outputs, and weights and rows go to the tensor cores as they come.
struct RowHalf {
  uint32_t hi[4], lo[4];
  __device__ __forceinline__ RowHalf(const float4& a, const float4& b) {
    split2(a.x, a.y, hi[0], lo[0]), split2(b.x, b.y, hi[1], lo[1]);
    split2(a.z, a.w, hi[2], lo[2]), split2(b.z, b.w, hi[3], lo[3]);
  }
  RowHalf() = default;
};

// A step of a unit's chain, which is the even groups' hi and lo, then the odd groups': rows g (0, 1) and g + 8 (2,
// 3), outputs 2 t and 2 t + 1 of eight.
__device__ __forceinline__ void mma_step(float (&acc)[4], const RowHalf& x, const uint4& w, bool odd, bool lo) {
  mma_16816(acc, lo ? x.lo : x.hi, odd ? w.z : w.x, odd ? w.w : w.y);
}

// The stages in a kernel's shared memory; their address stays in a register, where else every use finds it out anew.
template <class Stage>
__device__ __forceinline__ Stage* stages_in(void* memory) {
  auto at = static_cast<uint32_t>(__cvta_generic_to_shared(memory));
  asm volatile("" : "+r"(at));
  return static_cast<Stage*>(__cvta_shared_to_generic(at));
}

inline constexpr int kRowChunks = kUnit / 4;     // pieces of 16 bytes of a unit of a row
inline constexpr int kWeightChunks = kUnit / 8;  // and of an output's weights

// A unit of weights lies as [output][32 inputs]. Output g of the eight that begin at `out`.
__device__ __forceinline__ uint4 staged_eight(const __half* tile, int out) {
  return *(reinterpret_cast<const uint4*>(tile + out * kUnit) + threadIdx.x % 32);
}

}  // namespace fnx::cuda
