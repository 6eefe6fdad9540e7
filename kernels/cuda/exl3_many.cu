// Tiled product of decoded fragments and rotated rows.
#include "kernels/cuda/exl3_many.cuh"

#include "kernels/cuda/exl3_few.cuh"
#include "kernels/cuda/exl3_octet.cuh"

namespace fnx::cuda {

namespace {

constexpr int kRows = 128, kThreads = 128, kStages = 4;
constexpr int kTileBytes = kRows * 32, kStageBytes = 2 * kTileBytes;  // rows of one k-tile; of a pair
constexpr int kSharedBytes = kStages * kStageBytes + kRows * 128 * 4;
static_assert(kSharedBytes >= kRows * kColumnStride * 4);

// Shared memory: a ring of rows of pairs of k-tiles, then the sums of the splits so far as the threads hold them; at
// the end z[row][column]. A warp owns 64 outputs x 64 rows; its weights come straight into registers, four k-tiles
// ahead.
__global__ void __launch_bounds__(kThreads, 2) exl3_many_kernel(const ManyArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int wm = warp % 2, wn = warp / 2;
  const int64_t row0 = int64_t{blockIdx.x} * kRows;
  const int column_tile = blockIdx.y * 8;
  const int pairs = static_cast<int>(a.in / 32);
  const int live_rows = static_cast<int>(a.rows - row0 < kRows ? a.rows - row0 : kRows);

  const uint16_t* rows = a.xh + row0 * 16 + thread * 8;
  int fetched = 0;
  // The next pair; rows that nobody wrote spoil their own sums only.
  const auto fetch = [&] {
    if (fetched < pairs) {
      std::byte* to = shared + fetched % kStages * kStageBytes + thread * 16;
#pragma unroll
      for (int i = 0; i < 4; ++i)
        if (thread / 2 + i % 2 * 64 < live_rows) copy_async16(to + i * 2048, rows + i / 2 * a.rows * 16 + i % 2 * 1024);
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
  const auto load_weights = [&](int to) {
    if (loaded < 2 * pairs) {
#pragma unroll
      for (int m = 0; m < 4; ++m) w[to][m] = __ldg(weights + m * 32);
      weights += weights_step;
    }
    ++loaded;
  };
  // Rows of half a k-tile are loaded while the half before is multiplied.
  uint2 x[2][4];
  const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) + wn * 2048 + lane * 8;
  const auto load_rows = [&](int pair, int half) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint2& to = x[half % 2][n];
      asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];"
                   : "=r"(to.x), "=r"(to.y)
                   : "r"(from + pair % kStages * kStageBytes + half / 2 * kTileBytes + (half % 2 * 4 + n) * 256)
                   : "memory");
    }
  };
  const auto multiply = [&](int tile, int half) {
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const uint32_t f[4] = {w[tile][m].x, w[tile][m].y, w[tile][m].z, w[tile][m].w};
#pragma unroll
      for (int n = 0; n < 4; ++n) mma_16816(acc[m][half * 4 + n], f, x[half][n].x, x[half][n].y);
    }
  };
  const auto add_split = [&](bool first, bool last) {
    float4* mine = reinterpret_cast<float4*>(shared + kStages * kStageBytes) + thread;
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        float4& at = mine[(m * 8 + n) * kThreads];
        float4 sum = {acc[m][n][0], acc[m][n][1], acc[m][n][2], acc[m][n][3]};
        if (!first) sum = plus(at, sum);
        if (!last) at = sum, sum = {};
        acc[m][n][0] = sum.x, acc[m][n][1] = sum.y, acc[m][n][2] = sum.z, acc[m][n][3] = sum.w;
      }
  };

#pragma unroll
  for (int i = 0; i < 4; ++i) load_weights(i);
#pragma unroll
  for (int s = 0; s < kStages; ++s) fetch();
  copy_wait<kStages - 1>();
  __syncthreads();
  load_rows(0, 0);
  int split = 0, boundary = exl3_split_begin(a.in, a.splits, 1) / 2;
  const auto pair = [&](int p, int buffer) {
#pragma unroll
    for (int half = 0; half < 4; ++half) {
      if (half < 3) {
        load_rows(p, half + 1);
      } else {
        // The next pair is there, and all rows of this one are in registers.
        copy_wait<kStages - 2>();
        __syncthreads();
        fetch();
        load_rows(p + 1, 0);
      }
      multiply(buffer + half / 2, half % 2);
      if (half % 2 == 1) load_weights(buffer + half / 2);
    }
    if (p + 1 == boundary) {
      add_split(split == 0, split + 1 == a.splits);
      boundary = exl3_split_begin(a.in, a.splits, ++split + 1) / 2;
    }
  };
  // in is a multiple of 128: pairs come in fours.
#pragma unroll 1
  for (int p = 0; p < pairs; p += 2) {
    pair(p, 0);
    pair(p + 1, 2);
  }
  copy_wait<0>();
  __syncthreads();

  float* z = reinterpret_cast<float*>(shared);
  float* mine = z + (wn * 64 + lane % 4 * 2) * kColumnStride + wm * 64 + lane / 4;
#pragma unroll
  for (int m = 0; m < 4; ++m)
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) mine[(n * 8 + i % 2) * kColumnStride + m * 16 + i / 2 * 8] = acc[m][n][i];
  __syncthreads();
  const int64_t column = int64_t{a.first + column_tile} * 16;
#pragma unroll 1
  for (int r0 = warp * 8; r0 < live_rows; r0 += kThreads / 4) {
    Octet v;
    load_octet(v, z, kColumnStride, r0, lane);
    hadamard_octet(v, lane);
    scale_octet(v, a.svh + column, lane);
    const int row = r0 + lane / 4;
    if (row >= live_rows) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int64_t at = column + 16 * i + lane % 4 * 4;
      const float4 y = a.bias == nullptr ? v[i] : plus(v[i], *reinterpret_cast<const float4*>(a.bias + at));
      store_output(a.y, a.bf16, (row0 + row) * a.out + at, y);
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
