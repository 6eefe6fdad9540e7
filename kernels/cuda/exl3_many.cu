// Tiled product of decoded fragments and rotated rows.
#include "kernels/cuda/exl3_many.cuh"

#include "kernels/cuda/exl3_few.cuh"
#include "kernels/cuda/exl3_octet.cuh"

namespace fnx::cuda {

namespace {

constexpr int kRows = 128, kThreads = 128, kStages = 4;
constexpr int kTileBytes = kRows * 32, kStageBytes = 2 * kTileBytes;  // rows of one k-tile; of a pair
constexpr int kTotalBytes = kRows * kColumnStride * 4;  // of the outputs; the sums of the splits take less
constexpr int kSharedBytes = kTotalBytes + kStages * kStageBytes;

// Shared memory: sums of the splits so far as the threads hold them, at last outputs as z[row][column]; then a ring of
// rows of pairs of k-tiles. A warp owns 64 outputs x 64 rows; its weights come straight into registers, four k-tiles
// ahead.
__global__ void __launch_bounds__(kThreads, 2) exl3_many_kernel(const ManyArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  float* z = reinterpret_cast<float*>(shared);
  std::byte* ring = shared + kTotalBytes;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int wm = warp % 2, wn = warp / 2;
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int column_tile = blockIdx.y * 8;
  const int pairs = static_cast<int>(a.in / 32);
  const int live_rows = static_cast<int>(a.rows - row0 < kRows ? a.rows - row0 : kRows);

  const uint16_t* rows = a.xh + row0 * 16 + thread * 8;
  int fetched = 0;
  const auto fetch = [&](int slot) {
    if (fetched < pairs) {
      std::byte* to = ring + slot * kStageBytes + thread * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool live = thread / 2 + i % 2 * 64 < live_rows;
        copy_async16(to + i * 2048, live ? rows + i / 2 * a.rows * 16 + i % 2 * 1024 : a.xh, live);
      }
      rows += a.rows * 32;
    }
    copy_commit();
    ++fetched;
  };

  float acc[4][8][4] = {};
  uint4 w[4][4];
  const uint4* weights = reinterpret_cast<const uint4*>(a.weights) + (column_tile + wm * 4) * 32 + lane;
  const int64_t weights_step = int64_t{a.count} * 32;
  int loaded = 0;
  const auto load = [&](int to) {
    if (loaded < 2 * pairs) {
#pragma unroll
      for (int m = 0; m < 4; ++m) w[to][m] = __ldg(weights + m * 32);
      weights += weights_step;
    }
    ++loaded;
  };
  const auto multiply = [&](int from, const std::byte* tile) {
    uint2 x[8];
#pragma unroll
    for (int n = 0; n < 8; ++n) x[n] = *reinterpret_cast<const uint2*>(tile + (wn * 8 + n) * 256 + lane * 8);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t f[4] = {w[from][m].x, w[from][m].y, w[from][m].z, w[from][m].w};
#pragma unroll
      for (int n = 0; n < 8; ++n) mma_16816(acc[m][n], f, x[n].x, x[n].y);
    }
  };
  float4* totals = reinterpret_cast<float4*>(shared) + thread;
  const auto add_split = [&](bool first, bool last) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float(&sum)[4] = acc[m][n];
        float4& at = totals[(m * 8 + n) * kThreads];
        float4 v = {sum[0], sum[1], sum[2], sum[3]};
        if (!first) v = plus(at, v);
        if (!last) at = v, v = {};
        sum[0] = v.x, sum[1] = v.y, sum[2] = v.z, sum[3] = v.w;
      }
  };

#pragma unroll
  for (int i = 0; i < 4; ++i) load(i);
#pragma unroll
  for (int s = 0; s < kStages - 1; ++s) fetch(s);
  int split = 0, boundary = exl3_split_begin(a.in, a.splits, 1) / 2, slot = 0;
  const auto pair = [&](int p, int buffer) {
    copy_wait<kStages - 2>();
    __syncthreads();
    fetch((slot + kStages - 1) % kStages);
    const std::byte* tile = ring + slot * kStageBytes;
    multiply(buffer, tile);
    load(buffer);
    multiply(buffer + 1, tile + kTileBytes);
    load(buffer + 1);
    slot = (slot + 1) % kStages;
    if (p + 1 == boundary) {
      add_split(split == 0, p + 1 == pairs);
      boundary = exl3_split_begin(a.in, a.splits, ++split + 1) / 2;
    }
  };
  // in is a multiple of 128: pairs come in fours.
  for (int p = 0; p < pairs; p += 2) {
    pair(p, 0);
    pair(p + 1, 2);
  }
  copy_wait<0>();
  __syncthreads();
  float* mine = z + (wn * 64 + lane % 4 * 2) * kColumnStride + wm * 64 + lane / 4;
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n) store_sums(mine + n * 8 * kColumnStride + m * 16, acc[m][n]);
  __syncthreads();

  const int64_t column = int64_t{a.first + column_tile} * 16;
#pragma unroll 1
  for (int r = warp * 8; r < live_rows; r += kThreads / 4) {
    Octet v;
    load_octet(v, z, kColumnStride, r, lane);
    hadamard_octet(v, lane);
    scale_octet(v, a.svh + column, lane);
    if (r + lane / 4 >= live_rows) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t at = column + 16 * i + lane % 4 * 4;
      if (a.bias != nullptr) v[i] = plus(v[i], *reinterpret_cast<const float4*>(a.bias + at));
      store_output(a.y, a.bf16, (row0 + r + lane / 4) * a.out + at, v[i]);
    }
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
