#include "kernels/cuda/plain_linear.h"

#include <cuda_bf16.h>

#include <algorithm>

#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

namespace {

template <int kRows>
__device__ __forceinline__ void put_cells(float* cells, const float (&acc)[kRows / 8][4]) {
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
#pragma unroll
  for (int n = 0; n < kRows / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) cells[(8 * n + 2 * t + i % 2) * kTileOut + g + i / 2 * 8] = acc[n][i];
}

template <int kCells>
__device__ __forceinline__ float add_slices(const float (&cells)[kTileSlices][kCells], int cell) {
  float sum = cells[0][cell];
#pragma unroll
  for (int s = 1; s < kTileSlices; ++s) sum += cells[s][cell];
  return sum;
}

// Counts a block in and returns how many came before; what they wrote before it is then visible here.
__device__ __forceinline__ uint32_t arrive(uint32_t* counter) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

// blockIdx: tile of 16 outputs, split. The last block of a tile to finish adds the splits.
template <int kRowTiles, int kAhead>
__global__ void __launch_bounds__(256) plain_few_kernel(PlainLaunch p) {
  constexpr int kRows = 8 * kRowTiles, kCells = kTileOut * kRows, kEach = (kCells + 255) / 256;
  __shared__ float cells[kTileSlices][kCells];
  __shared__ bool last;
  const bool second = blockIdx.x >= p.tiles;
  const PlainMatrix& m = p.matrix[second];
  const int64_t first_out = (blockIdx.x - (second ? p.tiles : 0)) * kTileOut;
  const int warp = threadIdx.x / 32, from = (blockIdx.y * kTileSlices + warp) * p.slice_units;
  float acc[1][kRowTiles][4] = {};
  mma_chain_few<kRowTiles, kAhead>(
      {m.w, p.x, p.in, first_out, m.out, 0, p.rows, from, min(from + p.slice_units, p.units)}, acc,
      [&] { p.beside ? let_next_start() : wait_previous(); });
  put_cells<kRows>(cells[warp], acc[0]);
  __syncthreads();
  float total[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e)
    if (e * 256 + threadIdx.x < kCells) total[e] = add_slices(cells, e * 256 + threadIdx.x);
  if (p.splits > 1) {
    float* mine = p.partials + (int64_t{blockIdx.x} * p.splits) * kCells;
#pragma unroll
    for (int e = 0; e < kEach; ++e)
      if (e * 256 + threadIdx.x < kCells) __stcg(mine + blockIdx.y * kCells + e * 256 + threadIdx.x, total[e]);
    __syncthreads();
    if (threadIdx.x == 0) {
      last = arrive(p.counters + blockIdx.x) == static_cast<uint32_t>(p.splits - 1);
      if (last) p.counters[blockIdx.x] = 0;
    }
    __syncthreads();
    if (!last) return;
    constexpr int kBatch = 10;  // splits in flight
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      const int cell = e * 256 + threadIdx.x;
      if (cell >= kCells) break;
      for (int s0 = 0; s0 < p.splits; s0 += kBatch) {
        float v[kBatch];
#pragma unroll
        for (int s = 0; s < kBatch; ++s) v[s] = s0 + s < p.splits ? __ldcg(mine + (s0 + s) * kCells + cell) : 0.0f;
#pragma unroll
        for (int s = 0; s < kBatch; ++s)
          if (s0 + s < p.splits) total[e] = s0 + s == 0 ? v[s] : total[e] + v[s];
      }
    }
  }
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int cell = e * 256 + threadIdx.x;
    if (cell < kCells) put_output(p, m, cell / kTileOut, first_out + cell % kTileOut, total[e]);
  }
  // Whoever waits for this launch waits for those before it too.
  if (p.beside && blockIdx.x == 0) wait_previous();
}

template <class T>
__device__ __forceinline__ float to_float(T v) {
  return static_cast<float>(v);
}

