// Routed experts of many rows: the kernels of one codebook, for the units exl3_experts_*_many.cu.
#pragma once

#include "kernels/cuda/exl3_experts.cuh"

namespace fnx::cuda {

// Shared memory of the many-row kernels: z of the gate, rings, rows; z of a matrix replaces its rings when they are
// done.
inline constexpr int kUnitTileBytes = kUnitPairs * kColumnStride * 4;
inline constexpr int kUnitRingBytes = 8 * kExpertRingBytes;
inline constexpr int kUnitBytes = kUnitRingBytes + kChunkBytes<kUnitPairs>;
static_assert(kUnitTileBytes <= kUnitRingBytes);

// z [count][128] of one matrix column in shared memory: chains of every split, added in ascending order.
template <exl3::Codebook Book, int Rows>
__device__ __forceinline__ void unit_columns_of(const Exl3Matrix& m, std::byte* shared, int64_t in, int64_t out,
                                                int block, int splits, const uint16_t* x, int64_t stride, int rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  std::byte* chunk = shared + kUnitRingBytes;
  constexpr int kGroups = Rows / 8;
  float total[kGroups][4];
#pragma unroll 1
  for (int s = 0; s < splits; ++s) {
    float acc[kGroups][4] = {};
    expert_chain<Book, Rows>(
        m, shared, chunk, out, block, exl3_split_begin(in, splits, s), exl3_split_begin(in, splits, s + 1), acc, [] {},
        [&](int first, int tiles) { load_rows<Rows, kFewThreads>(chunk, x, stride, rows, first, tiles); });
#pragma unroll
    for (int g = 0; g < kGroups; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[g][i] = s == 0 ? acc[g][i] : __fadd_rn(total[g][i], acc[g][i]);
  }
  store_columns(reinterpret_cast<float*>(shared), warp * 16, lane, rows, total);
  __syncthreads();
}

template <exl3::Codebook Book>
__device__ __forceinline__ void unit_columns(const Exl3Matrix& m, std::byte* shared, int64_t in, int64_t out, int block,
                                             int splits, const uint16_t* x, int64_t stride, int rows) {
  if (rows <= 8) {
    unit_columns_of<Book, 8>(m, shared, in, out, block, splits, x, stride, rows);
  } else {
    unit_columns_of<Book, kUnitPairs>(m, shared, in, out, block, splits, x, stride, rows);
  }
}

// Grid: (width/128, most units).
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 2) exl3_gate_up_many_kernel(const ExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  if (blockIdx.y >= *a.unit_count) return;
  const ExpertUnit unit = a.units[blockIdx.y];
  const Exl3Expert& e = a.table[unit.expert];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  float* gate = reinterpret_cast<float*>(shared);
  float* z = reinterpret_cast<float*>(shared + kUnitTileBytes);
#pragma unroll 1
  for (int projection = 0; projection < 2; ++projection) {
    const Exl3Matrix& m = projection == 0 ? e.gate : e.up;
    unit_columns<Book>(m, shared + kUnitTileBytes, a.hidden, a.width, block, a.gate_splits,
                       (projection == 0 ? a.gate_xh : a.up_xh) + unit.begin * 16, a.pairs, unit.count);
    for (int r = warp; r < unit.count; r += 8) {
      float4* at = reinterpret_cast<float4*>(gate + r * kColumnStride) + lane;
      const float4 y = output_block(*reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane),
                                    load_half4(m.svh + block * 128 + 4 * lane), nullptr, lane);
      if (projection == 0) {
        *at = y;
        continue;
      }
      store_rotated(a.down_xh, a.pairs, unit.begin + r, block, lane,
                    rotate_block(activate(*at, y), load_half4(e.down.suh + block * 128 + 4 * lane), lane));
    }
    __syncthreads();
  }
}

// Grid: (hidden/128, most units).
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 2) exl3_down_many_kernel(const ExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  if (blockIdx.y >= *a.unit_count) return;
  const ExpertUnit unit = a.units[blockIdx.y];
  const Exl3Matrix& m = a.table[unit.expert].down;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  unit_columns<Book>(m, shared, a.width, a.hidden, block, a.down_splits, a.down_xh + unit.begin * 16, a.pairs,
                     unit.count);
  const float* z = reinterpret_cast<const float*>(shared);
  for (int r = warp; r < unit.count; r += 8)
    *reinterpret_cast<float4*>(a.slots + a.order[unit.begin + r] * a.hidden + block * 128 + 4 * lane) =
        output_block(*reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane),
                     load_half4(m.svh + block * 128 + 4 * lane), nullptr, lane);
}

template <exl3::Codebook Book>
void launch_experts_many(const ExpertArgs& a, int most_units, cudaStream_t stream) {
  constexpr int kGateBytes = kUnitTileBytes + kUnitBytes;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(exl3_gate_up_many_kernel<Book>, cudaFuncAttributeMaxDynamicSharedMemorySize, kGateBytes);
  check_cuda(allowed, "exl3_gate_up_many_kernel");
  launch("exl3_gate_up_many_kernel", exl3_gate_up_many_kernel<Book>,
         dim3(static_cast<unsigned>(a.width / 128), most_units), kFewThreads, kGateBytes, false, stream, a);
  launch("exl3_down_many_kernel", exl3_down_many_kernel<Book>, dim3(static_cast<unsigned>(a.hidden / 128), most_units),
         kFewThreads, kUnitBytes, false, stream, a);
}

}  // namespace fnx::cuda
