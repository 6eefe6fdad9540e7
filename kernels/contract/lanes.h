// Lanes of a launch whose rows belong to sequences: operand "lanes", I32 [lanes, 4] as fnx::Lane.
#pragma once

#include <vector>

#include "kernels/contract/problem.h"
#include "kernels/ops.h"

namespace fnx::contract {

std::vector<Lane> lanes_of(const Problem& problem);
// Up to `alone` rows: a lane each, of slots 1, 2, ...; more: two lanes, a third and the rest, of slots 2 and 0. Slot i
// starts at position `start` + 7 i.
int64_t lane_slots(int64_t rows, int64_t alone);  // slots that this takes
void add_lanes(Problem& problem, int64_t rows, int64_t alone, int32_t start = 0);
// Rows [first, first + count) with the lanes that they belong to.
Problem lanes_part(const Problem& whole, int64_t first, int64_t count);

}  // namespace fnx::contract
