// EXL3 codebooks and tile addressing: the definitions every backend shares. A tile is 16 inputs x 16 outputs, 256
// values in a circular bitstream; `half_bits` is twice the width in bits, so that 1.5, 2.5 and 3.5 are integers too.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "kernels/float16.h"

namespace fnx::exl3 {

inline constexpr int kTile = 16;         // rows and columns of a tile
inline constexpr int kTileValues = 256;  // values of a tile
inline constexpr int kHadamard = 128;    // block of the input and output rotations
inline constexpr uint32_t kMul1 = 0x83DCD12Du, kMcg = 0xCBAC1FEDu;

enum class Codebook : uint8_t { ThreeInst, Mcg, Mul1 };

constexpr const char* codebook_name(Codebook c) {
  return c == Codebook::Mul1 ? "mul1" : c == Codebook::Mcg ? "mcg" : "3inst";
}

// 16-bit words of one tile.
constexpr int tile_words(int half_bits) { return half_bits * 8; }

// Widths a codebook has: 1..8 bits, and 1.5, 2.5, 3.5 for mul1.
constexpr bool width_supported(Codebook c, int half_bits) {
  if (half_bits % 2 == 0) return half_bits >= 2 && half_bits <= 16;
  return c == Codebook::Mul1 && (half_bits == 3 || half_bits == 5 || half_bits == 7);
}

// Bit position after the 16 bits that value p is decoded from.
constexpr int end_bit(int p, int half_bits) {
  return half_bits % 2 == 0 ? (p + 1) * (half_bits / 2) : ((p + 1) * half_bits - ((p + 1) & 1)) / 2;
}

// Place of value p inside the tile.
constexpr int value_row(int p) {
  const int l = p / 8, j = p % 8;
  return 2 * (l % 4) + (j & 1) + 8 * ((j >> 1) & 1);
}
constexpr int value_column(int p) { return p / 8 / 4 + 8 * ((p % 8) >> 2); }

// State to fp16 bits.
inline uint16_t decode_state(uint16_t s, Codebook c) {
  if (c == Codebook::Mul1) {
    const uint32_t v = s * kMul1;
    const uint32_t sum = (v & 0xFF) + ((v >> 8) & 0xFF) + ((v >> 16) & 0xFF) + (v >> 24);
    // Integer up to 2044 times an 11-bit number plus one: exact in double, so one rounding to fp16 follows from fp32.
    const double value = (1024.0 + sum) * double{f16_to_f32(0x1EEE)} + double{f16_to_f32(0xC931)};
    return f32_to_f16(static_cast<float>(value));
  }
  uint32_t v = c == Codebook::Mcg ? s * kMcg : s * 89226354u + 64248484u;
  v = (v & 0x8FFF8FFFu) ^ 0x3B603B60u;
  return f32_to_f16(f16_to_f32(static_cast<uint16_t>(v)) + f16_to_f32(static_cast<uint16_t>(v >> 16)));
}

// State of value p of a tile: the 16 bits before end_bit(p), wrapping; word pairs form 32-bit words, high bit first.
inline uint16_t tile_state(const uint16_t* words, int p, int half_bits) {
  const int ring_words = half_bits * 4;  // 32-bit words of the ring
  const int start = (end_bit(p, half_bits) - 16 + ring_words * 32) % (ring_words * 32);
  const int w0 = start / 32, w1 = (w0 + 1) % ring_words;
  const auto word = [&](int w) { return uint64_t{words[2 * w]} | uint64_t{words[2 * w + 1]} << 16; };
  return static_cast<uint16_t>((word(w0) << 32 | word(w1)) >> (48 - start % 32));
}

}  // namespace fnx::exl3
