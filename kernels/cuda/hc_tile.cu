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
__device__ __forceinline__ RowHalf staged_halves(const float* tile, int row, int half) {
  const int lane = threadIdx.x % 32, at = row + lane % 16, piece = lane / 16;
  const auto load = [&](uint32_t(&to)[4], int first) {
    load_matrices(to, halves_piece(const_cast<float*>(tile), at, first + piece));
  };
  RowHalf x;
  load(x.hi, half * 2), load(x.lo, 4 + half * 2);
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
  Stage* const stages = stages_in<Stage>(memory);
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
  int left = units;  // that are not on their way
  const auto load = [&](Stage& to) {
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      copy_async16(halves_piece(to.rows, i * kRowStep + tid / kRowChunks, tid % kRowChunks), row_from + row_at[i],
                   i * kRowStep + tid / kRowChunks < rows && left > 0);
#pragma unroll
    for (int i = 0; i < kOutCopies; ++i)
      copy_async16(to.weights + (i * kThreads + tid) * 8, out_from + out_at[i], left > 0);
    copy_commit();
    row_from += kUnit, out_from += kUnit, --left;
  };

  // What a warp multiplies of a unit: of the even groups and then of the odd ones all rows, and two streams' weights at
  // a time. Each is read while the tensor cores take what was read before.
  RowHalf even[kWarpRows], odd[kWarpRows];
  const auto read_rows = [&](const Stage& from, RowHalf(&to)[kWarpRows], int half) {
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m) to[m] = staged_halves(from.rows, warp_row + m * 16, half);
  };
  uint4 w[kStreams][kWarpEights];
  const auto read_weights = [&](const Stage& from, int first) {
#pragma unroll
    for (int s = first; s < first + 2; ++s)
#pragma unroll
      for (int n = 0; n < kWarpEights; ++n) w[s][n] = staged_eight(from.weights, s * kWide + warp_h + n * 8);
  };
  using Sums = float[kStreams][kWarpRows][kWarpEights][4];
  const auto multiply = [&](Sums& sums, const RowHalf(&x)[kWarpRows], int half, int first) {
#pragma unroll
    for (int lo = 0; lo < 2; ++lo)
#pragma unroll
      for (int s = first; s < first + 2; ++s)
#pragma unroll
        for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
          for (int n = 0; n < kWarpEights; ++n) mma_step(sums[s][m][n], x[m], w[s][n], half, lo);
  };

  wait_previous();
#pragma unroll
  for (int i = 0; i < kStages; ++i) load(stages[i]);
  // The block's part of the normed streams, a line of 32 elements each, on its way to the L2.
  const float* normed = p.normed + first_row * kStreams * hidden + first_h;
  for (int i = tid; i < rows * kStreams; i += kThreads) prefetch_line(normed + i * hidden);
  Sums acc[2] = {};
  copy_wait<kStages - 1>();
  __syncthreads();
  read_rows(stages[0], even, 0);
  read_weights(stages[0], 0);
  Stage* stage = stages;
  const auto multiply_unit = [&](Sums& sums) {
    read_rows(*stage, odd, 1);
    read_weights(*stage, 2);
    multiply(sums, even, 0, 0);
    multiply(sums, even, 0, 2);
    // The next unit is there, and this one's stage is free.
    copy_wait<kStages - 2>();
    __syncthreads();
    Stage* next = stage + 1 == stages + kStages ? stages : stage + 1;
    read_rows(*next, even, 0);
    multiply(sums, odd, 1, 0);
    read_weights(*next, 0);
    load(*stage);
    multiply(sums, odd, 1, 2);
    stage = next;
  };
  for (int unit = 0; unit < half; ++unit) multiply_unit(acc[0]);
  for (int unit = half; unit < units; ++unit) multiply_unit(acc[1]);
  copy_wait<0>();
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
