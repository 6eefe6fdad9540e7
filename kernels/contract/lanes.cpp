#include "kernels/contract/lanes.h"

#include <algorithm>
#include <cstring>

#include "kernels/contract/controls.h"

namespace fnx::contract {

namespace {

void store(Operand& operand, const std::vector<Lane>& lanes) {
  std::memcpy(operand.data(), lanes.data(), lanes.size() * sizeof(Lane));
}

std::vector<int64_t> table_shape(const std::vector<Lane>& lanes) { return {static_cast<int64_t>(lanes.size()), 4}; }

}  // namespace

std::vector<Lane> lanes_of(const Problem& problem) {
  const Operand& table = problem["lanes"];
  std::vector<Lane> lanes(static_cast<size_t>(table.shape[0]));
  std::memcpy(lanes.data(), table.data(), lanes.size() * sizeof(Lane));
  return lanes;
}

int64_t lane_slots(int64_t rows) { return rows <= kMostRowsAlone ? rows + 1 : 3; }

void add_lanes(Problem& problem, int64_t rows, int32_t start) {
  std::vector<Lane> lanes;
  if (rows <= kMostRowsAlone) {
    for (int32_t r = 0; r < rows; ++r) lanes.push_back({r + 1, r, 1, start + 7 * (r + 1)});
  } else {
    const auto all = static_cast<int32_t>(rows), cut = all / 3;
    lanes = {{2, 0, cut, start + 14}, {0, cut, all - cut, start}};
  }
  store(problem.add("lanes", DType::I32, Role::In, false, table_shape(lanes)), lanes);
}

Problem lanes_part(const Problem& whole, int64_t first, int64_t count) {
  Problem part = window(whole, first, count);
  std::vector<Lane> lanes;
  for (const Lane& lane : lanes_of(whole)) {
    const auto begin = std::max(lane.first_row, static_cast<int32_t>(first));
    const auto end = std::min(lane.first_row + lane.rows, static_cast<int32_t>(first + count));
    if (begin < end)
      lanes.push_back(
          {lane.slot, begin - static_cast<int32_t>(first), end - begin, lane.start + begin - lane.first_row});
  }
  Problem sized;
  Operand table = sized.add("lanes", DType::I32, Role::In, false, table_shape(lanes));
  store(table, lanes);
  part["lanes"] = table;
  return part;
}

LaneBatch::LaneBatch(const Problem& problem) : lanes_(lanes_of(problem)) {
  batch.lanes = lanes_;
  batch.rows = problem.rows;
}

Control crossed_slots() {
  return tamper_control("crossed slots", 2, [](Problem& p) {
    auto* lanes = p["lanes"].as<int32_t>();
    std::swap(lanes[0], lanes[4]);
  });
}

#ifdef FNX_HAS_CUDA
cuda::Lanes device_lanes(const Problem& problem, DeviceProblem& device) {
  return {device.get<int32_t>("lanes"), problem["lanes"].shape[0]};
}
#endif

}  // namespace fnx::contract
