#include "kernels/cuda/plain_linear.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

namespace {

__device__ __forceinline__ float finish(Finish f, float v, float n) {
  if (f == Finish::SiluMean) return silu(v / n);
  if (f == Finish::InjectMean) return 2.0f * sigmoid(v / n);
  return v;
}

// One block a tile of 16 outputs and 8 kRowTiles rows; kSpread: blockIdx.y is the split, and the last block of a tile
// to finish adds the splits; otherwise blockIdx.y is the row tile and the block takes the splits in turn.
template <int kRowTiles, bool kSpread>
__global__ void __launch_bounds__(256) plain_kernel(PlainLaunch p) {
  constexpr int kRows = 8 * kRowTiles, kCells = kTileOut * kRows, kEach = (kCells + 255) / 256;
  __shared__ float cells[kTileSlices][kCells];
  __shared__ bool last;
  const bool second = blockIdx.x >= p.tiles;
  const PlainMatrix& m = p.matrix[second];
  const int64_t first_out = (blockIdx.x - (second ? p.tiles : 0)) * kTileOut;
  const int64_t first_row = kSpread ? 0 : int64_t{blockIdx.y} * kRows;
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;

  float total[kEach];
  for (int split = kSpread ? blockIdx.y : 0; split < (kSpread ? blockIdx.y + 1 : p.splits); ++split) {
    float acc[kRowTiles][4] = {};
    const int from = (split * kTileSlices + warp) * p.slice_units;
    mma_chain<kRowTiles>(m.w, p.in, first_out, m.out, p.x, first_row, p.rows, from, min(from + p.slice_units, p.units),
                         acc);
#pragma unroll
    for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) cells[warp][(8 * n + 2 * t + i % 2) * kTileOut + g + i / 2 * 8] = acc[n][i];
    __syncthreads();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int cell = e * 256 + threadIdx.x;
      if (cell >= kCells) break;
      float sum = cells[0][cell];
#pragma unroll
      for (int s = 1; s < kTileSlices; ++s) sum += cells[s][cell];
      total[e] = kSpread || split == 0 ? sum : total[e] + sum;
    }
    __syncthreads();
  }

  if (kSpread && p.splits > 1) {
    float* mine = p.partials + (int64_t{blockIdx.x} * p.splits) * kCells;
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (e * 256 + threadIdx.x < kCells) mine[int64_t{blockIdx.y} * kCells + e * 256 + threadIdx.x] = total[e];
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
      last = atomicAdd(p.counters + blockIdx.x, 1u) == static_cast<uint32_t>(p.splits - 1);
      if (last) p.counters[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    __threadfence();
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int cell = e * 256 + threadIdx.x;
      if (cell >= kCells) break;
      float sum = __ldcg(mine + cell);
      for (int s = 1; s < p.splits; ++s) sum += __ldcg(mine + int64_t{s} * kCells + cell);
      total[e] = sum;
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int cell = e * 256 + threadIdx.x;
    const int64_t row = first_row + cell / kTileOut, out = first_out + cell % kTileOut;
    if (cell >= kCells || row >= p.rows || out >= m.out) continue;
    const float v = m.bias != nullptr ? total[e] + m.bias[out] : total[e];
    m.y[row * m.out + out] = finish(m.finish, v, p.streams);
  }
}

template <class T>
__device__ __forceinline__ float to_float(T v) {
  return static_cast<float>(v);
}

// One warp an output, four rows at a time, each row a chain of its own.
template <class T>
__global__ void __launch_bounds__(256) plain_fma_kernel(PlainLinearParams p) {
  constexpr int kRows = 4;
  const int64_t out = int64_t{blockIdx.x} * 8 + threadIdx.x / 32, first = int64_t{blockIdx.y} * kRows;
  if (out >= p.out) return;
  const int lane = threadIdx.x % 32;
  const T* w = static_cast<const T*>(p.weights) + out * p.in;
  float sum[kRows] = {};
  for (int64_t k = lane; k < p.in; k += 32) {
    const float v = to_float(w[k]);
#pragma unroll
    for (int r = 0; r < kRows; ++r)
      if (first + r < p.rows) sum[r] = fmaf(v, p.x[(first + r) * p.in + k], sum[r]);
  }
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const float v = warp_sum(sum[r]);
    if (lane == 0 && first + r < p.rows) p.y[(first + r) * p.out + out] = p.bias != nullptr ? v + p.bias[out] : v;
  }
}

