// The kernels of one codebook and width, for the units exl3_few_*.cu that instantiate them.
#pragma once

#include "kernels/cuda/exl3_few.cuh"
#include "kernels/cuda/exl3_many.cuh"

namespace fnx::cuda {

template <exl3::Codebook Book, int HalfBits, int Rows>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_few_kernel(const FewArgs a) {
  using Chain = TileChain<Book, HalfBits, Rows, Rows == 1>;
  constexpr int kTiles = kChunkTiles<Rows>, kZBytes = Rows * kColumnStride * 4;
  __shared__ __align__(16) std::byte shared[8 * Chain::kRingBytes + kChunkBytes<Rows>];
  std::byte* rows = shared + 8 * Chain::kRingBytes;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, split = blockIdx.y, last = a.splits - 1;
  const int begin = a.begins.at[split], end = a.begins.at[split + 1];
  const int64_t tiles_n = a.out / 16;
  Chain chain(shared + warp * Chain::kRingBytes, a.trellis + (begin * tiles_n + block * 8 + warp) * (8 * HalfBits),
              tiles_n, end - begin, lane);
  // The scales do not depend on the launch before; rows that come rotated need none of suh.
  if (a.x != nullptr && 2 * static_cast<int>(threadIdx.x) < end - begin)
    prefetch_line(a.suh + (begin + 2 * threadIdx.x) * 16);
  if (split == last && threadIdx.x < 2) prefetch_line(a.svh + block * 128 + threadIdx.x * 64);
  chain.decode_early();
  if (!a.beside) wait_for_previous();
  let_next_start();
  typename Chain::Sums acc = {};
  for (int t = begin; t < end; t += kTiles) {
    const int tiles = min(kTiles, end - t);
    if (t != begin) __syncthreads();
    if (a.x != nullptr) {
      rotate_rows<Rows, kFewThreads>(rows, a.x, a.suh, a.in, a.rows, t, tiles);
    } else {
      load_rows<Rows, kFewThreads>(rows, a.xh, a.rows, a.rows, t, tiles);
    }
    __syncthreads();
    chain.run(rows, tiles, acc);
  }
  static_assert(kZBytes <= kChunkBytes<Rows>);
  __syncthreads();
  float* z = reinterpret_cast<float*>(rows);
  store_columns(z, warp * 16, lane, a.rows, acc);
  __syncthreads();
  uint32_t* slots = a.exchange + int64_t{block} * a.rows * last * kSlot + 4 * lane;
  if (split < last) {
    for (int r = warp; r < a.rows; r += 8)
      give4(slots + (r * last + split) * kSlot, *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane));
    return;
  }
  // Of one row four warps take a part each, so that more loads are on their way, and a fifth stores.
  const bool shared_row = Rows == 1 && last > 0;
  if (shared_row) {
    if (warp < 4) {
      z[threadIdx.x] = __fadd_rn(take(slots - 4 * lane + threadIdx.x, last), z[threadIdx.x]);
      asm volatile("bar.arrive 1, 160;" ::: "memory");
    }
    if (warp != 4) return;
  }
  const float4 svh = load_half4(a.svh + block * 128 + 4 * lane);
  if (shared_row) asm volatile("bar.sync 1, 160;" ::: "memory");
#pragma unroll 1
  for (int r = shared_row ? 0 : warp; r < a.rows; r += 8) {
    float4 sum = *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane);
    if (Rows > 1 && last > 0) sum = plus(take4(slots + r * last * kSlot, last), sum);
    const float4 y = output_block(sum, svh, a.bias ? a.bias + block * 128 : nullptr, lane);
    store_output(a.y, a.bf16, r * a.out + block * 128 + 4 * lane, y);
  }
  // Whoever waits for this launch waits for those before it too.
  if (a.beside && block == 0) wait_for_previous();
}

template <exl3::Codebook Book, int HalfBits>
void launch_few(const FewArgs& a, cudaStream_t stream) {
  auto* kernel = a.rows == 1   ? exl3_few_kernel<Book, HalfBits, 1>
                 : a.rows <= 8 ? exl3_few_kernel<Book, HalfBits, 8>
                               : exl3_few_kernel<Book, HalfBits, 16>;
  const dim3 grid(static_cast<unsigned>(a.out / 128), a.splits);
  launch("exl3_few_kernel", kernel, grid, kFewThreads, 0, true, stream, a);
}

template <exl3::Codebook Book, int HalfBits>
__global__ void __launch_bounds__(256) exl3_decode_kernel(const DecodeArgs a) {
  const int lane = threadIdx.x % 32;
  const LaneBits<HalfBits> bits(lane);
  const int64_t warps = int64_t{gridDim.x} * 8, tiles = a.in / 16 * a.count;
  for (int64_t i = int64_t{blockIdx.x} * 8 + threadIdx.x / 32; i < tiles; i += warps) {
    const int64_t k = i / a.count, n = a.first + i % a.count;
    uint32_t f[4];
    decode_tile<Book, HalfBits>(reinterpret_cast<const uint32_t*>(a.trellis + (k * (a.out / 16) + n) * (8 * HalfBits)),
                                bits, f);
    if (a.fragments != nullptr) reinterpret_cast<uint4*>(a.fragments)[i * 32 + lane] = {f[0], f[1], f[2], f[3]};
    if (a.plain != nullptr)
      for (int j = 0; j < 8; ++j) {
        const uint32_t pair = f[(j / 4) + 2 * (j / 2 % 2)];
        const int64_t row = k * 16 + lane % 4 * 2 + j % 2 + j / 2 % 2 * 8, column = n * 16 + lane / 4 + j / 4 * 8;
        a.plain[row * a.out + column] = static_cast<uint16_t>(pair >> (16 * (j % 2)));
      }
  }
}

template <exl3::Codebook Book, int HalfBits>
void launch_decode(const DecodeArgs& a, cudaStream_t stream) {
  const int64_t blocks = (a.in / 16 * a.count + 31) / 32;
  launch("exl3_decode_kernel", exl3_decode_kernel<Book, HalfBits>, dim3(static_cast<unsigned>(blocks)), 256, 0, false,
         stream, a);
}

}  // namespace fnx::cuda
