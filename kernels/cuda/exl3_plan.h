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
// First bytes of every workspace: the exchange of exl3_exchange.cuh, empty between launches whatever their shapes.
inline constexpr size_t kExchangeBytes = size_t{32} << 20;

// Splits that minimise the time of `columns` blocks of 128 outputs over in/16 k-tiles on a nominal card of 132
// multiprocessors that hold four blocks each. Nanoseconds by blocks on a multiprocessor: of a launch without its tiles,
// and of a k-tile of every block. Three blocks leave room in which those of the next launch settle unevenly; more than
// twelve sums come slowly to the last block of a column.
inline int plan_splits(int64_t in, int64_t columns) {
  constexpr int64_t kProcessors = 132, kSplit = 20, kManySums = 600;
  constexpr int64_t kLaunch[5] = {0, 2800, 3100, 3800, 4200}, kTile[5] = {0, 78, 145, 240, 233};
  const int64_t pairs = in / 32;
  int best = 1;
  int64_t least = -1;
  for (int64_t s = 1; s <= std::min<int64_t>(kMostSplits, pairs); ++s) {
    const int64_t blocks = (columns * s + kProcessors - 1) / kProcessors;
    if (blocks > 4) break;
    const int64_t longest = 2 * ((pairs + s - 1) / s);
    const int64_t cost = kLaunch[blocks] + kTile[blocks] * longest + kSplit * s + (s > 13 ? kManySums : 0);
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