int row_tiles(int64_t rows) { return rows <= 8 ? 1 : rows <= 16 ? 2 : 8; }

}  // namespace

PlainPlan plain_plan(int64_t in, int64_t out) {
  constexpr int64_t kBlocks = 160;  // enough blocks to keep every multiprocessor of the supported cards loading
  PlainPlan plan;
  const int64_t tiles = (out + kTileOut - 1) / kTileOut;
  plan.units = (in + kUnit - 1) / kUnit;
  const int64_t splits =
      std::clamp<int64_t>(kBlocks / std::max<int64_t>(tiles, 1), 1, std::max<int64_t>(plan.units / kTileSlices, 1));
  plan.slice_units = (plan.units + splits * kTileSlices - 1) / (splits * kTileSlices);
  const int64_t slices = (plan.units + plan.slice_units - 1) / plan.slice_units;
  plan.splits = (slices + kTileSlices - 1) / kTileSlices;
  return plan;
}

int64_t plain_counters(int64_t, int64_t out) { return (out + kTileOut - 1) / kTileOut; }

int64_t plain_partials(int64_t rows, int64_t in, int64_t out) {
  return plain_counters(in, out) * plain_plan(in, out).splits * kTileOut * 8 * row_tiles(rows);
}

void launch_plain(const PlainLaunch& p, const char* name, cudaStream_t stream) {
  if (p.rows == 0) return;
  const auto tiles =
      static_cast<unsigned>(p.tiles + (p.matrix[1].w != nullptr ? (p.matrix[1].out + kTileOut - 1) / kTileOut : 0));
  if (p.rows > kSpreadRowsMax)
    plain_kernel<8, false><<<dim3(tiles, blocks_of(p.rows, 64)), 256, 0, stream>>>(p);
  else if (row_tiles(p.rows) == 8)
    plain_kernel<8, true><<<dim3(tiles, p.splits), 256, 0, stream>>>(p);
  else if (row_tiles(p.rows) == 2)
    plain_kernel<2, true><<<dim3(tiles, p.splits), 256, 0, stream>>>(p);
  else
    plain_kernel<1, true><<<dim3(tiles, p.splits), 256, 0, stream>>>(p);
  check_launched(name);
}

void plain_linear(const PlainLinearParams& p, cudaStream_t stream) {
  require(p.in > 0 && p.out > 0 && p.rows >= 0, "plain_linear", "in, out above 0 and rows 0 or more",
          {p.in, p.out, p.rows});
  if (p.dtype == DType::F16 && p.in % 8 == 0) {
    require(aligned16({p.weights, p.x}), "plain_linear", "weights and x aligned to 16 bytes",
            {static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.weights) % 16),
             static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.x) % 16)});
    const PlainPlan plan = plain_plan(p.in, p.out);
    PlainLaunch l;
    l.matrix[0] = {static_cast<const __half*>(p.weights), p.bias, p.y, p.out, Finish::None};
    l.tiles = plain_counters(p.in, p.out);
    l.x = p.x, l.rows = p.rows, l.in = p.in;
    l.units = static_cast<int>(plan.units), l.slice_units = static_cast<int>(plan.slice_units);
    l.splits = static_cast<int>(plan.splits);
    l.partials = p.work.partials, l.counters = p.work.counters;
    return launch_plain(l, "plain_linear", stream);
  }
  require(p.dtype == DType::F16 || p.dtype == DType::BF16 || p.dtype == DType::F32, "plain_linear",
          "F16, BF16 or F32 weights (bytes of an element)", {static_cast<int64_t>(dtype_size(p.dtype))});
  if (p.rows == 0) return;
  const dim3 grid(blocks_of(p.out, 8), blocks_of(p.rows, 4));
  if (p.dtype == DType::F16)
    plain_fma_kernel<__half><<<grid, 256, 0, stream>>>(p);
  else if (p.dtype == DType::BF16)
    plain_fma_kernel<__nv_bfloat16><<<grid, 256, 0, stream>>>(p);
  else
    plain_fma_kernel<float><<<grid, 256, 0, stream>>>(p);
  check_launched("plain_linear");
}

}  // namespace fnx::cuda
