#include "kernels/cuda/hc_tile.h"

#include "kernels/cuda/plain_tile.cuh"

namespace fnx::cuda {

namespace {

constexpr int kStreams = 4, kWide = 32;  // elements of H of a block, 16 a warp
constexpr int kWarpRows = 4;             // row tiles of a warp

constexpr int kRowWarps = 2, kThreads = 64 * kRowWarps, kRows = kRowWarps * kWarpRows * 8, kStages = 3;

struct Stage {
  float rows[kRows * kUnit];
  __half weights[kStreams * kWide * kUnit];
};

// The bits of sigmoid where 1 + expf(-x) is below 2^126, which x >= -87 ensures: the quotient's own steps, without its
// branch for numbers beyond.
__device__ __forceinline__ float sigmoid_in_range(float x) {
  const float d = 1.0f + expf(-x);
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
  return fmaf(r, -fmaf(d, r, -1.0f), r);
}

// blockIdx: 32 elements of H, 64 rows. A warp has all streams of its 16 elements and 32 rows, so that it sums
// the streams from registers.
__global__ void __launch_bounds__(kThreads, 2) hc_up_tile_kernel(HcMixParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  auto* stages = reinterpret_cast<Stage*>(memory);
  const int tid = threadIdx.x, warp = tid / 32, g = tid % 32 / 4, t = tid % 4;
  const int warp_h = warp % 2 * kTileOut, warp_row = warp / 2 * kWarpRows * 8;
  const int hidden = static_cast<int>(p.hidden), rank = static_cast<int>(p.rank), first_h = blockIdx.x * kWide;
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const int units = (rank + kUnit - 1) / kUnit, half = (units + 1) / 2;
  const auto* up = static_cast<const __half*>(p.up);

  // This thread's pieces of 16 bytes of a unit of rows and of weights; null beyond the matrices.
  constexpr int kRowCopies = kRows * kRowChunks / kThreads, kRowStep = kThreads / kRowChunks;
  constexpr int kOutCopies = kStreams * kWide * kWeightChunks / kThreads, kOutStep = kThreads / kWeightChunks;
  const int row_at = tid / kRowChunks, row_piece_of = tid % kRowChunks;
  const int out_at = tid / kWeightChunks, out_piece = tid % kWeightChunks;
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{kRows}));
  const float* row_from = p.low + (first_row + row_at) * rank + row_piece_of * 4;
  const __half* out_from[kOutCopies];
#pragma unroll
  for (int i = 0; i < kOutCopies; ++i) {
    const int at = i * kOutStep + out_at, h = first_h + at % kWide;
    out_from[i] = h < hidden ? up + (int64_t{at / kWide} * hidden + h) * rank + out_piece * 8 : nullptr;
  }
  const auto load = [&](int unit) {
    Stage& to = stages[unit % kStages];
    const int k = unit * kUnit;
    if (unit < units) {
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        const bool here = i * kRowStep + row_at < rows && k + row_piece_of * 4 < rank;
        copy_async16(row_piece(to.rows, i * kRowStep + row_at, row_piece_of),
                     here ? row_from + i * kRowStep * rank + k : p.low, here);
      }
#pragma unroll
      for (int i = 0; i < kOutCopies; ++i) {
        const bool here = out_from[i] != nullptr && k + out_piece * 8 < rank;
        copy_async16(to.weights + (i * kOutStep + out_at) * kUnit + out_piece * 8, here ? out_from[i] + k : up, here);
      }
    }
    copy_commit();
  };
  wait_previous();
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) load(i);
  // The block's part of the normed streams, a line of 32 elements each, on its way to the L2.
  const float* normed = p.normed + first_row * kStreams * hidden + first_h;
  for (int i = tid; i < rows * kStreams; i += kThreads) prefetch_line(normed + i * hidden);
  float acc[2][kStreams][kWarpRows][4] = {};
  const auto multiply = [&](int unit, float(&to)[kStreams][kWarpRows][4]) {
    copy_wait<kStages - 2>();
    __syncthreads();
    load(unit + kStages - 1);
    const Stage& from = stages[unit % kStages];
    RowHalves x[kWarpRows];
#pragma unroll
    for (int n = 0; n < kWarpRows; ++n) x[n] = staged_halves(from.rows, warp_row + n * 8 + g);
#pragma unroll
    for (int s = 0; s < kStreams; ++s) {
      uint4 w[2];
      staged_weights(from.weights, s * kWide + warp_h, w);
#pragma unroll
      for (int i = 0; i < 4; ++i)
#pragma unroll
        for (int n = 0; n < kWarpRows; ++n) mma_step(to[s][n], w, x[n], i);
    }
  };
  for (int unit = 0; unit < half; ++unit) multiply(unit, acc[0]);
  for (int unit = half; unit < units; ++unit) multiply(unit, acc[1]);
  // The mixes take the place of the second chain's sums.
  bool in_range = true;
#pragma unroll
  for (int s = 0; s < kStreams; ++s)
#pragma unroll
    for (int n = 0; n < kWarpRows; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[0][s][n][i] += acc[1][s][n][i];
        in_range = in_range && acc[0][s][n][i] >= -87.0f;
      }
  const auto finish = [&](auto gate) {
#pragma unroll
    for (int n = 0; n < kWarpRows; ++n) {
      float x[kStreams][4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = min(warp_row + n * 8 + 2 * t + i % 2, rows - 1);
        const int h = min(warp_h + g + i / 2 * 8, hidden - first_h - 1);
#pragma unroll
        for (int s = 0; s < kStreams; ++s) x[s][i] = __ldg(normed + (row * kStreams + s) * hidden + h);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float sum = __fmul_rn(gate(acc[0][0][n][i]), x[0][i]);
#pragma unroll
        for (int s = 1; s < kStreams; ++s) sum = __fadd_rn(sum, __fmul_rn(gate(acc[0][s][n][i]), x[s][i]));
        const int row = warp_row + n * 8 + 2 * t + i % 2, h = first_h + warp_h + g + i / 2 * 8;
        if (row < rows && h < hidden) p.u[(first_row + row) * hidden + h] = sum * (1.0f / kStreams);
      }
    }
  };
  if (__all_sync(kFullWarp, in_range))
    finish([](float x) { return sigmoid_in_range(x); });
  else
    finish([](float x) { return sigmoid(x); });
}

}  // namespace

bool hc_tile_takes(const HcMixParams& p) { return p.rows > 16 && p.streams == kStreams; }

void hc_up_tile(const HcMixParams& p, cudaStream_t stream) {
  constexpr int kBytes = kStages * sizeof(Stage);
  check_cuda(cudaFuncSetAttribute(hc_up_tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "hc_up");
  launch("hc_up", hc_up_tile_kernel, dim3(blocks_of(p.hidden, kWide), blocks_of(p.rows, kRows)), kThreads, kBytes,
         stream, p);
}

}  // namespace fnx::cuda
