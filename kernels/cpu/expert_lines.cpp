// Lines of offloaded experts: copies, the served table, plans by the scalar rule.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <span>
#include <utility>

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

// The place of an expert of the bank's pooled ones on the stage of a plan that gave its order, -1 without one.
int64_t staged_at(const CpuExperts& bank, const Foreseen& foreseen, int32_t expert) {
  const std::span<const int32_t> ids = staged_ids(foreseen);
  if (const auto at = std::find(ids.begin(), ids.end(), expert); at != ids.end()) return at - ids.begin();
  if (!foreseen) return -1;
  const StageOrder& order = *PoolStage::at(foreseen.stage.data, foreseen.line_bytes).order;
  const int32_t* const end = order.experts + order.count;
  const auto* at = std::find(order.experts, end, static_cast<int32_t>(expert - bank.first));
  return at == end ? -1 : PoolStage::kForeseen + (at - order.experts);
}

// Of each place of the stage, the pieces of the guess.
std::array<int64_t, PoolStage::kPlaces> guessed_pieces(const StageOrder& order, int64_t pieces) {
  std::array<int64_t, PoolStage::kPlaces> guessed{};
  auto left = static_cast<int64_t>(order.guessed);
  for (size_t i = 0; i < PoolStage::kForeseen; ++i)
    if ((order.lacking >> i & 1) != 0) left -= guessed[i] = std::min(left, pieces);
  return guessed;
}

// Copies pieces [first, last) of the expert to a place of the stage; returns the bytes.
uint64_t bring(const CpuExperts& bank, const PoolStage& stage, int64_t place, int32_t expert, int64_t first,
               int64_t last) {
  const int64_t from = first * PoolStage::kPiece,
                to = std::min(last * PoolStage::kPiece, bank.list[expert].extent.bytes);
  if (from >= to) return 0;
  std::memcpy(stage.lines + place * stage.line_bytes + from, bank.home(expert) + from, static_cast<size_t>(to - from));
  return static_cast<uint64_t>(to - from);
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
  order.guessed = std::exchange(order.drawn, StageOrder::kClosed);
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
  const PoolStage stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
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
    const auto place = static_cast<int32_t>(staged_at(b, foreseen, first + now));
    serve_from(b, first + now, place < 0 ? lines.rows(l, 1).data : stage.lines + place * stage.line_bytes);
    s.fills[(*s.fill_count)++] = {l, now, place};
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
  std::array<int64_t, PoolStage::kPlaces> there{};
  if (foreseen) {
    // As if copies beside the plan had got as far as none of the order to all of it.
    const StageOrder& order = *stage.order;
    there = guessed_pieces(order, stage.pieces);
    std::vector<std::pair<int64_t, int32_t>> wanted;  // place and expert
    for (int32_t i = 0; i < PoolStage::kForeseen; ++i)
      if ((order.places >> i & 1) != 0) wanted.emplace_back(i, staged_ids(foreseen)[static_cast<size_t>(i)]);
    for (int32_t i = 0; i < order.count; ++i)
      wanted.emplace_back(PoolStage::kForeseen + i, static_cast<int32_t>(b.first) + order.experts[i]);
    int64_t draws = 0;
    for (const auto& [place, expert] : wanted) draws += stage.pieces - there[static_cast<size_t>(place)];
    draws = draws * static_cast<int64_t>(s.words->requests / 4 % 4) / 3;
    for (const auto& [place, expert] : wanted) {
      int64_t& first = there[static_cast<size_t>(place)];
      const int64_t last = std::min(stage.pieces, first + draws);
      s.words->chosen_bytes += bring(b, stage, place, expert, first, last);
      draws -= last - std::exchange(first, last);
    }
  }
  for (int32_t i = 0; i < *s.fill_count; ++i) {
    const auto [line, e, place] = s.fills[i];
    const int32_t expert = static_cast<int32_t>(b.first) + e;
    if (place >= 0) {
      s.words->chosen_bytes += bring(b, stage, place, expert, there[static_cast<size_t>(place)], stage.pieces);
      continue;
    }
    const int64_t bytes = b.list[expert].extent.bytes;
    std::memcpy(lines.rows(line, 1).data, b.home(expert), static_cast<size_t>(bytes));
    s.words->copied_bytes += static_cast<uint64_t>(bytes);
  }
}

void CpuBackend::settle_planned(Stream&, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                                const Foreseen& foreseen) {
  auto& b = static_cast<CpuExperts&>(bank);
  const PoolState s = PoolState::at(state.data, options.experts, options.lines, b.experts);
  const PoolStage stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
  for (int32_t i = 0; i < *s.fill_count; ++i) {
    const auto [at, e, place] = s.fills[i];
    if (place < 0) continue;
    const int32_t expert = static_cast<int32_t>(b.first) + e;
    const int64_t bytes = b.list[expert].extent.bytes;
    std::byte* const line = lines.rows(at, 1).data;
    std::memcpy(line, stage.lines + place * stage.line_bytes, static_cast<size_t>(bytes));
    serve_from(b, expert, line);
    s.words->copied_bytes += static_cast<uint64_t>(bytes), s.words->taken_bytes += static_cast<uint64_t>(bytes);
  }
  stage.order->given = 0, stage.order->drawn = 0, stage.order->lacking = 0;
}

// None of the guess to all of it, as if an order had ended it.
void CpuBackend::fill_foreseen(Stream&, ExpertBank& bank, const PoolOptions& options, View state,
                               const Foreseen& foreseen) {
  auto& b = static_cast<CpuExperts&>(bank);
  const PoolState s = PoolState::at(state.data, options.experts, options.lines, b.experts);
  const PoolStage stage = PoolStage::at(foreseen.stage.data, foreseen.line_bytes);
  const std::span<const int32_t> ids = staged_ids(foreseen);
  StageOrder& order = *stage.order;
  order.lacking = StageOrder::kKnown;
  for (auto id = ids.begin(); id != ids.end(); ++id)
    if (b.is_pooled(*id) && std::find(ids.begin(), id, *id) == id && s.line_of[*id - b.first] < 0)
      order.lacking |= 1u << (id - ids.begin());
  const int64_t guess = (std::popcount(order.lacking) - 1) * stage.pieces;
  order.drawn = order.guessed = static_cast<uint32_t>(guess * static_cast<int64_t>(s.words->requests % 4) / 3);
  const auto guessed = guessed_pieces(order, stage.pieces);
  for (size_t i = 0; i < ids.size(); ++i) {
    s.words->ahead_bytes += bring(b, stage, static_cast<int64_t>(i), ids[i], 0, guessed[i]);
    s.words->ahead += guessed[i] > 0;
  }
}

void CpuBackend::check_served(Stream&, const ExpertBank& bank) {
  const auto& b = static_cast<const CpuExperts&>(bank);
  for (int64_t i = b.first; i < b.first + b.pooled; ++i)
    if (const CpuExperts::Expert& e = b.list[i]; e.served)
      require_canary(static_cast<int32_t>(i), e.line + e.extent.canary);
}

}  // namespace fnx::cpu
