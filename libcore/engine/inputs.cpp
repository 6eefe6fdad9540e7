// The host's part of a forward: histories, pages, n-gram rows and lists of rows, written to one block and sent at once.
#include <fmt/format.h>

#include <algorithm>

#include "kernels/error.h"
#include "libcore/engine/engine.h"

namespace fnx {

namespace {
// Launches depend on the context by this bound alone, so that recorded ones serve while it lasts.
int64_t positions_bound(int64_t positions) {
  int64_t bound = 4096;
  while (bound < positions) bound *= 2;
  return bound;
}

}  // namespace

void Engine::place(int64_t rows, int64_t lanes, int64_t draws, int64_t draft_rows, int64_t draft_lanes) {
  staging_.begin();
  in_.tokens = staging_.place(DType::I32, {rows});
  in_.positions = staging_.place(DType::I32, {rows});
  in_.lanes = staging_.place(DType::I32, {lanes, 4});
  if (lags_or_tries()) in_.trials = staging_.place(DType::I32, {lanes, 2});
  in_.draw_rows = staging_.place(DType::I32, {draws});
  in_.params = staging_.place(DType::U8, {draws, sizeof(SampleParams)});
  in_.ngram.clear();
  for (const Layer& l : weights_.layers) {
    if (!l.ple) continue;
    const NgramTable& t = l.ple->table;
    const DType dtype = t.bits() > 0 ? DType::I16 : t.plain_dtype();
    const auto words = t.row_bytes() / static_cast<int64_t>(dtype_size(dtype));
    in_.ngram.push_back(staging_.place(dtype, {rows, l.ple->hash.heads(), words}));
  }
  if (has_draft_head()) in_.keep = staging_.place(DType::I32, {draws});
  place_tables();
  // Last, for recorded rounds read all others, and their key says nothing of draft rows.
  if (draft_rows > 0) place_draft_rows(draft_rows, draft_lanes);
}

void Engine::place_late_rows(int64_t rows) {
  in_.late_rows = staging_.place(DType::I32, {rows}), in_.late_places = staging_.place(DType::I32, {rows});
}

void Engine::place_tables() {
  in_.tables = staging_.place(DType::I32, {state_.pages().table_count(), options_.state.slots, state_.pages().width()});
}

View Engine::page_table(int64_t i) const {
  return in_.tables.device.rows(i, 1).reshape({options_.state.slots, state_.pages().width()});
}

void Engine::fill_tables() { in_.tables.fill(state_.pages().tables().data(), state_.pages().tables().size()); }

void Engine::place_draft_rows(int64_t rows, int64_t lanes) {
  in_.draft_tokens = staging_.place(DType::I32, {rows});
  in_.draft_positions = staging_.place(DType::I32, {rows});
  in_.draft_lanes = staging_.place(DType::I32, {lanes, 4});
  in_.from_last = staging_.place(DType::I32, {rows});
  in_.from_stack = staging_.place(DType::I32, {rows});
}

void Engine::stage(std::span<const LaneInput> inputs, std::span<const Draw> draws) {
  const ModelConfig& c = config();
  int64_t rows = 0;
  for (const LaneInput& in : inputs) {
    for (int32_t t : in.tokens)
      if (t < 0 || t >= c.vocab_size)
        throw Error(ErrorKind::Input, fmt::format("token id {} is outside the vocabulary of {}", t, c.vocab_size));
    rows += static_cast<int64_t>(in.tokens.size());
    if (in.tried < 0 || in.tried >= static_cast<int64_t>(in.tokens.size()))
      throw Error(ErrorKind::Internal, fmt::format("{} of {} rows on trial", in.tried, in.tokens.size()));
  }
  if (rows == 0 || rows > options_.max_rows)
    throw Error(ErrorKind::Internal,
                fmt::format("a forward of {} rows, 1 to {} are possible", rows, options_.max_rows));
  if (static_cast<int64_t>(draws.size()) > most_draws())
    throw Error(ErrorKind::Internal,
                fmt::format("{} draws of one round, at most {} are possible", draws.size(), most_draws()));
  if (has_draft_head()) make_room(inputs);
  lanes_.clear(), trials_.clear();
  clear_draft_rows();
  int32_t row = 0;
  for (const LaneInput& in : inputs) {
    const auto count = static_cast<int32_t>(in.tokens.size());
    lanes_.push_back({in.slot, row, count, static_cast<int32_t>(state_.length(in.slot))});
    trials_.push_back({state_.lag(in.slot), in.tried});
    const int32_t waiting = state_.waiting(in.slot, in.tokens[0]);
    state_.append(in.slot, in.tokens);
    state_.try_rows(in.slot, in.tried);
    state_.caught_up(in.slot);
    if (has_draft_head()) list_drafts(in, waiting);
    row += count;
  }
  for (const Lane& lane : lanes_) state_.count(lane);
  place(rows, static_cast<int64_t>(lanes_.size()), static_cast<int64_t>(draws.size()),
        static_cast<int64_t>(draft_tokens_.size()), static_cast<int64_t>(draft_lanes_.size()));
  fill_inputs(inputs, draws);
  staging_.send(*stream_);
  batch_ = make_batch(in_.lanes, in_.positions, lanes_);
  if (lags_or_tries()) batch_.trials = in_.trials.device;
  draft_batch_ = {};
  if (draft_lanes_.empty()) return;
  draft_batch_ = make_batch(in_.draft_lanes, in_.draft_positions, draft_lanes_);
  // Draft rows lie a position behind: a bound of their own would change in a round whose key has not.
  draft_batch_.most_positions = batch_.most_positions;
}

// Of the last lane in lanes_, whose tokens are in the history.
void Engine::list_drafts(const LaneInput& input, int32_t waiting) {
  const Lane& lane = lanes_.back();
  const int32_t sure = lane.rows - input.tried;
  // The lane's last row waits for the next forward, and tried rows for their verdict.
  int32_t count = waiting + sure - 1;
  if (lane.rows == 1 && waiting < state_.waiting_rows()) {
    count = 0;
    state_.set_waiting(lane.slot, waiting + 1, -1);
  } else {
    state_.set_waiting(lane.slot, 1, -1);
  }
  add_draft_rows(lane, waiting, count, lane.start - waiting);
}

// Sequences whose rows can wait no longer, or that go on with a prompt, and those beside them, so that they wait
// alike afterwards.
void Engine::make_room(std::span<const LaneInput> inputs) {
  const bool full = std::any_of(inputs.begin(), inputs.end(), [&](const LaneInput& in) {
    const int32_t waiting = state_.waiting(in.slot, -1);
    return waiting > 1 && (in.tokens.size() > 1 || waiting == state_.waiting_rows());
  });
  if (!full) return;
  std::vector<int32_t> slots;
  for (const LaneInput& in : inputs) slots.push_back(in.slot);
  catch_up(slots);
}

// `count` rows from position `start` on, whose next tokens are known: the first `waiting` from the slot's last stacks,
// the others from the lane's first row on.
void Engine::add_draft_rows(const Lane& lane, int32_t waiting, int32_t count, int32_t start) {
  const auto first = static_cast<int32_t>(draft_tokens_.size());
  draft_rows_.push_back({first, count, start});
  if (count == 0) return;
  draft_lanes_.push_back({lane.slot, first, count, start});
  for (int32_t i = 0; i < count; ++i) {
    const bool last = i < waiting;
    from_last_.push_back(last ? state_.stack_place(lane.slot, start + i) : -1);
    from_stack_.push_back(last ? -1 : lane.first_row + i - waiting);
  }
  const auto next = state_.tokens(lane.slot).subspan(static_cast<size_t>(start) + 1);
  const auto known = std::min(next.size(), static_cast<size_t>(count));
  draft_tokens_.insert(draft_tokens_.end(), next.begin(), next.begin() + static_cast<std::ptrdiff_t>(known));
}

void Engine::fill_inputs(std::span<const LaneInput> inputs, std::span<const Draw> draws) {
  auto* token = in_.tokens.host.as<int32_t>();
  for (const LaneInput& in : inputs) token = std::copy(in.tokens.begin(), in.tokens.end(), token);
  fill_positions(in_.positions, lanes_);
  in_.lanes.fill(lanes_.data(), lanes_.size());
  if (lags_or_tries()) in_.trials.fill(trials_.data(), trials_.size());
  for (size_t i = 0; i < draws.size(); ++i) {
    in_.draw_rows.host.as<int32_t>()[i] = draws[i].row;
    reinterpret_cast<SampleParams*>(in_.params.host.data)[i] = draws[i].params;
  }
  gather_ngrams();
  fill_tables();
  if (!has_draft_head()) return;
  if (!draft_lanes_.empty()) fill_draft_rows();
  list_kept_stacks(draws);
}

// The last row of every lane that tries none waits for the draft head. Where it is drawn from it is kept on the way,
// unless rows that are absorbed still hold the places.
void Engine::list_kept_stacks(std::span<const Draw> draws) {
  auto* keep = in_.keep.host.as<int32_t>();
  std::fill_n(keep, draws.size(), -1);
  size_t draw = 0;
  for (size_t i = 0; i < lanes_.size(); ++i) {
    const int32_t last = lanes_[i].first_row + lanes_[i].rows - 1, place = last_place(lanes_[i].slot);
    while (draw < draws.size() && draws[draw].row < last) ++draw;
    if (trials_[i].tried > 0) continue;
    if (draft_lanes_.empty() && draw < draws.size() && draws[draw].row == last)
      keep[draw] = place;
    else
      late_rows_.push_back(last), late_places_.push_back(place);
  }
  if (late_rows_.empty()) return;
  place_late_rows(static_cast<int64_t>(late_rows_.size()));
  in_.late_rows.fill(late_rows_.data(), late_rows_.size());
  in_.late_places.fill(late_places_.data(), late_places_.size());
}

// Of the stack of the sequence's last row.
int32_t Engine::last_place(int32_t slot) const { return state_.stack_place(slot, state_.length(slot) - 1); }

void Engine::clear_draft_rows() {
  late_rows_.clear(), late_places_.clear();
  draft_rows_.clear(), draft_lanes_.clear(), draft_tokens_.clear(), from_last_.clear(), from_stack_.clear();
}

void Engine::fill_draft_rows() {
  in_.draft_tokens.fill(draft_tokens_.data(), draft_tokens_.size());
  fill_positions(in_.draft_positions, draft_lanes_);
  in_.draft_lanes.fill(draft_lanes_.data(), draft_lanes_.size());
  in_.from_last.fill(from_last_.data(), from_last_.size());
  in_.from_stack.fill(from_stack_.data(), from_stack_.size());
}

void Engine::gather_ngrams() {
  size_t index = 0;
  for (const Layer& l : weights_.layers) {
    if (!l.ple) continue;
    const NgramTable& table = l.ple->table;
    const int64_t heads = l.ple->hash.heads(), bytes = table.row_bytes();
    std::byte* to = in_.ngram[index++].host.data;
    std::vector<int64_t> rows(heads);
    for (const Lane& lane : lanes_) {
      const std::span<const int32_t> history = state_.tokens(lane.slot);
      for (int32_t i = 0; i < lane.rows; ++i) {
        l.ple->hash.rows(history.first(lane.start + i + 1), rows.data());
        for (int64_t h = 0; h < heads; ++h, to += bytes) std::memcpy(to, table.row(rows[h]), bytes);
      }
    }
  }
}

bool Engine::lags_or_tries() const {
  return std::any_of(trials_.begin(), trials_.end(), [](const Trial& t) { return t.kept > 0 || t.tried > 0; });
}

Batch Engine::make_batch(const Staged& lane_table, const Staged& positions, std::span<const Lane> lanes) const {
  Batch batch;
  batch.lanes = lanes;
  batch.lane_table = lane_table.device, batch.positions = positions.device;
  batch.block_table = page_table(0);
  if (state_.host_tier()) batch.kv_table = page_table(1);
  int64_t most = 0;
  for (const Lane& lane : lanes) {
    batch.rows += lane.rows;
    most = std::max<int64_t>(most, lane.start + lane.rows);
  }
  batch.most_positions = positions_bound(most);
  return batch;
}

}  // namespace fnx
