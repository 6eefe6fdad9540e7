// Routed experts of few rows: the kernels of one codebook, for the units exl3_experts_*_few.cu.
#pragma once

#include "kernels/cuda/exl3_experts.cuh"

namespace fnx::cuda {

// Grid: (width/128, 2 * gate_splits, pairs). The last block of a pair's column activates and rotates for down.
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_gate_up_few_kernel(const ExpertArgs a) {
  __shared__ __align__(16) std::byte rings[8 * kExpertRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<1>];
  float* z = reinterpret_cast<float*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x, last = gridDim.y - 1;
  const int projection = blockIdx.y / a.gate_splits, split = blockIdx.y % a.gate_splits;
  const int64_t pair = blockIdx.z;
  // Ids may come from the kernel before; the next kernel, which let_next_start allows, reads them before it waits.
  wait_for_previous();
  let_next_start();
  const Exl3Expert* expert = find_expert(a, a.ids[pair]);
  if (expert == nullptr) return;
  const Exl3Matrix m = projection == 0 ? expert->gate : expert->up;
  const float* x = a.x + pair / a.slots_per_row * a.hidden;
  float acc[1][4] = {};
  expert_chain<Book, 1>(
      m, rings, rows, a.width, block, exl3_split_begin(a.hidden, a.gate_splits, split),
      exl3_split_begin(a.hidden, a.gate_splits, split + 1), acc, [] {},
      [&](int first, int tiles) { rotate_rows<1, kFewThreads>(rows, x, m.suh, a.hidden, 1, first, tiles); });
  store_columns(z, warp * 16, lane, 1, acc);
  __syncthreads();
  uint32_t* slots = a.gate_exchange + (pair * blocks + block) * last * kSlot;
  if (blockIdx.y < last) {
    if (warp == 0) give4(slots + blockIdx.y * kSlot + 4 * lane, *reinterpret_cast<const float4*>(z + 4 * lane));
    return;
  }
  // Warps 0 to 3 take the gate's splits, the others those of up but the last, which is this block's.
  const int column = threadIdx.x % 128;
  if (warp < 4) {
    z[kColumnStride + column] = take(slots + column, a.gate_splits);
  } else if (a.gate_splits > 1) {
    z[column] = __fadd_rn(take(slots + a.gate_splits * kSlot + column, a.gate_splits - 1), z[column]);
  }
  __syncthreads();
  if (warp >= 2) return;
  const Exl3Matrix& mine = warp == 0 ? expert->gate : expert->up;
  const float4 sum = *reinterpret_cast<const float4*>(z + (warp == 0 ? kColumnStride : 0) + 4 * lane);
  const float4 y = output_block(sum, load_half4(mine.svh + block * 128 + 4 * lane), nullptr, lane);
  if (warp == 1) *reinterpret_cast<float4*>(z + 4 * lane) = y;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  if (warp == 1) return;
  const float4 h = activate(y, *reinterpret_cast<const float4*>(z + 4 * lane));
  store_rotated(a.down_xh, a.pairs, pair, block, lane,
                rotate_block(h, load_half4(expert->down.suh + block * 128 + 4 * lane), lane));
}

// Grid: (hidden/128, down_splits, pairs). Runs after the kernel above alone, which has waited for the ids.
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_down_few_kernel(const ExpertArgs a) {
  __shared__ __align__(16) std::byte rings[8 * kExpertRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<1>];
  float* z = reinterpret_cast<float*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x, split = blockIdx.y, last = a.down_splits - 1;
  const int64_t pair = blockIdx.z;
  const Exl3Expert* expert = find_expert(a, a.ids[pair]);
  if (expert == nullptr) return wait_for_previous();
  float acc[1][4] = {};
  expert_chain<Book, 1>(
      expert->down, rings, rows, a.hidden, block, exl3_split_begin(a.width, a.down_splits, split),
      exl3_split_begin(a.width, a.down_splits, split + 1), acc,
      [] {
        wait_for_previous();
        let_next_start();
      },
      [&](int first, int tiles) { load_rows<1, kFewThreads>(rows, a.down_xh + pair * 16, a.pairs, 1, first, tiles); });
  store_columns(z, warp * 16, lane, 1, acc);
  __syncthreads();
  if (last > 0) {
    uint32_t* slots = a.down_exchange + (pair * blocks + block) * last * kSlot;
    if (split < last) {
      if (warp == 0) give4(slots + split * kSlot + 4 * lane, *reinterpret_cast<const float4*>(z + 4 * lane));
      return;
    }
    if (warp < 4) z[threadIdx.x] = __fadd_rn(take(slots + threadIdx.x, last), z[threadIdx.x]);
    __syncthreads();
  }
  if (warp == 0)
    *reinterpret_cast<float4*>(a.slots + pair * a.hidden + block * 128 + 4 * lane) =
        output_block(*reinterpret_cast<const float4*>(z + 4 * lane),
                     load_half4(expert->down.svh + block * 128 + 4 * lane), nullptr, lane);
}

template <exl3::Codebook Book>
void launch_experts_few(const ExpertArgs& a, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(a.pairs);
  launch("exl3_gate_up_few_kernel", exl3_gate_up_few_kernel<Book>,
         dim3(static_cast<unsigned>(a.width / 128), 2 * a.gate_splits, pairs), kFewThreads, 0, true, stream, a);
  launch("exl3_down_few_kernel", exl3_down_few_kernel<Book>,
         dim3(static_cast<unsigned>(a.hidden / 128), a.down_splits, pairs), kFewThreads, 0, true, stream, a);
}

}  // namespace fnx::cuda
