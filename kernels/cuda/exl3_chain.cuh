// One warp's mma chain over a column of trellis tiles: tiles stream through a ring in shared memory that is the warp's
// own, so that a block needs no barrier until its warps are done.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/exl3_decode.cuh"

namespace fnx::cuda {

// Rows: 1, or 8, 16 or 32 activation rows. They lie in shared memory as [tile][Rows][16] fp16, each 16 in the order of
// exl3_rotated_index; rows that nobody wrote spoil their own sums only. Deep: long stages, for copies that begin long
// before the rows are there.
template <exl3::Codebook Book, int HalfBits, int Rows, bool Deep = false>
class TileChain {
 public:
  static constexpr int kGroups = Rows == 1 ? 1 : Rows / 8;  // columns of the product in eights
  static constexpr int kRowBytes = Rows * 32;               // of one tile
  static constexpr int kDepth = Deep && HalfBits <= 8 ? 16 : HalfBits <= 12 ? 8 : 4;  // tiles a stage
  static constexpr int kStages = HalfBits > 12 ? 3 : Rows > 1 || kDepth > 8 || HalfBits > 10 ? 2 : HalfBits > 8 ? 3 : 4;
  static constexpr int kTileBytes = 16 * HalfBits, kStageBytes = kDepth * kTileBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kEarly = Rows == 1 ? 2 : 0;  // tiles that decode_early keeps in registers
  using Sums = float[kGroups][4];

  // Tiles lie `stride` tiles apart from `trellis`; copies begin at once.
  __device__ __forceinline__ TileChain(std::byte* ring, const uint16_t* trellis, int64_t stride, int tiles, int lane)
      : ring_(ring), stage_(ring), tiles_(tiles), lane_(lane), bits_(lane) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = r * 32 + lane;
      offset_[r] = chunk / HalfBits * static_cast<int>(stride) * kTileBytes + chunk % HalfBits * 16;
    }
    source_ = reinterpret_cast<const std::byte*>(trellis);
    step_ = kDepth * static_cast<int>(stride) * kTileBytes;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch();
  }

  // Decodes the first tiles before their rows are known; at most once, before the first run.
  __device__ __forceinline__ void decode_early() {
    if constexpr (kEarly > 0) {
      next_stage();
#pragma unroll
      for (int q = 0; q < kEarly; ++q)
        if (q < tiles_)
          decode_tile<Book, HalfBits>(reinterpret_cast<const uint32_t*>(stage_ + q * kTileBytes), bits_, early_[q]);
      waiting_ = true;
    }
  }

  // acc[g] += the next `tiles` tiles x their rows at `x`. tiles is even, and a multiple of kDepth in all calls but the
  // last.
  __device__ __forceinline__ void run(const std::byte* x, int tiles, Sums& acc) {
    x += (Rows == 1 ? lane_ % 4 : lane_) * 8;
    for (int left = tiles; left > 0; left -= kDepth) {
      const int count = min(left, kDepth);
      int q = 0;
      if (kEarly > 0 && waiting_) {
        waiting_ = false;
#pragma unroll
        for (int e = 0; e < kEarly; ++e)
          if (e < count) multiply(early_[e], x + e * kRowBytes, acc);
        q = kEarly;
      } else {
        next_stage();
      }
#pragma unroll 1
      for (; kDepth >= 8 && q + 8 <= count; q += 8) tiles_at<8>(q, x, acc);
      if (q + 4 <= count) tiles_at<4>(q, x, acc), q += 4;
      if (q < count) tiles_at<2>(q, x, acc);
      x += kDepth * kRowBytes;
      stage_ = stage_ + kStageBytes == ring_ + kRingBytes ? ring_ : stage_ + kStageBytes;
    }
  }

 private:
  static constexpr int kChunks = kDepth * HalfBits, kRounds = (kChunks + 31) / 32;

  __device__ __forceinline__ void fetch() {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = r * 32 + lane_;
      if ((kChunks % 32 == 0 || chunk < kChunks) && fetched_ + chunk / HalfBits < tiles_)
        copy_async16(ring_ + to_ + chunk * 16, source_ + offset_[r]);
    }
    source_ += step_;
    copy_commit();
    fetched_ += kDepth;
    to_ = to_ + kStageBytes == kRingBytes ? 0 : to_ + kStageBytes;
  }

  // The stage at stage_ is there; the one before it is free again.
  __device__ __forceinline__ void next_stage() {
    copy_wait<kStages - 2>();
    __syncwarp();
    fetch();
  }

  __device__ __forceinline__ void multiply(const uint32_t (&a)[4], const std::byte* x, Sums& acc) {
#pragma unroll
    for (int g = 0; g < kGroups; ++g) {
      const uint2 b = *reinterpret_cast<const uint2*>(x + g * 256);
      mma_16816(acc[g], a, b.x, b.y);
    }
  }

  template <int Tiles>
  __device__ __forceinline__ void tiles_at(int first, const std::byte* x, Sums& acc) {
    const std::byte* tile = stage_ + first * kTileBytes;
    x += first * kRowBytes;
#pragma unroll
    for (int q = 0; q < Tiles; ++q) {
      uint32_t a[4];
      decode_tile<Book, HalfBits>(reinterpret_cast<const uint32_t*>(tile + q * kTileBytes), bits_, a);
      multiply(a, x + q * kRowBytes, acc);
    }
  }

  std::byte *ring_, *stage_;
  const std::byte* source_;
  int offset_[kRounds], step_, tiles_, lane_, fetched_ = 0, to_ = 0;
  LaneBits<HalfBits> bits_;
  bool waiting_ = false;
  uint32_t early_[kEarly > 0 ? kEarly : 1][4];
};

