#include "kernels/contract/lanes.h"

#include <algorithm>
#include <cstring>

#include "kernels/contract/controls.h"

namespace fnx::contract {

namespace {

template <class Row>
void store(Operand& operand, const std::vector<Row>& rows) {
  std::memcpy(operand.data(), rows.data(), rows.size() * sizeof(Row));
}

template <class Row>
std::vector<Row> load(const Operand& operand) {
  std::vector<Row> rows(static_cast<size_t>(operand.shape[0]));
  std::memcpy(rows.data(), operand.data(), rows.size() * sizeof(Row));
  return rows;
}

void add_tables(Problem& problem, const std::vector<Lane>& lanes, const std::vector<Trial>& trials) {
  const auto count = static_cast<int64_t>(lanes.size());
  store(problem.add("lanes", DType::I32, Role::In, false, {count, 4}), lanes);
  if (!trials.empty()) store(problem.add("trials", DType::I32, Role::In, false, {count, 2}), trials);
}

// Rows that a part tries which ends before row `end`, in the middle of a lane.
int32_t tried_before(int32_t end) { return end % 3 == 0 ? 0 : 1; }

}  // namespace

std::vector<Lane> lanes_of(const Problem& problem) { return load<Lane>(problem["lanes"]); }

std::vector<Trial> trials_of(const Problem& problem) {
  if (problem.has("trials")) return load<Trial>(problem["trials"]);
  return std::vector<Trial>(static_cast<size_t>(problem["lanes"].shape[0]));
}

int64_t most_trials(const Problem& problem) {
  const auto number = problem.numbers.find("trials");
  return number == problem.numbers.end() ? 0 : number->second;
}

int64_t lane_slots(int64_t rows) { return rows <= kMostRowsAlone ? std::max<int64_t>(rows + 1, 3) : 3; }

void add_lanes(Problem& problem, int64_t rows, int32_t start) {
  const auto all = static_cast<int32_t>(rows), cut = all / 3, most = static_cast<int32_t>(most_trials(problem));
  const std::vector<Lane> two = {{2, 0, cut, start + 14}, {0, cut, all - cut, start}};
  if (most > 0) {
    // Parts of one row must be able to try as many as a long launch's last part.
    const int32_t tried = rows <= kMostRowsAlone ? std::min(most, 2) : 1;
    add_tables(problem, {two[0], two[1], {1, all, 0, start + 7}},
               {{most - 1, std::min(cut, tried)}, {1, tried}, {most, 0}});
    return;
  }
  std::vector<Lane> alone;
  for (int32_t r = 0; r < all; ++r) alone.push_back({r + 1, r, 1, start + 7 * (r + 1)});
  add_tables(problem, rows <= kMostRowsAlone ? alone : two, {});
}

Problem lanes_part(const Problem& whole, int64_t first, int64_t count) {
  Problem part = window(whole, first, count), sized;
  const auto from = static_cast<int32_t>(first), to = static_cast<int32_t>(first + count);
  const std::vector<Lane> lanes = lanes_of(whole);
  const std::vector<Trial> trials = trials_of(whole);
  std::vector<Lane> kept_lanes;
  std::vector<Trial> kept_trials;
  for (size_t i = 0; i < lanes.size(); ++i) {
    const Lane& lane = lanes[i];
    const int32_t end = lane.first_row + lane.rows, begin = std::max(lane.first_row, from), stop = std::min(end, to);
    // A lane of no rows comes after all rows.
    if (lane.rows > 0 ? begin >= stop : to < lane.first_row) continue;
    kept_lanes.push_back({lane.slot, begin - from, stop - begin, lane.start + begin - lane.first_row});
    kept_trials.push_back({begin > lane.first_row ? tried_before(begin) : trials[i].kept,
                           stop < end ? tried_before(stop) : trials[i].tried});
  }
  if (!whole.has("trials")) kept_trials.clear();
  add_tables(sized, kept_lanes, kept_trials);
  for (Operand& table : sized.operands) part[table.name] = table;
  return part;
}

LaneBatch::LaneBatch(const Problem& problem) : lanes_(lanes_of(problem)), trials_(trials_of(problem)) {
  batch.lanes = lanes_;
  batch.rows = problem.rows;
  batch.trials = {reinterpret_cast<std::byte*>(trials_.data()),
                  DType::I32,
                  Space::Host,
                  2,
                  {static_cast<int64_t>(trials_.size()), 2}};
}

Control crossed_slots() {
  return tamper_control("crossed slots", 2, [](Problem& p) {
    auto* lanes = p["lanes"].as<int32_t>();
    std::swap(lanes[0], lanes[4]);
  });
}

#ifdef FNX_HAS_CUDA
cuda::Lanes device_lanes(const Problem& problem, DeviceProblem& device) {
  const std::vector<Trial> trials = trials_of(problem);
  const bool any = std::any_of(trials.begin(), trials.end(), [](const Trial& t) { return t.kept > 0 || t.tried > 0; });
  return {device.get<int32_t>("lanes"), problem["lanes"].shape[0], any ? device.get<int32_t>("trials") : nullptr};
}
#endif

}  // namespace fnx::contract
