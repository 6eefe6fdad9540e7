// Tiles of 128 outputs x up to 16 * Groups rows, for many rows. Each of four warps owns 32 outputs and all rows: it
// decodes its weights into registers, once a tile, and multiplies them with rows that stream through shared memory. The
// sums have the chains and order of kernels/cuda/exl3_linear.h.
#pragma once

#include "kernels/cuda/exl3_few.cuh"

namespace fnx::cuda {

inline constexpr int kTileThreads = 128;

// Blocks of a tile that shall fit on a multiprocessor.
template <int Groups>
inline constexpr int kTileBlocks = Groups > 2 ? 3 : 4;

struct TileWeight {
  const uint16_t* trellis;
  int64_t in, out;
  int half_bits, splits;
};

// Groups is even.
template <exl3::Codebook Book, int Groups>
class RowTile {
 public:
  static constexpr int kRows = 16 * Groups;
  static constexpr int kSharedBytes = 2 * 4 * kRows * 32 + kRows * 128 * 4;
  static_assert(kSharedBytes >= kRows * kColumnStride * 4);

  // z [rows][kColumnStride] at the start of `shared` = rows of the rotated array xh [in/16, stride, 16] times outputs
  // [128 * block, 128 * block + 128); rows at most kRows. Begins and ends with a barrier.
  static __device__ __forceinline__ void multiply(std::byte* shared, const TileWeight& m, int block, const uint16_t* xh,
                                                  int64_t stride, int rows) {
    RowTile tile(shared, m, block, xh, stride, rows);
    __syncthreads();
    tile.run(m.splits);
    __syncthreads();
    tile.store(reinterpret_cast<float*>(shared));
    __syncthreads();
  }

 private:
  // Rows of a stage of four k-tiles; two stages. Then sums of the splits so far, as the threads hold them.
  static constexpr int kStepBytes = kRows * 32, kStageBytes = 4 * kStepBytes;
  static constexpr int kWords = 3;  // of a k-tile's bits that a lane reads
  using Raw = uint32_t[4][kWords];  // two k-tiles x two n-tiles
  using Fragments = uint32_t[4][4];

  __device__ __forceinline__ RowTile(std::byte* shared, const TileWeight& m, int block, const uint16_t* xh,
                                     int64_t stride, int rows)
      : shared_(shared),
        half_bits_(m.half_bits),
        in_(static_cast<int>(m.in)),
        rows_(rows),
        row_step_(static_cast<int>(stride) * 16),
        source_(xh + threadIdx.x * 8) {
    const int warp = threadIdx.x / 32, words = 4 * half_bits_;
    words_step_ = static_cast<int>(m.out) / 16 * words;
    words_ = reinterpret_cast<const uint32_t*>(m.trellis) + (int64_t{block} * 8 + warp * 2) * words;
    with_width<Book>(half_bits_, [&]<int HalfBits>() {
      const LaneBits<HalfBits> bits(threadIdx.x % 32);
#pragma unroll
      for (int i = 0; i < kWords; ++i) word_[i] = i < Width<HalfBits>::kRaw ? bits.word[i] : 0;
      shift_ = bits.shift;
    });
  }

  __device__ __forceinline__ void run(int splits) {
    const int pairs = in_ / 32;
    Raw raw[2];
    with_width<Book>(half_bits_, [&]<int HalfBits>() {
      read<HalfBits>(raw[0]);
      read<HalfBits>(raw[1]);
    });
    fetch(0, true);
    int split = 0, boundary = exl3_split_begin(in_, splits, 1) / 2;
#pragma unroll 1
    for (int p = 0; p < pairs; p += 2) {
      copy_wait<0>();
      __syncthreads();
      fetch(p / 2 + 1, p + 2 < pairs);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Fragments w;
        with_width<Book>(half_bits_, [&]<int HalfBits>() {
          const LaneBits<HalfBits> bits = in_registers<HalfBits>();
#pragma unroll
          for (int i = 0; i < 4; ++i) decode_tile<Book, HalfBits>(raw[half][i], bits, w[i]);
          if (p + 2 < pairs) read<HalfBits>(raw[half]);
        });
        multiply(shared_ + p / 2 % 2 * kStageBytes + half * 2 * kStepBytes, w);
        if (p + half + 1 == boundary) {
          add_split(split == 0, split + 1 == splits);
          boundary = exl3_split_begin(in_, splits, ++split + 1) / 2;
        }
      }
    }
  }

