// How an expert that is brought to lines lies in host memory, and in a line: one run of bytes, so that a miss is one
// copy. Its gate, up and down matrices as stored, each at a multiple of 256 bytes, then its canary; scales are no part
// of it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "kernels/error.h"
#include "kernels/ops.h"

namespace fnx {

// Of the trellis, or of the plain matrix.
inline int64_t matrix_bytes(const LinearSource& s) {
  if (s.plain != nullptr) return s.in * s.out * static_cast<int64_t>(dtype_size(s.plain_dtype));
  return s.in / exl3::kTile * (s.out / exl3::kTile) * exl3::tile_words(s.half_bits) * 2;
}

struct ExpertExtent {
  static constexpr int64_t kAlign = 256;
  // 16 bytes that tell whose a line is; no expert's are zero.
  static std::array<int32_t, 4> canary_of(int32_t expert) { return {expert + 1, expert + 1, expert + 1, expert + 1}; }

  int64_t up = 0, down = 0, canary = 0, bytes = 0;  // offsets, the gate's is 0; bytes: of all of it

  ExpertExtent() = default;
  explicit ExpertExtent(const ExpertSource& e) {
    const auto aligned = [](int64_t n) { return (n + kAlign - 1) / kAlign * kAlign; };
    up = aligned(matrix_bytes(e.gate));
    down = up + aligned(matrix_bytes(e.up));
    canary = down + aligned(matrix_bytes(e.down));
    bytes = canary + static_cast<int64_t>(sizeof(canary_of(0)));
  }
  // Bytes from one expert's extent, or line, to the next.
  int64_t stride() const { return (bytes + kAlign - 1) / kAlign * kAlign; }

  void write(const ExpertSource& e, int32_t expert, std::byte* to) const {
    const auto put = [&](int64_t at, const LinearSource& s) {
      std::memcpy(to + at, s.plain != nullptr ? s.plain : s.trellis, static_cast<size_t>(matrix_bytes(s)));
    };
    put(0, e.gate), put(up, e.up), put(down, e.down);
    const auto mark = canary_of(expert);
    std::memcpy(to + canary, mark.data(), sizeof mark);
  }
};

// Which experts of a bank are pooled, where those held of the first `pooled` are.
inline void place_experts(ExpertBank& bank, const std::vector<ExpertSource>& experts, int64_t pooled) {
  bank.experts = static_cast<int64_t>(experts.size());
  for (int64_t e = 0; e < bank.experts; ++e) {
    if (!experts[e].held()) continue;
    if (e >= pooled)
      bank.others.push_back(static_cast<int32_t>(e));
    else if (bank.pooled++ == 0)
      bank.first = e;
  }
}

// Throws Internal naming both experts when `canary` is not that of `expert`.
inline void require_canary(int32_t expert, const void* canary) {
  std::array<int32_t, 4> held{};
  std::memcpy(held.data(), canary, sizeof held);
  if (held == ExpertExtent::canary_of(expert)) return;
  throw Error(ErrorKind::Internal,
              "the canary in the line of expert " + std::to_string(expert) + " reads " + std::to_string(held[0] - 1));
}

}  // namespace fnx
