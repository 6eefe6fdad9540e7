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
  return {foreseen.ids.as<int32_t>(),
          static_cast<size_t>(std::min<int64_t>(foreseen.ids.size(), PoolStage::kForeseen))};
}

// The place of an expert of the bank's pooled ones on the stage, -1 without one.
int64_t staged_at(const CpuExperts& bank, const Foreseen& foreseen, int32_t expert) {
  const std::span<const int32_t> ids = staged_ids(foreseen);
  if (const auto at = std::find(ids.begin(), ids.end(), expert); at != ids.end()) return at - ids.begin();
  if (!foreseen) return -1;
  const StageOrder& order = *PoolStage::at(foreseen.stage.data, foreseen.line_bytes).order;
  const int32_t* const end = order.experts + order.count;
  const auto* at = std::find(order.experts, end, static_cast<int32_t>(expert - bank.first));
  return at == end ? -1 : PoolStage::kForeseen + (at - order.experts);
}

// Copies the expert's pieces first, first + step, .. that are not there to a place of the stage; returns the bytes.
uint64_t bring(const CpuExperts& bank, const PoolStage& stage, int64_t place, int32_t expert, int64_t first,
               int64_t step) {
  const int64_t bytes = bank.list[expert].extent.bytes;
  uint64_t copied = 0;
  for (int64_t piece = first; piece * PoolStage::kPiece < bytes; piece += step) {
    const int64_t at = piece * PoolStage::kPiece, n = std::min(PoolStage::kPiece, bytes - at);
    uint8_t& there = stage.there[place * stage.pieces + piece];
    if (there != 0) continue;
    std::memcpy(stage.lines + place * stage.line_bytes + at, bank.home(expert) + at, static_cast<size_t>(n));
    there = 1, copied += static_cast<uint64_t>(n);
  }
  return copied;
}

void give_order(const PoolState& state, const CpuExperts& bank, std::span<const int32_t> request,
                const Foreseen& foreseen) {
  StageOrder& order = *PoolStage::at(foreseen.stage.data, foreseen.line_bytes).order;
  order.places = 0, order.count = 0;
  for (const int32_t e : request) {
    // A request beyond the lines may drive its own misses out again: nothing is ordered then.
    if (std::ssize(request) > state.lines || state.line_of[e] >= 0) continue;
    if (const int64_t place = staged_at(bank, foreseen, static_cast<int32_t>(bank.first) + e); place >= 0)
      order.places |= 1u << place;
    else if (order.count < StageOrder::kMost)
      order.experts[order.count++] = e;
  }
  order.given = 1;
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
                              View lines, const Foreseen& foreseen) {
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
  if (foreseen) give_order(s, b, request, foreseen);
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
  if (foreseen) {
    // As if copies beside the plan had got this far.
    const StageOrder& order = *stage.order;
    for (int32_t i = 0; i < PoolStage::kForeseen; ++i)
      if ((order.places >> i & 1) != 0) s.words->chosen_bytes += bring(b, stage, i, staged_ids(foreseen)[i], 1, 4);
    for (int32_t i = 0; i < order.count; ++i)
      s.words->chosen_bytes +=
          bring(b, stage, PoolStage::kForeseen + i, static_cast<int32_t>(b.first) + order.experts[i], 0, 2);
  }
  for (int32_t i = 0; i < *s.fill_count; ++i) {
    const int32_t expert = static_cast<int32_t>(b.first) + s.fills[2 * i + 1];
    const int64_t place = staged_at(b, foreseen, expert), bytes = b.list[expert].extent.bytes;
    for (int64_t piece = 0, at = 0; at < bytes; ++piece, at += PoolStage::kPiece) {
      const int64_t n = std::min(PoolStage::kPiece, bytes - at);
      const bool there = place >= 0 && stage.there[place * stage.pieces + piece] != 0;
      std::memcpy(lines.rows(s.fills[2 * i], 1).data + at,
                  there ? stage.lines + place * stage.line_bytes + at : b.home(expert) + at, static_cast<size_t>(n));
      if (there) s.words->taken_bytes += static_cast<uint64_t>(n);
    }
    s.words->copied_bytes += static_cast<uint64_t>(bytes);
  }
  if (foreseen) stage.order->given = 0;
}

// Every other piece, as if an order had ended them.
void CpuBackend::fill_foreseen(Stream&, ExpertBank& bank, const PoolOptions& options, View state,
                               const Foreseen& foreseen) {
  auto& b = static_cast<CpuExperts&>(bank);
  const PoolState s = PoolState::at(state.data, options.experts, options.lines, b.experts);
  const PoolStage stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
  const std::span<const int32_t> ids = staged_ids(foreseen);
  std::fill_n(stage.there, PoolStage::kPlaces * stage.pieces, uint8_t{0});
  for (auto id = ids.begin(); id != ids.end(); ++id) {
    if (!b.is_pooled(*id) || std::find(ids.begin(), id, *id) != id || s.line_of[*id - b.first] >= 0) continue;
    s.words->ahead_bytes += bring(b, stage, id - ids.begin(), *id, 0, 2);
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