// One warp an output, four rows at a time, each row a chain of its own.
template <class T>
__global__ void __launch_bounds__(256) plain_fma_kernel(PlainLinearParams p) {
  wait_previous();
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

int64_t plain_partials(int64_t rows, int64_t in, int64_t out) { return plain_pair_partials(rows, in, out, 0); }

int64_t plain_pair_partials(int64_t rows, int64_t in, int64_t out_a, int64_t out_b) {
  const int64_t tiles = plain_counters(in, out_a) + plain_counters(in, out_b), splits = plain_plan(in, out_a).splits;
  const int64_t few = tiles * splits * kTileOut * 8 * row_tiles(rows);
  return rows > kSpreadRows ? std::max(few, plain_tile_partials(rows, tiles, splits)) : few;
}

PlainLaunch plain_launch(int64_t in, int64_t out, const float* x, int64_t rows, const PlainWorkspace& work) {
  const PlainPlan plan = plain_plan(in, out);
  PlainLaunch l;
  l.tiles = plain_counters(in, out);
  l.x = x, l.rows = rows, l.in = in;
  l.units = static_cast<int>(plan.units), l.slice_units = static_cast<int>(plan.slice_units);
  l.splits = static_cast<int>(plan.splits);
  l.partials = work.partials, l.counters = work.counters;
  return l;
}

void launch_plain(const PlainLaunch& p, const char* name, cudaStream_t stream) {
  if (p.rows == 0) return;
  if (p.rows > kSpreadRows) return launch_plain_tile(p, name, stream);
  const auto tiles_of = [](const PlainMatrix& m) { return m.w != nullptr ? blocks_of(m.out, kTileOut) : 0; };
  const dim3 few(tiles_of(p.matrix[0]) + tiles_of(p.matrix[1]), static_cast<unsigned>(p.splits));
  if (row_tiles(p.rows) == 8)
    launch(name, plain_few_kernel<8, 1>, few, 256, 0, stream, p);
  else if (row_tiles(p.rows) == 2)
    launch(name, plain_few_kernel<2, 5>, few, 256, 0, stream, p);
  else if (p.slice_units <= 2)
    launch(name, plain_few_kernel<1, 2>, few, 256, 0, stream, p);
  else
    launch(name, plain_few_kernel<1, 5>, few, 256, 0, stream, p);
}

bool plain_pairs(const PlainLinearParams& a, const PlainLinearParams& b) {
  return a.dtype == DType::F16 && b.dtype == DType::F16 && a.in == b.in && a.in % 8 == 0 && a.x == b.x &&
         a.rows == b.rows;
}

void plain_linear_pair(const PlainLinearParams& a, const PlainLinearParams& b, cudaStream_t stream) {
  require(plain_pairs(a, b) && a.in > 0 && a.out > 0 && b.out > 0 && a.rows >= 0, "plain_linear_pair",
          "two F16 matrices of the same rows, in a multiple of 8 (in, outs, rows)", {a.in, a.out, b.out, a.rows});
  require(aligned16({a.weights, b.weights, a.x}), "plain_linear_pair", "weights and x aligned to 16 bytes (in)",
          {a.in});
  PlainLaunch l = plain_launch(a.in, a.out, a.x, a.rows, a.work);
  l.matrix[0] = {static_cast<const __half*>(a.weights), a.bias, a.y, a.out, Finish::None};
  l.matrix[1] = {static_cast<const __half*>(b.weights), b.bias, b.y, b.out, Finish::None};
  l.beside = a.beside;
  launch_plain(l, "plain_linear_pair", stream);
}

void plain_linear(const PlainLinearParams& p, cudaStream_t stream) {
  require(p.in > 0 && p.out > 0 && p.rows >= 0, "plain_linear", "in, out above 0 and rows 0 or more",
          {p.in, p.out, p.rows});
  if (p.dtype == DType::F16 && p.in % 8 == 0) {
    require(aligned16({p.weights, p.x}), "plain_linear", "weights and x aligned to 16 bytes",
            {static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.weights) % 16),
             static_cast<int64_t>(reinterpret_cast<uintptr_t>(p.x) % 16)});
    PlainLaunch l = plain_launch(p.in, p.out, p.x, p.rows, p.work);
    l.matrix[0] = {static_cast<const __half*>(p.weights), p.bias, p.y, p.out, Finish::None};
    l.beside = p.beside;
    return launch_plain(l, "plain_linear", stream);
  }
  require(p.dtype == DType::F16 || p.dtype == DType::BF16 || p.dtype == DType::F32, "plain_linear",
          "F16, BF16 or F32 weights (bytes of an element)", {static_cast<int64_t>(dtype_size(p.dtype))});
  if (p.rows == 0) return;
  const dim3 grid(blocks_of(p.out, 8), blocks_of(p.rows, 4));
  if (p.dtype == DType::F16)
    launch("plain_linear", plain_fma_kernel<__half>, grid, 256, 0, stream, p);
  else if (p.dtype == DType::BF16)
    launch("plain_linear", plain_fma_kernel<__nv_bfloat16>, grid, 256, 0, stream, p);
  else
    launch("plain_linear", plain_fma_kernel<float>, grid, 256, 0, stream, p);
}

}  // namespace fnx::cuda