  // Words that lie in the order in which they are read.
  template <int HalfBits>
  __device__ __forceinline__ LaneBits<HalfBits> in_registers() const {
    LaneBits<HalfBits> bits(0);
#pragma unroll
    for (int i = 0; i < Width<HalfBits>::kRaw; ++i) bits.word[i] = i;
    bits.shift = shift_;
    return bits;
  }

  // Bits of the next two k-tiles.
  template <int HalfBits>
  __device__ __forceinline__ void read(Raw& raw) {
#pragma unroll
    for (int t = 0; t < 2; ++t, words_ += words_step_)
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int i = 0; i < Width<HalfBits>::kRaw; ++i) raw[t * 2 + m][i] = __ldg(words_ + m * 4 * HalfBits + word_[i]);
  }

  // Rows of the next stage. Rows that nobody wrote spoil their own sums only.
  __device__ __forceinline__ void fetch(int stage, bool more) {
    if (more) {
      std::byte* to = shared_ + stage % 2 * kStageBytes + threadIdx.x * 16;
#pragma unroll
      for (int t = 0; t < 4; ++t, source_ += row_step_)
#pragma unroll
        for (int r = 0; r < kRows; r += 64)
          if (static_cast<int>(threadIdx.x) / 2 + r < rows_)
            copy_async16(to + t * kStepBytes + r * 32, source_ + r * 16);
    }
    copy_commit();
  }

  // Sums += two k-tiles. Rows of one k-tile and 32 rows are loaded while the ones before are multiplied: volatile, or
  // the loads would sink below the branch that ends a run of few rows.
  __device__ __forceinline__ void multiply(const std::byte* steps, const Fragments& w) {
    const auto from = static_cast<uint32_t>(__cvta_generic_to_shared(steps)) + threadIdx.x % 32 * 8;
    uint2 x[2][4];
    const auto load = [&](int u) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        uint2& to = x[u % 2][n];
        asm volatile("ld.volatile.shared.v2.u32 {%0, %1}, [%2];"
                     : "=r"(to.x), "=r"(to.y)
                     : "r"(from + u % 2 * kStepBytes + (u / 2 * 4 + n) * 256)
                     : "memory");
      }
    };
    load(0);
#pragma unroll
    for (int u = 0; u < Groups; ++u) {
      if (u > 0 && u % 2 == 0 && u * 16 >= rows_) break;
      if (u + 1 < Groups) load(u + 1);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n == 2 && u / 2 * 32 + 16 >= rows_) break;
#pragma unroll
        for (int m = 0; m < 2; ++m)
          mma_16816(acc_[u / 2 * 2 + n / 2][n % 2][m], w[u % 2 * 2 + m], x[u % 2][n].x, x[u % 2][n].y);
      }
    }
  }

  // The sums of the splits so far: what this thread left in shared memory plus its sums.
  __device__ __forceinline__ void add_split(bool first, bool last) {
    float4* mine = reinterpret_cast<float4*>(shared_ + 2 * kStageBytes) + threadIdx.x;
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      if (g > 0 && g % 2 == 0 && g * 16 >= rows_) break;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float(&acc)[4] = acc_[g][i / 2][i % 2];
        float4& at = mine[(g * 4 + i) * kTileThreads];
        float4 sum = {acc[0], acc[1], acc[2], acc[3]};
        if (!first) sum = plus(at, sum);
        if (!last) at = sum;
        acc[0] = last ? sum.x : 0.0f, acc[1] = last ? sum.y : 0.0f;
        acc[2] = last ? sum.z : 0.0f, acc[3] = last ? sum.w : 0.0f;
      }
    }
  }

  __device__ __forceinline__ void store(float* z) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* mine = z + lane % 4 * 2 * kColumnStride + warp * 32 + lane / 4;
#pragma unroll
    for (int g = 0; g < Groups; ++g) {
      if (g > 0 && g % 2 == 0 && g * 16 >= rows_) break;
#pragma unroll
      for (int n = 0; n < 2; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) store_sums(mine + (g * 16 + n * 8) * kColumnStride + m * 16, acc_[g][n][m]);
    }
  }

  std::byte* shared_;
  int half_bits_, in_, rows_, row_step_, words_step_;
  const uint16_t* source_;
  const uint32_t* words_;
  int word_[kWords], shift_;
  float acc_[Groups][2][2][4] = {};
};

}  // namespace fnx::cuda