// Tiles whose rows lie in shared memory at a time; a multiple of every kDepth.
template <int Rows>
inline constexpr int kChunkTiles = Rows == 1    ? 160
                                   : Rows <= 16 ? 32
                                                : 16;
template <int Rows>
inline constexpr int kChunkBytes = kChunkTiles<Rows>* Rows * 32;

// Copies rows of tiles [first, first + tiles) of a rotated array of `stride` rows into shared memory; rows from `rows`
// on are left alone.
template <int Rows, int Threads>
__device__ __forceinline__ void load_rows(std::byte* shared, const uint16_t* xh, int64_t stride, int rows, int first,
                                          int tiles) {
  const auto copy = [&](int tile, int piece) {  // of 16 bytes, two a row
    reinterpret_cast<uint4*>(shared)[tile * Rows * 2 + piece] =
        *reinterpret_cast<const uint4*>(xh + (first + tile) * stride * 16 + piece * 8);
  };
  if constexpr (Rows == 1) {
#pragma unroll 1
    for (int i = threadIdx.x; i < 2 * tiles; i += Threads) copy(i / 2, i % 2);
  } else {
    for (int piece = threadIdx.x % 32; piece < 2 * rows; piece += 32)
#pragma unroll(Rows > 16 ? 2 : 4)
      for (int tile = threadIdx.x / 32; tile < tiles; tile += Threads / 32) copy(tile, piece);
  }
}

// Calls f.template operator()<HalfBits>() for a width that the codebook has.
#pragma nv_exec_check_disable
template <exl3::Codebook Book, class F>
__host__ __device__ __forceinline__ void with_width(int half_bits, F&& f) {
  switch (half_bits) {
    case 2:
      return f.template operator()<2>();
    case 4:
      return f.template operator()<4>();
    case 6:
      return f.template operator()<6>();
    case 8:
      return f.template operator()<8>();
    case 10:
      return f.template operator()<10>();
    case 12:
      return f.template operator()<12>();
    case 14:
      return f.template operator()<14>();
    case 16:
      return f.template operator()<16>();
  }
  if constexpr (Book == exl3::Codebook::Mul1) switch (half_bits) {
      case 3:
        return f.template operator()<3>();
      case 5:
        return f.template operator()<5>();
      case 7:
        return f.template operator()<7>();
    }
}

}  // namespace fnx::cuda
