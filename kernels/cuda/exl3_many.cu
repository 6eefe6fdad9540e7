// Tiled product of decoded fragments and rotated rows.
#include "kernels/cuda/exl3_many.cuh"

#include "kernels/cuda/exl3_few.cuh"

namespace fnx::cuda {

namespace {

constexpr int kRows = 128, kStageTiles = 2, kStages = 4;
constexpr int kWeightBytes = 8 * 512, kRowBytes = kRows * 32;  // of one k-tile
constexpr int kTileBytes = kWeightBytes + kRowBytes, kStageBytes = kStageTiles * kTileBytes;
constexpr int kSharedBytes =
    kStages * kStageBytes > kRows* kColumnStride * 4 ? kStages* kStageBytes : kRows* kColumnStride * 4;

__global__ void __launch_bounds__(256, 1) exl3_many_kernel(const ManyArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int column_tile = blockIdx.y * 8;
  const int tiles = static_cast<int>(a.in / 16);
  const int live_rows = static_cast<int>(a.rows - row0 < kRows ? a.rows - row0 : kRows);

  const auto fetch = [&](int stage_tile, int slot) {
    std::byte* to = shared + slot * kStageBytes;
#pragma unroll
    for (int q = 0; q < kStageTiles; ++q) {
      const int64_t k = stage_tile + q;
      if (k < tiles) {
        copy_async16(to + q * kTileBytes + thread * 16, a.weights + (k * a.count + column_tile) * 256 + thread * 8);
        copy_async16(to + q * kTileBytes + kWeightBytes + thread * 16,
                     thread / 2 < live_rows ? a.xh + (k * a.rows + row0) * 16 + thread * 8 : a.xh,
                     thread / 2 < live_rows);
      }
    }
    copy_commit();
  };

  // A warp owns 64 outputs x 32 rows.
  const int wm = warp % 2, wn = warp / 2;
  float acc[4][4][4], total[4][4][4];
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 4; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[m][n][i] = 0.0f, total[m][n][i] = -0.0f;  // -0 + p is p for every p

  uint4 w[2][4];
  uint2 x[2][4];
  const auto load = [&](int slot, int q) {
    const std::byte* tile = shared + slot * kStageBytes + q * kTileBytes;
#pragma unroll
    for (int m = 0; m < 4; ++m) w[q][m] = *reinterpret_cast<const uint4*>(tile + (wm * 4 + m) * 512 + lane * 16);
#pragma unroll
    for (int n = 0; n < 4; ++n)
      x[q][n] = *reinterpret_cast<const uint2*>(tile + kWeightBytes + (wn * 4 + n) * 256 + lane * 8);
  };
  const auto multiply = [&](int q) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t f[4] = {w[q][m].x, w[q][m].y, w[q][m].z, w[q][m].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) mma_16816(acc[m][n], f, x[q][n].x, x[q][n].y);
    }
  };

  // Fragments of a tile are loaded while the tile before is multiplied.
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s * kStageTiles, s);
  copy_wait<kStages - 2>();
  __syncthreads();
  load(0, 0);
  int split = 0, boundary = exl3_split_begin(a.in, a.splits, 1);
  for (int t = 0, slot = 0; t < tiles; t += kStageTiles) {
    load(slot, 1);
    multiply(0);
    copy_wait<kStages - 3>();
    __syncthreads();
    fetch(t + (kStages - 1) * kStageTiles, (slot + kStages - 1) % kStages);
    slot = (slot + 1) % kStages;
    load(slot, 0);
    multiply(1);
    if (t + kStageTiles == boundary) {
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            total[m][n][i] = __fadd_rn(total[m][n][i], acc[m][n][i]);
            acc[m][n][i] = 0.0f;
          }
      boundary = exl3_split_begin(a.in, a.splits, ++split + 1);
    }
  }
  copy_wait<0>();
  __syncthreads();

  float* z = reinterpret_cast<float*>(shared);
#pragma unroll
  for (int m = 0; m < 4; ++m) store_columns<4>(z + wn * 32 * kColumnStride, wm * 64 + m * 16, lane, 32, total[m]);
  __syncthreads();
  const int64_t column = int64_t{a.first + column_tile} * 16;
  for (int r = warp; r < live_rows; r += 8) {
    const float4 sum = *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane);
    const float4 y = output_block(sum, a.svh + column, a.bias ? a.bias + column : nullptr, lane);
    store_output(a.y, a.bf16, (row0 + r) * a.out + column + 4 * lane, y);
  }
}

}  // namespace

void launch_many(const ManyArgs& a, cudaStream_t stream) {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(exl3_many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(allowed, "exl3_many_kernel");
  const dim3 grid(static_cast<unsigned>((a.rows + kRows - 1) / kRows), a.count / 8);
  launch("exl3_many_kernel", exl3_many_kernel, grid, 256, kSharedBytes, false, stream, a);
}

}  // namespace fnx::cuda
