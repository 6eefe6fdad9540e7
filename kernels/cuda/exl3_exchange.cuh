// How the blocks of one column hand their split sums to the last of them. A word of the exchange is zero while it is
// empty and holds the complement of a float otherwise, so that a value says itself that it has come. The block that
// takes a value empties its word. Blocks start in the order of their index: a block waits for lower indices only.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "kernels/cuda/exl3_hadamard.cuh"

namespace fnx::cuda {

// Words of a slot: the outputs of a block.
inline constexpr int kSlot = 128;

// No sum is the NaN of all ones, whose complement would say empty; were there one, another NaN would take its place.
__device__ __forceinline__ uint32_t exchanged(float v) { return max(~__float_as_uint(v), 1u); }

__device__ __forceinline__ void give4(uint32_t* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(exchanged(v.x)),
               "r"(exchanged(v.y)), "r"(exchanged(v.z)), "r"(exchanged(v.w))
               : "memory");
}

// What lies `Slot` slots after `from`.
template <int Slot>
__device__ __forceinline__ void peek(const uint32_t* from, uint32_t& v) {
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1 + %2];" : "=r"(v) : "l"(from), "n"(4 * kSlot * Slot) : "memory");
}
template <int Slot>
__device__ __forceinline__ void peek(const uint32_t* from, uint4& v) {
  asm volatile("ld.relaxed.gpu.global.v4.b32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from), "n"(4 * kSlot * Slot)
               : "memory");
}
__device__ __forceinline__ bool is_there(uint32_t v) { return v != 0; }
__device__ __forceinline__ bool is_there(uint4 v) { return v.x != 0 && v.y != 0 && v.z != 0 && v.w != 0; }
__device__ __forceinline__ float sum_of(uint32_t v) { return __uint_as_float(~v); }
__device__ __forceinline__ float4 sum_of(uint4 v) { return {sum_of(v.x), sum_of(v.y), sum_of(v.z), sum_of(v.w)}; }
__device__ __forceinline__ float plus(float a, float b) { return __fadd_rn(a, b); }

// Sum of this lane's column, or four, over `count` slots in ascending order; waits for each.
template <class Word, class Sum, int... I>
__device__ __forceinline__ Sum take_slots(uint32_t* from, int count, std::integer_sequence<int, I...>) {
  constexpr int kBatch = sizeof...(I);
  Sum z = {};
#pragma unroll 1
  for (int s = 0; s < count; s += kBatch, from += kBatch * kSlot) {
    Word v[kBatch];
    const int left = count - s;
    do {
      ((I < left ? peek<I>(from, v[I]) : void()), ...);
    } while (!((I >= left || is_there(v[I])) && ...));
    ((I < left ? void((z = s + I == 0 ? sum_of(v[I]) : plus(z, sum_of(v[I])),
                       *reinterpret_cast<Word*>(from + I * kSlot) = Word{}))
               : void()),
     ...);
  }
  return z;
}
__device__ __forceinline__ float take(uint32_t* from, int count) {
  return take_slots<uint32_t, float>(from, count, std::make_integer_sequence<int, 12>{});
}
__device__ __forceinline__ float4 take4(uint32_t* from, int count) {
  return take_slots<uint4, float4>(from, count, std::make_integer_sequence<int, 8>{});
}

}  // namespace fnx::cuda
