// Lanes of a launch whose rows belong to sequences: operand "lanes", I32 [lanes, 4] as fnx::Lane.
#pragma once

#include <vector>

#include "kernels/contract/device.h"
#include "kernels/ops.h"
#ifdef FNX_HAS_CUDA
#include "kernels/cuda/stream.h"
#endif

namespace fnx::contract {

std::vector<Lane> lanes_of(const Problem& problem);
// What each lane keeps and tries: operand "trials", I32 [lanes, 2] as fnx::Trial; nothing when there is none.
std::vector<Trial> trials_of(const Problem& problem);
// Rows that a lane may try in this problem: its number "trials".
int64_t most_trials(const Problem& problem);
// Up to kMostRowsAlone rows: a lane each, of slots 1, 2, ...; more: two lanes, a third and the rest, of slots 2 and 0.
// Slot i starts at position `start` + 7 i. Where rows may be tried: those two lanes whatever the rows, which keep and
// try some, and one of no rows, of slot 1, that keeps all.
inline constexpr int64_t kMostRowsAlone = 16;
int64_t lane_slots(int64_t rows);  // slots that this takes
void add_lanes(Problem& problem, int64_t rows, int32_t start = 0);
// Rows [first, first + count) with the lanes that they belong to. Where rows may be tried, the last row of a lane's
// part is, or is not, by its place, and the next part keeps it.
Problem lanes_part(const Problem& whole, int64_t first, int64_t count);
// The batch of a problem's lanes, as the cpu backend takes it.
class LaneBatch {
 public:
  explicit LaneBatch(const Problem& problem);
  LaneBatch(const LaneBatch&) = delete;
  LaneBatch& operator=(const LaneBatch&) = delete;
  Batch batch;

 private:
  std::vector<Lane> lanes_;
  std::vector<Trial> trials_;
};
// The planted fault that gives the first two lanes each other's slot.
Control crossed_slots();
#ifdef FNX_HAS_CUDA
// Trials of zero throughout are none, as the backend gives them.
cuda::Lanes device_lanes(const Problem& problem, DeviceProblem& device);
#endif

}  // namespace fnx::contract
