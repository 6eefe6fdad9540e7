// Tiled product of decoded fragments and rotated rows.
#include "kernels/cuda/exl3_many.cuh"

#include "kernels/cuda/exl3_few.cuh"

namespace fnx::cuda {

namespace {

constexpr int kRows = 128, kThreads = 128, kStages = 4;
constexpr int kWeightBytes = 8 * 512, kTileBytes = kWeightBytes + kRows * 32;  // of one k-tile
constexpr int kTotalBytes = kRows * kColumnStride * 4;
constexpr int kSharedBytes = kTotalBytes + kStages * kTileBytes;

// Shared memory: sums of the splits so far as z[row][column], then a ring of k-tiles. A warp owns 64 outputs x 64 rows.
__global__ void __launch_bounds__(kThreads, 2) exl3_many_kernel(const ManyArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  float* z = reinterpret_cast<float*>(shared);
  std::byte* ring = shared + kTotalBytes;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int column_tile = blockIdx.y * 8;
  const int tiles = static_cast<int>(a.in / 16);
  const int live_rows = static_cast<int>(a.rows - row0 < kRows ? a.rows - row0 : kRows);

  const uint16_t* weights = a.weights + int64_t{column_tile} * 256 + thread * 8;
  const uint16_t* rows = a.xh + row0 * 16 + thread * 8;
  int fetched = 0;
  const auto fetch = [&](int slot) {
    if (fetched < tiles) {
      std::byte* to = ring + slot * kTileBytes + thread * 16;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        copy_async16(to + i * 2048, weights + i * 1024);
        const bool live = thread / 2 + i * 64 < live_rows;
        copy_async16(to + kWeightBytes + i * 2048, live ? rows + i * 1024 : a.xh, live);
      }
      weights += int64_t{a.count} * 256, rows += a.rows * 16;
    }
    copy_commit();
    ++fetched;
  };

  const int wm = warp % 2, wn = warp / 2;
  float acc[4][8][4] = {};
  uint4 w[2][4];
  uint2 x[2][8];
  const auto load = [&](int slot, int to) {
    const std::byte* tile = ring + slot * kTileBytes;
#pragma unroll
    for (int m = 0; m < 4; ++m) w[to][m] = *reinterpret_cast<const uint4*>(tile + (wm * 4 + m) * 512 + lane * 16);
#pragma unroll
    for (int n = 0; n < 8; ++n)
      x[to][n] = *reinterpret_cast<const uint2*>(tile + kWeightBytes + (wn * 8 + n) * 256 + lane * 8);
  };
  const auto multiply = [&](int from) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t f[4] = {w[from][m].x, w[from][m].y, w[from][m].z, w[from][m].w};
#pragma unroll
      for (int n = 0; n < 8; ++n) mma_16816(acc[m][n], f, x[from][n].x, x[from][n].y);
    }
  };
  // z += acc, or z = acc for the first split; then acc = 0. Every element belongs to one thread.
  const auto add_split = [&](bool first) {
    float* mine = z + (wn * 64 + lane % 4 * 2) * kColumnStride + wm * 64 + lane / 4;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          float* at = mine + (n * 8 + i % 2) * kColumnStride + m * 16 + i / 2 * 8;
          *at = first ? acc[m][n][i] : __fadd_rn(*at, acc[m][n][i]);
          acc[m][n][i] = 0.0f;
        }
  };

  // Fragments of a tile are loaded while the tile before is multiplied.
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  int slot = 0;
  const auto advance = [&](int to) {
    copy_wait<kStages - 3>();
    __syncthreads();
    fetch((slot + kStages - 1) % kStages);
    slot = (slot + 1) % kStages;
    load(slot, to);
  };
  copy_wait<kStages - 2>();
  __syncthreads();
  load(0, 0);
  int split = 0, boundary = exl3_split_begin(a.in, a.splits, 1);
  for (int t = 0; t < tiles; t += 2) {
    advance(1);
    multiply(0);
    advance(0);
    multiply(1);
    if (t + 2 == boundary) {
      add_split(split == 0);
      boundary = exl3_split_begin(a.in, a.splits, ++split + 1);
    }
  }
  copy_wait<0>();
  __syncthreads();

  const int64_t column = int64_t{a.first + column_tile} * 16;
  const float4 svh = load_half4(a.svh + column + 4 * lane);
  for (int r = warp; r < live_rows; r += kThreads / 32) {
    const float4 sum = *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane);
    const float4 y = output_block(sum, svh, a.bias ? a.bias + column : nullptr, lane);
    store_output(a.y, a.bf16, (row0 + r) * a.out + column + 4 * lane, y);
  }
}

}  // namespace

void launch_many(const ManyArgs& a, cudaStream_t stream) {
  static const cudaError_t allowed =
      cudaFuncSetAttribute(exl3_many_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes);
  check_cuda(allowed, "exl3_many_kernel");
  const dim3 grid(static_cast<unsigned>((a.rows + kRows - 1) / kRows), a.count / 8);
  launch("exl3_many_kernel", exl3_many_kernel, grid, kThreads, kSharedBytes, false, stream, a);
}

}  // namespace fnx::cuda
