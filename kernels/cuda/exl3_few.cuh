// Few rows: a block owns 128 outputs and one K split; warp w decodes n-tile w of them. The last block of a column to
// arrive adds the splits in ascending order and transforms the output.
#pragma once

#include "kernels/cuda/exl3_chain.cuh"
#include "kernels/cuda/exl3_hadamard.cuh"
#include "kernels/cuda/exl3_linear.h"

namespace fnx::cuda {

inline constexpr int kFewThreads = 256;
// Stride of a row of 128 outputs in shared memory: rows of one store fall into different banks.
inline constexpr int kColumnStride = 132;

struct FewArgs {
  const uint16_t* trellis;
  const float* x;  // [rows, in] to be rotated with suh here, or null when xh is given
  const uint16_t* suh;
  const uint16_t* xh;  // rotated [in/16, rows, 16]
  const uint16_t* svh;
  const float* bias;
  void* y;             // [rows, out]
  float* partials;     // [out/128, splits, rows, 128]; unused with one split
  uint32_t* counters;  // [out/128], zero between launches
  int64_t in, out;
  int rows, splits;
  bool bf16;
};

// Writes a warp's accumulators, 16 outputs from column `first` on, as z[row][column].
template <int RowGroups>
__device__ __forceinline__ void store_columns(float* z, int first, int lane, int rows,
                                              const float (&acc)[RowGroups][4]) {
  const int column = first + lane / 4;
#pragma unroll
  for (int g = 0; g < RowGroups; ++g) {
    const int row = g * 8 + lane % 4 * 2;
    if (row < rows) {
      z[row * kColumnStride + column] = acc[g][0];
      z[row * kColumnStride + column + 8] = acc[g][2];
    }
    if (row + 1 < rows) {
      z[(row + 1) * kColumnStride + column] = acc[g][1];
      z[(row + 1) * kColumnStride + column + 8] = acc[g][3];
    }
  }
}

// True in every thread of the block that arrives last of `total` at a counter, which is then zero again. What blocks
// wrote before arriving is visible to the last.
__device__ __forceinline__ bool arrive_last(uint32_t* counter, uint32_t total) {
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    uint32_t before;
    asm volatile("atom.add.acq_rel.gpu.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    last = before == total - 1;
    if (last) *counter = 0;
  }
  __syncthreads();
  return last;
}

// Sum over the splits in ascending order of this lane's four outputs; `step` elements lie between two splits.
__device__ __forceinline__ float4 sum_splits(const float* partial, int splits, int64_t step) {
  float4 z = __ldcg(reinterpret_cast<const float4*>(partial));
#pragma unroll 8
  for (int s = 1; s < splits; ++s) z = plus(z, __ldcg(reinterpret_cast<const float4*>(partial + s * step)));
  return z;
}

template <exl3::Codebook Book, int HalfBits, int RowGroups>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_few_kernel(const FewArgs a) {
  using Chain = TileChain<Book, HalfBits, RowGroups>;
  constexpr int kTiles = kChunkTiles<RowGroups>;
  static_assert(RowGroups * 8 * kColumnStride * 4 <= kChunkBytes<RowGroups>);
  __shared__ __align__(16) std::byte rings[8 * Chain::kRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<RowGroups>];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, split = blockIdx.y;
  const int begin = exl3_split_begin(a.in, a.splits, split), end = exl3_split_begin(a.in, a.splits, split + 1);
  const int64_t tiles_n = a.out / 16;
  let_next_start();
  Chain chain(rings + warp * Chain::kRingBytes, a.trellis + (begin * tiles_n + block * 8 + warp) * (8 * HalfBits),
              tiles_n, end - begin, lane);
  if (RowGroups == 1 && a.x != nullptr) {
    for (int i = threadIdx.x; i < kChunkBytes<RowGroups> / 16; i += kFewThreads)
      reinterpret_cast<uint4*>(rows)[i] = {0, 0, 0, 0};
  }
  wait_for_previous();
  float acc[RowGroups][4] = {};
  for (int t = begin; t < end; t += kTiles) {
    const int tiles = min(kTiles, end - t);
    __syncthreads();
    if (RowGroups == 1 && a.x != nullptr) {
      rotate_rows<kFewThreads>(rows, a.x, a.suh, a.in, a.rows, t, tiles);
    } else {
      load_rows<RowGroups, kFewThreads>(rows, a.xh, a.rows, a.rows, t, tiles);
    }
    __syncthreads();
    chain.run(rows, tiles, acc);
  }
  __syncthreads();
  float* z = reinterpret_cast<float*>(rows);
  store_columns<RowGroups>(z, warp * 16, lane, a.rows, acc);
  __syncthreads();
  float* partial = a.partials + int64_t{block} * a.splits * a.rows * 128;
  if (a.splits > 1) {
    for (int r = warp; r < a.rows; r += 8)
      __stcg(reinterpret_cast<float4*>(partial + (int64_t{split} * a.rows + r) * 128) + lane,
             *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane));
    if (!arrive_last(a.counters + block, a.splits)) return;
  }
  for (int r = warp; r < a.rows; r += 8) {
    const float4 sum = a.splits > 1 ? sum_splits(partial + r * 128 + 4 * lane, a.splits, int64_t{a.rows} * 128)
                                    : *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane);
    const float4 y = output_block(sum, a.svh + block * 128, a.bias ? a.bias + block * 128 : nullptr, lane);
    store_output(a.y, a.bf16, r * a.out + block * 128 + 4 * lane, y);
  }
}

// Launches the kernel of one codebook and width; defined in the units exl3_few_*.cu.
template <exl3::Codebook Book, int HalfBits>
void launch_few(const FewArgs& a, cudaStream_t stream);

template <exl3::Codebook Book, int HalfBits>
void launch_few_here(const FewArgs& a, cudaStream_t stream) {
  const dim3 grid(static_cast<unsigned>(a.out / 128), a.splits);
  auto* kernel = a.rows <= 8 ? exl3_few_kernel<Book, HalfBits, 1> : exl3_few_kernel<Book, HalfBits, 2>;
  launch("exl3_few_kernel", kernel, grid, kFewThreads, 0, true, stream, a);
}

}  // namespace fnx::cuda
