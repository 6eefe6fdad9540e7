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
// Up to kMostRowsAlone rows: a lane each, of slots 1, 2, ...; more: two lanes, a third and the rest, of slots 2 and 0.
// Slot i starts at position `start` + 7 i.
inline constexpr int64_t kMostRowsAlone = 16;
int64_t lane_slots(int64_t rows);  // slots that this takes
void add_lanes(Problem& problem, int64_t rows, int32_t start = 0);
// Rows [first, first + count) with the lanes that they belong to.
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
};
// The planted fault that gives the first two lanes each other's slot.
Control crossed_slots();
#ifdef FNX_HAS_CUDA
cuda::Lanes device_lanes(const Problem& problem, DeviceProblem& device);
#endif

}  // namespace fnx::contract
