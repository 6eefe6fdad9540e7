#include "kernels/cuda/hc_tile.h"

#include "kernels/cuda/plain_tile.cuh"

namespace fnx::cuda {

namespace {

constexpr int kStreams = 4, kWide = 32;        // elements of H of a block, 16 a warp
constexpr int kWarpRows = 2, kWarpEights = 2;  // of a warp: tiles of 16 rows, eights of H
constexpr int kRowWarps = 2, kThreads = 64 * kRowWarps, kRows = kRowWarps * kWarpRows * 16, kStages = 3;

struct Stage {
  float rows[kRows * kUnit];
  __half weights[kStreams * kWide * kUnit];
};

// A unit of rows lies as [row][8 pieces of 16 bytes], a row's pieces in an order of its own, so that eight rows' pieces
// of one number lie in different banks.
__device__ __forceinline__ float* halves_piece(float* tile, int row, int piece) {
  return tile + row * kUnit + (piece ^ (row & 7)) * 4;
}

// Sixteen rows as Finish::SiluMeanHalves leaves them, as the first operand: rows g and g + 8 of the tile.
__device__ __forceinline__ RowPair staged_halves(const float* tile, int row) {
  const int lane = threadIdx.x % 32, at = row + lane % 16, piece = lane / 16;
  const auto load = [&](uint32_t(&to)[4], int first) {
    load_matrices(to, halves_piece(const_cast<float*>(tile), at, first + piece));
  };
  RowPair x;
  load(x.hi[0], 0), load(x.hi[1], 2), load(x.lo[0], 4), load(x.lo[1], 6);
  return x;
}

// The bits of sigmoid where 1 + expf(-x) is below 2^126, which x >= -87 ensures: the quotient's own steps, without its
// branch for numbers beyond.
__device__ __forceinline__ float sigmoid_in_range(float x) {
  const float d = 1.0f + expf(-x);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return fmaf(r, -fmaf(d, r, -1.0f), r);
}

// blockIdx: 32 elements of H, 64 rows. A warp has all streams of its 16 elements and 32 rows, so that it sums the
// streams from registers. Rows beyond the last count as zero, elements of H repeat the last one; nobody reads their
// sums.
__global__ void __launch_bounds__(kThreads, 2) hc_up_tile_kernel(HcMixParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* stages = reinterpret_cast<Stage*>(memory);
  const int tid = threadIdx.x, warp = tid / 32, g = tid % 32 / 4, t = tid % 4;
  const int warp_h = warp % 2 * kTileOut, warp_row = warp / 2 * kWarpRows * 16;
  const int hidden = static_cast<int>(p.hidden), rank = static_cast<int>(p.rank), first_h = blockIdx.x * kWide;
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const int units = rank / kUnit, half = (units + 1) / 2;
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{kRows}));

