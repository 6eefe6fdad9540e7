// One warp's mma chain over a column of trellis tiles: tiles stream through a ring in shared memory that is the warp's
// own, so that a block needs no barrier until its warps are done.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/exl3_decode.cuh"

namespace fnx::cuda {

// RowGroups: groups of 8 activation rows.
template <exl3::Codebook Book, int HalfBits, int RowGroups>
class TileChain {
 public:
  static constexpr int kDepth = 4, kStages = 4;  // tiles a stage
  static constexpr int kStageBytes = kDepth * 16 * HalfBits;
  static constexpr int kRingBytes = kStages * kStageBytes;

  // Tiles lie `stride` tiles apart from `trellis`; copies begin at once.
  __device__ TileChain(std::byte* ring, const uint16_t* trellis, int64_t stride, int tiles, int lane)
      : ring_(ring), tiles_(tiles), lane_(lane), bits_(lane) {
    const int64_t tile_bytes = 16 * HalfBits;
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = r * 32 + lane;
      source_[r] = reinterpret_cast<const std::byte*>(trellis) + chunk / HalfBits * stride * tile_bytes +
                   chunk % HalfBits * 16;
    }
    step_ = kDepth * stride * tile_bytes;
#pragma unroll
    for (int s = 0; s < kStages - 1; ++s) fetch();
  }

  // acc[g] += tiles x rows; x points at the first tile's rows of a rotated array of `stride` rows, of which `rows` count.
  // Tiles are even in number.
  __device__ __forceinline__ void run(const uint16_t* x, int64_t stride, int rows, float (&acc)[RowGroups][4]) {
    const uint16_t* mine = x + lane_ / 4 * 16 + lane_ % 4 * 4;
    bool take[RowGroups];
#pragma unroll
    for (int g = 0; g < RowGroups; ++g) take[g] = g * 8 + lane_ / 4 < rows;
    const std::byte* stage = ring_;
    int left = tiles_;
    for (; left >= kDepth; left -= kDepth) {
      copy_wait<kStages - 2>();
      __syncwarp();
      fetch();
      multiply<kDepth>(stage, mine, stride, take, acc);
      mine += kDepth * 16 * stride;
      stage = stage + kStageBytes == ring_ + kRingBytes ? ring_ : stage + kStageBytes;
    }
    copy_wait<0>();
    __syncwarp();
    if (left > 0) multiply<kDepth / 2>(stage, mine, stride, take, acc);
    __syncwarp();  // the ring may be used again at once
  }

 private:
  static constexpr int kChunks = kDepth * HalfBits, kRounds = (kChunks + 31) / 32;

  __device__ void fetch() {
#pragma unroll
    for (int r = 0; r < kRounds; ++r) {
      const int chunk = r * 32 + lane_;
      if (chunk < kChunks && fetched_ + chunk / HalfBits < tiles_) copy_async16(ring_ + to_ + chunk * 16, source_[r]);
      source_[r] += step_;
    }
    copy_commit();
    fetched_ += kDepth;
    to_ = to_ + kStageBytes == kRingBytes ? 0 : to_ + kStageBytes;
  }

  template <int Tiles>
  __device__ __forceinline__ void multiply(const std::byte* stage, const uint16_t* x, int64_t stride,
                                           const bool (&take)[RowGroups], float (&acc)[RowGroups][4]) {
    // Few rows: all of a stage's rows are asked for before the first is needed.
    constexpr int kBatch = RowGroups <= 2 ? Tiles : 1;
#pragma unroll
    for (int first = 0; first < Tiles; first += kBatch) {
      uint2 b[kBatch][RowGroups];
#pragma unroll
      for (int q = 0; q < kBatch; ++q)
#pragma unroll
        for (int g = 0; g < RowGroups; ++g)
          b[q][g] = take[g] ? *reinterpret_cast<const uint2*>(x + (first + q) * 16 * stride + g * 128) : uint2{0, 0};
#pragma unroll
      for (int q = 0; q < kBatch; ++q) {
        uint32_t a[4];
        decode_tile<Book, HalfBits>(reinterpret_cast<const uint32_t*>(stage + (first + q) * 16 * HalfBits), bits_, a);
#pragma unroll
        for (int g = 0; g < RowGroups; ++g) mma_16816(acc[g], a, b[q][g].x, b[q][g].y);
      }
    }
  }

  std::byte* ring_;
  const std::byte* source_[kRounds];
  int64_t step_;
  int tiles_, lane_, fetched_ = 0, to_ = 0;
  LaneBits<HalfBits> bits_;
};

// Calls f.template operator()<HalfBits>() for a width that the codebook has.
template <exl3::Codebook Book, class F>
__device__ __forceinline__ void with_width(int half_bits, F&& f) {
  switch (half_bits) {
    case 2: return f.template operator()<2>();
    case 4: return f.template operator()<4>();
    case 6: return f.template operator()<6>();
    case 8: return f.template operator()<8>();
    case 10: return f.template operator()<10>();
    case 12: return f.template operator()<12>();
    case 14: return f.template operator()<14>();
    case 16: return f.template operator()<16>();
  }
  if constexpr (Book == exl3::Codebook::Mul1) switch (half_bits) {
      case 3: return f.template operator()<3>();
      case 5: return f.template operator()<5>();
      case 7: return f.template operator()<7>();
    }
}

}  // namespace fnx::cuda
