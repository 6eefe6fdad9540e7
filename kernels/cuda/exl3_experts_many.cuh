// Routed experts of many rows: the kernels of one codebook, for the units exl3_experts_*_many.cu.
#pragma once

#include "kernels/cuda/exl3_experts.cuh"
#include "kernels/cuda/exl3_octet.cuh"
#include "kernels/cuda/exl3_tile.cuh"

namespace fnx::cuda {

// The unit of a block: long ones, which experts of many pairs have, may come last in the list and begin first.
__device__ __forceinline__ bool take_unit(const ExpertArgs& a, ExpertUnit& unit) {
  const int count = *a.unit_count, place = count - 1 - static_cast<int>(blockIdx.y);
  if (place < 0) return false;
  unit = a.units[place];
  return true;
}

// Grid: (width/128, most units). A thread reads of `gate` what it wrote there; without a row of its own it reads the
// last row's, and nobody its result.
template <exl3::Codebook Book, int Groups>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<Groups>) exl3_gate_up_many_kernel(const ExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  ExpertUnit unit;
  if (!take_unit(a, unit)) return;
  const Exl3Expert& e = a.table[unit.expert];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
#pragma unroll 1
  for (int projection = 0; projection < 2; ++projection) {
    const Exl3Matrix& m = projection == 0 ? e.gate : e.up;
    RowTile<Book, Groups>::multiply(shared, {m.trellis, a.hidden, a.width, m.half_bits, a.gate_splits}, block,
                                    (projection == 0 ? a.gate_xh : a.up_xh) + int64_t{unit.begin} * 16, a.pairs,
                                    unit.count);
#pragma unroll 1
    for (int r0 = warp * 8; r0 < unit.count; r0 += kTileThreads / 4) {
      const bool live = r0 + lane / 4 < unit.count;
      const int64_t place = unit.begin + min(r0 + lane / 4, unit.count - 1);
      float* gate = a.gate + place * a.width + block * 128 + lane % 4 * 4;
      Octet v;
      load_octet(v, reinterpret_cast<const float*>(shared), kColumnStride, r0, lane);
      hadamard_octet(v, lane);
      scale_octet(v, m.svh + block * 128, lane);
      if (projection == 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
          if (live) *reinterpret_cast<float4*>(gate + 16 * i) = v[i];
        continue;
      }
#pragma unroll
      for (int i = 0; i < 8; i += 4) {  // four at a time, so that their loads are on their way together
        float4 gates[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) gates[j] = *reinterpret_cast<const float4*>(gate + 16 * (i + j));
#pragma unroll
        for (int j = 0; j < 4; ++j) v[i + j] = activate(gates[j], v[i + j]);
      }
      scale_octet(v, e.down.suh + block * 128, lane);
      hadamard_octet(v, lane);
      store_rotated_octet(a.down_xh, a.pairs, place, block, lane, v, live);
    }
  }
}

// Grid: (hidden/128, most units).
template <exl3::Codebook Book, int Groups>
__global__ void __launch_bounds__(kTileThreads, kTileBlocks<Groups>) exl3_down_many_kernel(const ExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  ExpertUnit unit;
  if (!take_unit(a, unit)) return;
  const Exl3Matrix& m = a.table[unit.expert].down;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  RowTile<Book, Groups>::multiply(shared, {m.trellis, a.width, a.hidden, m.half_bits, a.down_splits}, block,
                                  a.down_xh + int64_t{unit.begin} * 16, a.pairs, unit.count);
#pragma unroll 1
  for (int r0 = warp * 8; r0 < unit.count; r0 += kTileThreads / 4) {
    Octet v;
    load_octet(v, reinterpret_cast<const float*>(shared), kColumnStride, r0, lane);
    hadamard_octet(v, lane);
    scale_octet(v, m.svh + block * 128, lane);
    if (r0 + lane / 4 >= unit.count) continue;
    float* slot = a.slots + a.order[unit.begin + r0 + lane / 4] * a.hidden + block * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 8; ++i) *reinterpret_cast<float4*>(slot + 16 * i) = v[i];
  }
}

template <auto* Kernel>
void launch_tiles(const char* name, int shared_bytes, int64_t out, const ExpertArgs& a, int most_units,
                  cudaStream_t stream) {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(Kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
  check_cuda(allowed, name);
  launch(name, Kernel, dim3(static_cast<unsigned>(out / 128), most_units), kTileThreads, shared_bytes, false, stream,
         a);
}

template <exl3::Codebook Book, int Groups>
void launch_experts_tiles(const ExpertArgs& a, int most_units, cudaStream_t stream) {
  constexpr int kBytes = RowTile<Book, Groups>::kSharedBytes;
  launch_tiles<exl3_gate_up_many_kernel<Book, Groups>>("exl3_gate_up_many_kernel", kBytes, a.width, a, most_units,
                                                       stream);
  launch_tiles<exl3_down_many_kernel<Book, Groups>>("exl3_down_many_kernel", kBytes, a.hidden, a, most_units, stream);
}

template <exl3::Codebook Book>
void launch_experts_many(const ExpertArgs& a, int unit_pairs, int most_units, cudaStream_t stream) {
  unit_pairs == kSmallUnitPairs ? launch_experts_tiles<Book, kSmallUnitPairs / 16>(a, most_units, stream)
                                : launch_experts_tiles<Book, kUnitPairs / 16>(a, most_units, stream);
}

}  // namespace fnx::cuda
