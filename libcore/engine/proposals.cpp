// Drafts: what the draft head absorbs after a verified round, the chain of tokens that it proposes, and bringing states
// up to date.
#include <algorithm>
#include <numeric>

#include "kernels/error.h"
#include "libcore/engine/engine.h"

namespace fnx {

void Engine::place_proposal(int64_t rows, int64_t lanes, const std::vector<int64_t>& step_lanes) {
  staging_.begin();
  if (has_draft_head()) {
    in_.keep = staging_.place(DType::I32, {rows});
    place_draft_rows(rows, lanes);
  }
  in_.first_drafts = staging_.place(DType::I32, {step_lanes.empty() ? 0 : step_lanes[0]});
  const int64_t draws = std::accumulate(step_lanes.begin(), step_lanes.end(), int64_t{0});
  in_.params = staging_.place(DType::U8, {draws, sizeof(SampleParams)});
  chain_.resize(step_lanes.size());
  for (size_t j = 0; j < step_lanes.size(); ++j) {
    chain_[j].positions = staging_.place(DType::I32, {step_lanes[j]});
    chain_[j].lane_table = staging_.place(DType::I32, {step_lanes[j], 4});
  }
  place_tables();
}

// `order` lists the proposals by falling depth, so that every step of the chain goes on with the first of its rows.
void Engine::stage_proposal(std::span<const Proposal> proposals, std::span<const size_t> order) {
  clear_draft_rows();
  std::vector<int32_t> last_rows;
  for (const Proposal& p : proposals) {
    const Lane& lane = lanes_[static_cast<size_t>(p.lane)];
    const int32_t tried = trials_[static_cast<size_t>(p.lane)].tried;
    state_.keep(lane.slot, p.kept);
    const auto length = static_cast<int32_t>(state_.length(lane.slot));
    if (p.depth > 0) state_.reserve(lane.slot, length + p.depth - 1);
    const auto first = static_cast<int32_t>(draft_tokens_.size());
    if (tried > 0) {
      // Rows that were not kept go along, so that launches depend on what was tried alone: their places are free again.
      Lane rows = lane;
      rows.first_row += lane.rows - tried - 1;
      add_draft_rows(rows, 0, tried + 1, length - p.kept - 1);
      last_rows.push_back(first + p.kept);
    } else {
      add_draft_rows(lane, 1, 1, length - 1);
      last_rows.push_back(first);
    }
    draft_tokens_.resize(from_last_.size(), p.next);
    state_.set_waiting(lane.slot, 1, p.next);
  }
  std::vector<int64_t> step_lanes;
  for (int32_t j = 0; j < (order.empty() ? 0 : proposals[order[0]].depth); ++j)
    step_lanes.push_back(
        std::count_if(proposals.begin(), proposals.end(), [&](const Proposal& p) { return p.depth > j; }));
  place_proposal(static_cast<int64_t>(draft_tokens_.size()), static_cast<int64_t>(draft_lanes_.size()), step_lanes);
  fill_draft_rows();
  std::fill_n(in_.keep.host.as<int32_t>(), in_.keep.host.size(), -1);
  for (size_t i = 0; i < proposals.size(); ++i) {
    const auto lane = static_cast<size_t>(proposals[i].lane);
    if (trials_[lane].tried > 0) in_.keep.host.as<int32_t>()[last_rows[i]] = last_place(lanes_[lane].slot);
  }
  fill_tables();
  auto* params = reinterpret_cast<SampleParams*>(in_.params.host.data);
  for (size_t j = 0; j < chain_.size(); ++j) {
    ChainStep& step = chain_[j];
    step.lanes.clear();
    for (int32_t i = 0; i < step_lanes[j]; ++i) {
      const Proposal& p = proposals[order[static_cast<size_t>(i)]];
      const int32_t slot = draft_lanes_[order[static_cast<size_t>(i)]].slot;
      const auto length = static_cast<int32_t>(state_.length(slot)), ahead = static_cast<int32_t>(j);
      // Row length - 1 takes the token that follows the sequence and proposes the one behind it.
      step.lanes.push_back({slot, i, 1, length - 1 + ahead});
      if (j == 0) in_.first_drafts.host.as<int32_t>()[i] = last_rows[order[static_cast<size_t>(i)]];
      *params = p.params;
      params++->position = length + 1 + ahead;
    }
    fill_positions(step.positions, step.lanes);
    step.lane_table.fill(step.lanes.data(), step.lanes.size());
  }
  staging_.send(*stream_);
  draft_batch_ = make_batch(in_.draft_lanes, in_.draft_positions, draft_lanes_);
  int64_t most = draft_batch_.most_positions;
  for (ChainStep& step : chain_) {
    step.batch = make_batch(step.lane_table, step.positions, step.lanes);
    most = std::max(most, step.batch.most_positions);
  }
  draft_batch_.most_positions = most;
  for (ChainStep& step : chain_) step.batch.most_positions = most;
}

void Engine::launch_proposal(int64_t valid, bool greedy) {
  const bool here = runs_draft_head();
  if (here) {
    gather_draft_stacks(kept_stacks(in_.keep.device));
    absorb_drafts();
  }
  int64_t done = 0;
  for (size_t j = 0; j < chain_.size(); ++j) {
    const int64_t D = chain_[j].batch.rows;
    const View stacks = a_.gather.rows(0, D), sampled = a_.sampled.rows(0, D);
    if (here && j == 0) backend_.gather(*stream_, in_.first_drafts.device, a_.draft_stack, stacks, {});
    if (here && j > 0) run_draft_head(sampled, stacks, chain_[j].batch, stacks);  // on its own output
    const View hidden = a_.head_in.rows(0, D), logits = a_.draw_logits.rows(0, D);
    if (here) mix(weights_.mtp->mixer, stacks, hidden);
    share_draft(hidden);
    head(hidden, logits);
    backend_.sample(*stream_, valid, greedy, in_.params.device.rows(done, D), logits, sampled);
    backend_.copy(*stream_, drawn_.view(DType::I32, {done + D}).rows(done, D), sampled);
    done += D;
  }
}

std::vector<std::vector<int32_t>> Engine::propose(std::span<const Proposal> proposals, int64_t valid) {
  std::vector<std::vector<int32_t>> drafts(proposals.size());
  if (!has_draft_head()) {
    for (const Proposal& p : proposals) state_.keep(lanes_[static_cast<size_t>(p.lane)].slot, p.kept);
    return drafts;
  }
  if (proposals.empty()) return drafts;
  std::vector<int32_t> waiting;
  for (const Proposal& p : proposals)
    if (trials_[static_cast<size_t>(p.lane)].tried == 0) waiting.push_back(lanes_[static_cast<size_t>(p.lane)].slot);
  catch_up(waiting);
  std::vector<size_t> order(proposals.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return proposals[a].depth > proposals[b].depth; });
  stage_proposal(proposals, order);
  const bool greedy =
      std::all_of(proposals.begin(), proposals.end(), [](const Proposal& p) { return p.params.temperature <= 0; });
  RoundKey key;
  for (const ChainStep& step : chain_) key.draws += step.batch.rows;
  key.draft_rows = draft_batch_.rows, key.draft_lanes = static_cast<int64_t>(draft_lanes_.size());
  key.most_positions = draft_batch_.most_positions, key.valid = valid;
  key.draft_steps = static_cast<int64_t>(chain_.size()), key.greedy = greedy;
  // Chains of several lengths have too many shapes to be worth a recording each.
  const bool even = proposals[order.front()].depth == proposals[order.back()].depth;
  if (runs_draft_head() && weights_.pools) weights_.pools->begin(*stream_, pool_choices(draft_batch_.rows), 0, true);
  run_round(key, even, [&] { launch_proposal(valid, greedy); });
  if (chain_.empty()) return drafts;
  wait();
  const auto* ids = drawn_.view(DType::I32, {key.draws}).as<int32_t>();
  for (const ChainStep& step : chain_)
    for (int64_t i = 0; i < step.batch.rows; ++i) drafts[order[static_cast<size_t>(i)]].push_back(*ids++);
  return drafts;
}