  // This thread's pieces of 16 bytes of a unit of rows and of weights.
  constexpr int kRowCopies = kRows * kRowChunks / kThreads, kRowStep = kThreads / kRowChunks;
  constexpr int kOutCopies = kStreams * kWide * kWeightChunks / kThreads, kOutStep = kThreads / kWeightChunks;
  const float* row_from = p.low + first_row * rank;
  const __half* out_from = static_cast<const __half*>(p.up);
  int row_at[kRowCopies], out_at[kOutCopies];
#pragma unroll
  for (int i = 0; i < kRowCopies; ++i)
    row_at[i] = min(i * kRowStep + tid / kRowChunks, rows - 1) * rank + tid % kRowChunks * 4;
#pragma unroll
  for (int i = 0; i < kOutCopies; ++i) {
    const int at = i * kOutStep + tid / kWeightChunks;
    out_at[i] = (at / kWide * hidden + min(first_h + at % kWide, hidden - 1)) * rank + tid % kWeightChunks * 8;
  }
  int loaded = 0, to = 0;  // units on their way, and the stage that takes the next
  const auto load = [&] {
    if (loaded < units) {
      Stage& stage = stages[to];
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i)
        copy_async16(halves_piece(stage.rows, i * kRowStep + tid / kRowChunks, tid % kRowChunks), row_from + row_at[i],
                     i * kRowStep + tid / kRowChunks < rows);
#pragma unroll
      for (int i = 0; i < kOutCopies; ++i) copy_async16(stage.weights + (i * kThreads + tid) * 8, out_from + out_at[i]);
      row_from += kUnit, out_from += kUnit;
    }
    copy_commit();
    ++loaded, to = to + 1 == kStages ? 0 : to + 1;
  };
  wait_previous();
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) load();
  // The block's part of the normed streams, a line of 32 elements each, on its way to the L2.
  const float* normed = p.normed + first_row * kStreams * hidden + first_h;
  for (int i = tid; i < rows * kStreams; i += kThreads) prefetch_line(normed + i * hidden);
  using Sums = float[kStreams][kWarpRows][kWarpEights][4];
  Sums acc[2] = {};
  int stage = 0;
  const auto multiply = [&](Sums& sums) {
    copy_wait<kStages - 2>();
    __syncthreads();
    load();
    const Stage& from = stages[stage];
    stage = stage + 1 == kStages ? 0 : stage + 1;
    RowPair x[kWarpRows];
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m) x[m] = staged_halves(from.rows, warp_row + m * 16);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      uint4 w[kWarpEights];
#pragma unroll
      for (int n = 0; n < kWarpEights; ++n) w[n] = staged_eight(from.weights, s * kWide + warp_h + n * 8);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
          for (int n = 0; n < kWarpEights; ++n) mma_step(sums[s][m][n], x[m], w[n], i);
    }
  };
  for (int unit = 0; unit < half; ++unit) multiply(acc[0]);
  for (int unit = half; unit < units; ++unit) multiply(acc[1]);
  // The mixes take the place of the first chain's sums.
  bool in_range = true;
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
      for (int n = 0; n < kWarpEights; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float& mix = acc[0][s][m][n][i];
          mix += acc[1][s][m][n][i];
          in_range = in_range && mix >= -87.0f;
        }
  const auto finish = [&](auto gate) {
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        const int row = warp_row + m * 16 + g + i * 4;
        const float* from = normed + min(row, rows - 1) * kStreams * hidden;
        float2 x[kWarpEights][kStreams];
#pragma unroll
        for (int n = 0; n < kWarpEights; ++n) {
          const int h = min(warp_h + n * 8 + 2 * t, hidden - first_h - 2);
#pragma unroll
          for (int s = 0; s < kStreams; ++s) x[n][s] = __ldg(reinterpret_cast<const float2*>(from + s * hidden + h));
        }
#pragma unroll
        for (int n = 0; n < kWarpEights; ++n) {
          float2 sum = make_float2(__fmul_rn(gate(acc[0][0][m][n][i]), x[n][0].x),
                                   __fmul_rn(gate(acc[0][0][m][n][i + 1]), x[n][0].y));
#pragma unroll
          for (int s = 1; s < kStreams; ++s) {
            sum.x = __fadd_rn(sum.x, __fmul_rn(gate(acc[0][s][m][n][i]), x[n][s].x));
            sum.y = __fadd_rn(sum.y, __fmul_rn(gate(acc[0][s][m][n][i + 1]), x[n][s].y));
          }
          const int h = first_h + warp_h + n * 8 + 2 * t;
          if (row < rows && h < hidden)
            *reinterpret_cast<float2*>(p.u + (first_row + row) * hidden + h) =
                make_float2(sum.x * (1.0f / kStreams), sum.y * (1.0f / kStreams));
        }
      }
  };
  if (__all_sync(kFullWarp, in_range))
    finish([](float x) { return sigmoid_in_range(x); });
  else
    finish([](float x) { return sigmoid(x); });
}

}  // namespace

bool hc_tile_takes(const HcMixParams& p) { return p.rows > 16 && p.streams == kStreams && p.rank % kUnit == 0; }

void hc_up_tile(const HcMixParams& p, cudaStream_t stream) {
  constexpr int kBytes = kStages * sizeof(Stage);
  check_cuda(cudaFuncSetAttribute(hc_up_tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "hc_up");
  launch("hc_up", hc_up_tile_kernel, dim3(blocks_of(p.hidden, kWide), blocks_of(p.rows, kRows)), kThreads, kBytes,
         stream, p);
}

}  // namespace fnx::cuda
