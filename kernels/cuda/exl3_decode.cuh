// From a tile's bits to mma fragments. Lane l of a warp decodes values 8l .. 8l+7, which are its A fragment of the
// transposed tile in mma.m16n8k16: 16 outputs as rows, 16 inputs as columns.
#pragma once

#include <cuda_fp16.h>

#include <cstdint>

#include "kernels/exl3.h"

namespace fnx::cuda {

// Where a lane's bits lie: they end 4 * HalfBits * (l + 1) bits into the ring; value j's state ends position(j) bits
// before.
template <int HalfBits>
struct Width {
  static constexpr int kWords = 4 * HalfBits;  // 32-bit words of a tile
  static constexpr int position(int j) { return 4 * HalfBits - exl3::end_bit(j, HalfBits); }
  static constexpr int kLength = position(0) + 16;
  static constexpr int shift(int lane) { return (32 - 4 * HalfBits * (lane + 1) % 32) % 32; }
  static constexpr int max_shift() {
    int most = 0;
    for (int l = 0; l < 32; ++l) most = shift(l) > most ? shift(l) : most;
    return most;
  }
  static constexpr int kRaw = (kLength + max_shift() + 31) / 32;  // words read
  static constexpr int kAligned = (kLength + 31) / 32;            // words left once the lane's last bit is bit 0
  // States that are whole bytes of one shifted word share its shift; greedy from the lowest position up.
  static constexpr int anchor(int j) {
    int start = -1;
    for (int k = 7; k >= j; --k)
      if (position(k) % 8 == position(j) % 8 && (start < 0 || position(k) - start > 16)) start = position(k);
    return start;
  }
};

// Word offsets and shift of a lane, the same for every tile.
template <int HalfBits>
struct LaneBits {
  int word[Width<HalfBits>::kRaw];  // last word first
  int shift;
  __device__ explicit LaneBits(int lane) {
    using W = Width<HalfBits>;
    const int end = 4 * HalfBits * (lane + 1), last = (end - 1) / 32;
#pragma unroll
    for (int i = 0; i < W::kRaw; ++i) word[i] = last >= i ? last - i : last - i + W::kWords;
    shift = (32 - end % 32) % 32;
  }
};

template <int HalfBits, int J>
__device__ __forceinline__ uint32_t lane_state(const uint32_t (&bits)[3]) {
  constexpr int kAt = Width<HalfBits>::position(J), kAnchor = Width<HalfBits>::anchor(J);
  constexpr int kWord = kAnchor / 32, kOffset = kAnchor % 32, kByte = (kAt - kAnchor) / 8;
  if constexpr (kAt % 32 == 16) return bits[kAt / 32] >> 16;
  uint32_t base = bits[kWord];
  if constexpr (kOffset != 0) {
    if constexpr (kWord < 2) {
      base = __funnelshift_r(bits[kWord], bits[kWord + 1], kOffset);
    } else {
      base >>= kOffset;
    }
  }
  return __byte_perm(base, 0, kByte == 0 ? 0x4410 : kByte == 1 ? 0x4421 : 0x4432);
}

// (v & 0x8FFF8FFF) ^ 0x3B603B60 in one instruction: one constant must come from a register that the compiler cannot see
// through.
__device__ __forceinline__ uint32_t and_xor(uint32_t v) {
  uint32_t mask, out;
  asm("mov.b32 %0, 0x8FFF8FFF;" : "=r"(mask));
  asm("lop3.b32 %0, %1, %2, 0x3B603B60, 0x6A;" : "=r"(out) : "r"(v), "r"(mask));
  return out;
}

// Two states to two fp16 values, the first in the low half.
template <exl3::Codebook Book>
__device__ __forceinline__ uint32_t decode_pair(uint32_t s0, uint32_t s1) {
  if constexpr (Book == exl3::Codebook::Mul1) {
    // 1024 + the byte sum is its own fp16 mantissa under the exponent 0x6400.
    const uint32_t v0 = __dp4a(s0 * exl3::kMul1, 0x01010101u, 0x6400u);
    const uint32_t v1 = __dp4a(s1 * exl3::kMul1, 0x01010101u, 0x6400u);
    const uint32_t sums = __byte_perm(v0, v1, 0x5410);
    uint32_t out;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(out) : "r"(sums), "r"(0x1EEE1EEEu), "r"(0xC931C931u));
    return out;
  } else {
    uint32_t v0, v1;
    if constexpr (Book == exl3::Codebook::Mcg) {
      v0 = s0 * exl3::kMcg, v1 = s1 * exl3::kMcg;
    } else {
      v0 = s0 * 89226354u + 64248484u, v1 = s1 * 89226354u + 64248484u;
    }
    v0 = and_xor(v0), v1 = and_xor(v1);
    const uint32_t low = __byte_perm(v0, v1, 0x5410), high = __byte_perm(v0, v1, 0x7632);
    uint32_t out;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(out) : "r"(low), "r"(high));
    return out;
  }
}

// a = the lane's A fragment of a tile whose words lie at `tile`.
template <exl3::Codebook Book, int HalfBits>
__device__ __forceinline__ void decode_tile(const uint32_t* tile, const LaneBits<HalfBits>& lane, uint32_t (&a)[4]) {
  using W = Width<HalfBits>;
  uint32_t raw[4] = {}, bits[3] = {};
#pragma unroll
  for (int i = 0; i < W::kRaw; ++i) raw[i] = tile[lane.word[i]];
#pragma unroll
  for (int i = 0; i < W::kAligned; ++i) {
    if constexpr (W::max_shift() == 0) {
      bits[i] = raw[i];
    } else if (i + 1 < W::kRaw) {
      bits[i] = __funnelshift_r(raw[i], raw[i + 1], lane.shift);
    } else {
      bits[i] = raw[i] >> lane.shift;
    }
  }
  a[0] = decode_pair<Book>(lane_state<HalfBits, 0>(bits), lane_state<HalfBits, 1>(bits));
  a[2] = decode_pair<Book>(lane_state<HalfBits, 2>(bits), lane_state<HalfBits, 3>(bits));
  a[1] = decode_pair<Book>(lane_state<HalfBits, 4>(bits), lane_state<HalfBits, 5>(bits));
  a[3] = decode_pair<Book>(lane_state<HalfBits, 6>(bits), lane_state<HalfBits, 7>(bits));
}

}  // namespace fnx::cuda
