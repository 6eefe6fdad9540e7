// Lines of offloaded experts: copies, the served table, plans by the scalar rule.
#include <algorithm>
#include <cstring>
#include <span>

#include "kernels/cpu/backend.h"
#include "kernels/expert_planner.h"

namespace fnx::cpu {

namespace {
// Those that have a place on the stage.
std::span<const int32_t> staged_ids(const Foreseen& foreseen) {
  if (!foreseen) return {};
  return {foreseen.ids.as<int32_t>(), static_cast<size_t>(std::min<int64_t>(foreseen.ids.size(), PoolStage::kPlaces))};
}
}  // namespace

void CpuBackend::fill(Stream&, ExpertBank& bank, int32_t expert, View line) {
  auto& b = static_cast<CpuExperts&>(bank);
  const ExpertExtent& extent = b.list[expert].extent;
  std::memcpy(line.data, b.home(expert), extent.bytes);
  b.filled_bytes += extent.bytes;
}

void CpuBackend::serve_from(CpuExperts& bank, int32_t expert, const std::byte* line) {
  CpuExperts::Expert& e = bank.list[expert];
  e.served = line != nullptr;
  if (!bank.is_pooled(expert)) return;
  e.line = line;
  if (!e.served) return;
  e.gate->move_to(line), e.up->move_to(line + e.extent.up), e.down->move_to(line + e.extent.down);
}

void CpuBackend::serve(Stream&, ExpertBank& bank, std::span<const ServedExpert> served) {
  auto& b = static_cast<CpuExperts&>(bank);
  for (const ServedExpert& s : served) serve_from(b, s.expert, s.in_place ? b.home(s.expert) : s.line.data);
}

void CpuBackend::plan_experts(Stream&, ExpertBank& bank, const PoolOptions& options, int64_t k, View ids, View state,
                              View lines, const Foreseen&) {
  auto& b = static_cast<CpuExperts&>(bank);
  const PoolState s = PoolState::at(state.data, options.experts, options.lines, b.experts);
  const auto first = static_cast<int32_t>(b.first);
  std::vector<int32_t> chosen;
  for (int64_t r = 0; r < ids.shape[0]; ++r)
    for (int64_t i = 0; i < k; ++i) {
      const int32_t id = ids.rows(r, 1).as<int32_t>()[i];
      ++s.heat[id];
      if (b.is_pooled(id)) chosen.push_back(id - first);
    }
  const std::vector<int32_t> request = distinct_experts(chosen, options.experts);
  const std::vector<int32_t> held(s.expert_of, s.expert_of + s.lines);
  ExpertPlanner planner(options);
  planner.load(s);
  planner.plan(request);
  planner.store(s);
  *s.fill_count = 0;
  for (int32_t l = 0; l < s.lines; ++l) {
    const int32_t was = held[static_cast<size_t>(l)], now = s.expert_of[l];
    if (now == was) continue;
    if (was >= 0) serve_from(b, first + was, b.home(first + was));
    serve_from(b, first + now, lines.rows(l, 1).data);
    int32_t* fill = s.fills + 2 * (*s.fill_count)++;
    fill[0] = l, fill[1] = now;
    ++s.words->placed, s.words->placed_bytes += static_cast<uint64_t>(b.list[first + now].extent.bytes);
  }
  for (const int32_t e : request)
    if (s.line_of[e] < 0)
      ++s.words->in_place, s.words->in_place_bytes += static_cast<uint64_t>(b.list[first + e].extent.bytes);
}

void CpuBackend::fill_planned(Stream&, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                              const Foreseen& foreseen) {
  auto& b = static_cast<CpuExperts&>(bank);
  const PoolState s = PoolState::at(state.data, options.experts, options.lines, b.experts);
  const PoolStage stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
  const std::span<const int32_t> ids = staged_ids(foreseen);
  for (int32_t i = 0; i < *s.fill_count; ++i) {
    const int32_t expert = static_cast<int32_t>(b.first) + s.fills[2 * i + 1];
    const int64_t place = std::find(ids.begin(), ids.end(), expert) - ids.begin(), bytes = b.list[expert].extent.bytes;
    for (int64_t piece = 0, at = 0; at < bytes; ++piece, at += PoolStage::kPiece) {
      const int64_t n = std::min(PoolStage::kPiece, bytes - at);
      const bool there = place < std::ssize(ids) && stage.there[place * stage.pieces + piece] != 0;
      std::memcpy(lines.rows(s.fills[2 * i], 1).data + at,
                  there ? stage.lines + place * stage.line_bytes + at : b.home(expert) + at, static_cast<size_t>(n));
      if (there) s.words->taken_bytes += static_cast<uint64_t>(n);
    }
    s.words->copied_bytes += static_cast<uint64_t>(bytes);
  }
}

// Every other piece, as if a plan had ended the copies.
void CpuBackend::fill_foreseen(Stream&, ExpertBank& bank, const PoolOptions& options, View state,
                               const Foreseen& foreseen) {
  auto& b = static_cast<CpuExperts&>(bank);
  const PoolState s = PoolState::at(state.data, options.experts, options.lines, b.experts);
  const PoolStage stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
  const std::span<const int32_t> ids = staged_ids(foreseen);
  for (size_t i = 0; i < ids.size(); ++i) {
    uint8_t* const there = stage.there + static_cast<int64_t>(i) * stage.pieces;
    std::fill_n(there, stage.pieces, uint8_t{0});
    const bool again =
        std::find(ids.begin(), ids.begin() + static_cast<int64_t>(i), ids[i]) - ids.begin() < static_cast<int64_t>(i);
    if (!b.is_pooled(ids[i]) || again || s.line_of[ids[i] - b.first] >= 0) continue;
    const int64_t bytes = b.list[ids[i]].extent.bytes;
    for (int64_t piece = 0; piece * PoolStage::kPiece < bytes; piece += 2) {
      const int64_t at = piece * PoolStage::kPiece, n = std::min(PoolStage::kPiece, bytes - at);
      std::memcpy(stage.lines + static_cast<int64_t>(i) * stage.line_bytes + at, b.home(ids[i]) + at,
                  static_cast<size_t>(n));
      there[piece] = 1;
      s.words->ahead_bytes += static_cast<uint64_t>(n);
    }
    ++s.words->ahead;
  }
}

void CpuBackend::check_served(Stream&, const ExpertBank& bank) {
  const auto& b = static_cast<const CpuExperts&>(bank);
  for (int64_t i = b.first; i < b.first + b.pooled; ++i)
    if (const CpuExperts::Expert& e = b.list[i]; e.served)
      require_canary(static_cast<int32_t>(i), e.line + e.extent.canary);
}

}  // namespace fnx::cpu
