// One warp's mma chain over a column of trellis tiles: tiles stream through a ring in shared memory that is the warp's
// own, so that a block needs no barrier until its warps are done.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/exl3_decode.cuh"

namespace fnx::cuda {

// RowGroups: groups of 8 activation rows. Rows lie in shared memory, [tile][RowGroups * 8][16] fp16 in the order of
// exl3_rotated_index, kRowBytes a tile.
template <exl3::Codebook Book, int HalfBits, int RowGroups>
class TileChain {
 public:
  static constexpr int kRowBytes = RowGroups * 256;
  static constexpr int kDepth = HalfBits <= 12 ? 8 : 4;  // tiles a stage
  static constexpr int kStages = HalfBits <= 6 || HalfBits > 12 ? 3 : 2;
  static constexpr int kTileBytes = 16 * HalfBits, kStageBytes = kDepth * kTileBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;

  // Tiles lie `stride` tiles apart from `trellis`; copies begin at once.
  __device__ __forceinline__ TileChain(std::byte* ring, const uint16_t* trellis, int64_t stride, int tiles, int lane)
      : ring_(ring), stage_(ring), tiles_(tiles), lane_(lane), bits_(lane) {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = r * 32 + lane;
      source_[r] =
          reinterpret_cast<const std::byte*>(trellis) + chunk / HalfBits * stride * kTileBytes + chunk % HalfBits * 16;
    }
    step_ = kDepth * stride * kTileBytes;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch();
  }

  // acc[g] += the next `tiles` tiles x their rows at `x`. tiles is even, and a multiple of kDepth in all calls but the
  // last.
  __device__ __forceinline__ void run(const std::byte* x, int tiles, float (&acc)[RowGroups][4]) {
    x += lane_ * 8;
    for (int left = tiles; left > 0; left -= kDepth) {
      copy_wait<kStages - 2>();
      __syncwarp();
      fetch();
      if (left >= kDepth) {
        multiply<kDepth>(stage_, x, acc);
      } else {
        for (int q = 0; q < left; q += 2) multiply<2>(stage_ + q * kTileBytes, x + q * kRowBytes, acc);
      }
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
        copy_async16(ring_ + to_ + chunk * 16, source_[r]);
      source_[r] += step_;
    }
    copy_commit();
    fetched_ += kDepth;
    to_ = to_ + kStageBytes == kRingBytes ? 0 : to_ + kStageBytes;
  }

  template <int Tiles>
  __device__ __forceinline__ void multiply(const std::byte* stage, const std::byte* x, float (&acc)[RowGroups][4]) {
#pragma unroll
    for (int q = 0; q < Tiles; ++q) {
      uint32_t a[4];
      decode_tile<Book, HalfBits>(reinterpret_cast<const uint32_t*>(stage + q * kTileBytes), bits_, a);
#pragma unroll
      for (int g = 0; g < RowGroups; ++g) {
        const uint2 b = *reinterpret_cast<const uint2*>(x + q * kRowBytes + g * 256);
        mma_16816(acc[g], a, b.x, b.y);
      }
    }
  }

  std::byte *ring_, *stage_;
  const std::byte* source_[kRounds];
  int64_t step_;
  int tiles_, lane_, fetched_ = 0, to_ = 0;
  LaneBits<HalfBits> bits_;
};

// Tiles whose rows lie in shared memory at a time.
template <int RowGroups>
inline constexpr int kChunkTiles = RowGroups <= 2 ? 40 : 16;
template <int RowGroups>
inline constexpr int kChunkBytes = kChunkTiles<RowGroups>* RowGroups * 256;

// Copies rows of tiles [first, first + tiles) of a rotated array of `stride` rows into shared memory; rows from `rows`
// on are zero.
template <int RowGroups, int Threads>
__device__ __forceinline__ void load_rows(std::byte* shared, const uint16_t* xh, int64_t stride, int rows, int first,
                                          int tiles) {
  constexpr int kPieces = RowGroups * 16;  // of 16 bytes a tile
#pragma unroll 4
  for (int i = threadIdx.x; i < tiles * kPieces; i += Threads) {
    const int tile = i / kPieces, piece = i % kPieces;
    uint4 v = {0, 0, 0, 0};
    if (piece / 2 < rows)
      v = *reinterpret_cast<const uint4*>(xh + ((first + tile) * stride + piece / 2) * 16 + piece % 2 * 8);
    reinterpret_cast<uint4*>(shared)[i] = v;
  }
}

// Calls f.template operator()<HalfBits>() for a width that the codebook has.
template <exl3::Codebook Book, class F>
__device__ __forceinline__ void with_width(int half_bits, F&& f) {
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
