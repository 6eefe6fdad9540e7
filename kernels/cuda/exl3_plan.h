// What the EXL3 launchers share: the number of K splits, limits, refusals.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>

#include "kernels/error.h"

namespace fnx::cuda {

inline constexpr int64_t kMostColumns = 524288;
inline constexpr int kMostSplits = 32;
inline constexpr size_t kCounterBytes = 4 * kMostColumns / 128;

// Splits that minimise the time of `columns` blocks of 128 outputs over in/16 k-tiles on a nominal card of 132
// multiprocessors that hold four blocks each. Costs are tenths of the time in which a full multiprocessor decodes a
// k-tile of a block.
inline int plan_splits(int64_t in, int64_t columns) {
  constexpr int64_t kProcessors = 132, kBlockTiles = 3, kSplitCost = 8;
  constexpr int64_t kResident[5] = {0, 22, 26, 32, 40};  // time of a k-tile by blocks on a multiprocessor
  const int64_t pairs = in / 32;
  if (columns > 4 * kProcessors) return 1;
  int best = 1;
  int64_t least = -1;
  for (int64_t s = 1; s <= std::min<int64_t>(kMostSplits, pairs); ++s) {
    const int64_t blocks = (columns * s + kProcessors - 1) / kProcessors;
    const int64_t longest = 2 * ((pairs + s - 1) / s);
    const int64_t cost =
        (blocks <= 4 ? kResident[blocks] : 10 * blocks + 10) * (longest + kBlockTiles) + s * kSplitCost;
    if (least < 0 || cost < least) least = cost, best = static_cast<int>(s);
  }
  return best;
}

constexpr size_t aligned256(int64_t bytes) { return static_cast<size_t>((bytes + 255) / 256 * 256); }

[[noreturn]] inline void refuse(const std::string& what) { throw Error(ErrorKind::Internal, what); }

inline void check_aligned(const char* name, const void* p, uintptr_t bytes) {
  if (p == nullptr || reinterpret_cast<uintptr_t>(p) % bytes != 0)
    refuse(std::string(name) + " is null or not aligned to " + std::to_string(bytes) + " bytes");
}

}  // namespace fnx::cuda