void Engine::settle(int32_t slot) {
  const int32_t waiting = state_.waiting(slot, -1), lag = state_.lag(slot);
  if (waiting > 1) catch_up({&slot, 1});
  if (lag == 0) return;
  clear_draft_rows();
  lanes_ = {{slot, 0, 0, static_cast<int32_t>(state_.length(slot))}};
  trials_ = {{lag, 0}};
  place(0, 1, 0, 0, 0);
  in_.lanes.fill(lanes_.data(), 1);
  in_.trials.fill(trials_.data(), 1);
  fill_tables();
  staging_.send(*stream_);
  batch_ = make_batch(in_.lanes, in_.positions, lanes_);
  batch_.trials = in_.trials.device;
  const auto none = [](const View& v) { return v.rows(0, 0); };
  size_t ple = 0;
  for (int64_t l = 0; l < config().layers(); ++l) {
    const Layer& layer = weights_.layers[static_cast<size_t>(l)];
    if (layer.ple)
      backend_.ple_mix(*stream_, layer.ple->ops, batch_, none(a_.ple_key), none(a_.ple_value), state_.ple(ple++),
                       none(a_.stack));
    if (layer.gdn)
      backend_.gdn(*stream_, layer.gdn->ops, batch_, none(a_.qkv), none(a_.z), none(a_.b), none(a_.a), state_.gdn(l),
                   none(a_.gdn_out));
  }
  state_.caught_up(slot);
}

void Engine::catch_up(std::span<const int32_t> slots) {
  while (true) {
    clear_draft_rows();
    int64_t room = options_.max_rows;
    for (const int32_t slot : slots) {
      const int32_t waiting = state_.waiting(slot, -1);
      if (waiting <= 1 || room == 0) continue;
      const auto count = static_cast<int32_t>(std::min<int64_t>(waiting - 1, room));
      const auto length = static_cast<int32_t>(state_.length(slot));
      add_draft_rows({slot, 0, 0, length}, count, count, length - waiting);
      state_.set_waiting(slot, waiting - count, -1);
      room -= count;
    }
    if (draft_lanes_.empty()) return;
    if (!runs_draft_head()) continue;
    staging_.begin();
    place_draft_rows(options_.max_rows - room, static_cast<int64_t>(draft_lanes_.size()));
    place_tables();
    fill_draft_rows();
    fill_tables();
    staging_.send(*stream_);
    draft_batch_ = make_batch(in_.draft_lanes, in_.draft_positions, draft_lanes_);
    // In waves, however many: streaming would empty the pools of the rounds.
    if (weights_.pools) weights_.pools->begin(*stream_, 0, 0, true);
    gather_draft_stacks({});
    absorb_drafts();
  }
}

}  // namespace fnx
