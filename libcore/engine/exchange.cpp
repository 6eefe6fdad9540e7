// What the engine does with other ranks: expert outputs and head columns are gathered and copied to their places, so
// that every sum is the one of a rank alone.
#include <fmt/format.h>

#include "kernels/error.h"
#include "libcore/dist/communicator.h"
#include "libcore/engine/engine.h"

namespace fnx {

namespace {
constexpr int64_t kExchangeRows = 1024;  // rows whose slots are exchanged at a time
}

void Engine::make_exchange() {
  const Shard& shard = weights_.shard;
  Communicator* const ranks = options_.ranks;
  const int rank = ranks ? ranks->rank() : shard.rank, world = ranks ? ranks->world() : shard.world;
  if (rank != shard.rank || world != shard.world)
    throw Error(ErrorKind::Internal,
                fmt::format("weights of rank {} of {} on rank {} of {}", shard.rank, shard.world, rank, world));
  if (world == 1) return;
  const ModelConfig& c = config();
  a_.parts =
      make(DType::F32, {world, std::min(options_.max_rows, kExchangeRows), c.experts_per_token + 1, c.hidden_size});
  if (weights_.head_columns.empty()) return;
  const int64_t widest = *std::max_element(weights_.head_columns.begin(), weights_.head_columns.end());
  a_.head_parts = make(DType::F32, {world + 1, most_draws(), widest});
}

void Engine::all_gather(const View& own, const View& all) {
  if (options_.ranks != nullptr && stream_->running()) options_.ranks->all_gather(*stream_, own, all);
}

// What the draft head of rank 0 gave: every rank draws from it.
void Engine::share_draft(const View& hidden) {
  if (options_.ranks != nullptr && stream_->running()) options_.ranks->broadcast(*stream_, hidden, 0);
}

void Engine::wait() {
  stream_->synchronize();
  if (options_.ranks != nullptr) options_.ranks->check();
}

// Not for what was launched behind the draws.
void Engine::wait_drawn() {
  has_drawn_->wait();
  if (options_.ranks != nullptr) options_.ranks->check();
}

// Slots of the experts that this rank holds are there; then all are. Ranks whose experts nobody chose take part.
void Engine::exchange_slots(const MoeLayer& m, const View& ids, const View& slots) {
  if (m.per_rank == 0 || options_.plant == Plant::Add) return;
  const int64_t rows = ids.shape[0], k = ids.shape[1], hidden = slots.shape[2], most = a_.parts.shape[1];
  for (int64_t first = 0; first < rows; first += most) {
    const int64_t count = std::min(most, rows - first);
    View parts = a_.parts;
    parts.shape = {weights_.shard.world, count, k, hidden};
    const View to = slots.rows(first, count);
    all_gather(to, parts);
    backend_.take_slots(*stream_, m.per_rank, ids.rows(first, count), parts, to);
  }
  if (options_.plant == Plant::Order) {
    const View all = slots.reshape({rows * k, hidden}), spare = a_.y.rows(0, 1);
    for (int64_t i = 0; i < rows * k; i += k) {
      backend_.copy(*stream_, spare, all.rows(i, 1));
      backend_.copy(*stream_, all.rows(i, 1), all.rows(i + 1, 1));
      backend_.copy(*stream_, all.rows(i + 1, 1), spare);
    }
  }
}

// The fault of ranks that combine what they hold and add the sums.
void Engine::add_planted_parts(const View& y) {
  const int64_t rows = y.shape[0], hidden = y.shape[1];
  for (int64_t r = 0; r < rows; ++r) {
    View parts = a_.parts;
    parts.rank = 3, parts.shape = {weights_.shard.world, 1, hidden};
    const View to = y.rows(r, 1);
    all_gather(to, parts);
    backend_.copy(*stream_, to, parts.rows(0, 1).reshape({1, hidden}));
    for (int w = 1; w < weights_.shard.world; ++w)
      backend_.add(*stream_, 1, to, parts.rows(w, 1).reshape({1, hidden}), to);
  }
}

// out [n, vocabulary] = the head of hidden [n, H].
void Engine::head(const View& hidden, const View& out) {
  const std::vector<int64_t>& columns = weights_.head_columns;
  if (columns.empty()) return backend_.linear(*stream_, *weights_.lm_head, hidden, out);
  const int world = weights_.shard.world;
  const int64_t most = a_.head_parts.shape[1], widest = a_.head_parts.shape[2];
  for (int64_t first = 0; first < hidden.shape[0]; first += most) {
    const int64_t count = std::min(most, hidden.shape[0] - first);
    // [world + 1, count * widest]: the ranks' parts, then this rank's own.
    View parts = a_.head_parts;
    parts.rank = 2, parts.shape = {world + 1, count * widest};
    const auto part = [&](int64_t i, int64_t width) {
      View v = parts.rows(i, 1);
      v.shape = {count, width};
      return v;
    };
    head_shard(hidden.rows(first, count), part(world, columns[weights_.shard.rank]));
    all_gather(parts.rows(world, 1), parts.rows(0, world));
    std::vector<View> side_by_side;
    for (int w = 0; w < world; ++w) side_by_side.push_back(part(w, columns[w]));
    backend_.join_columns(*stream_, side_by_side, out.rows(first, count));
  }
}

void Engine::head_shard(const View& hidden, const View& out) {
  if (!weights_.planted_half) return backend_.linear(*stream_, *weights_.lm_head, hidden, out);
  // The planted fault: two sums over half of the inputs each, row after row, their parts in the gather's memory.
  const int64_t half = hidden.shape[1] / 2, width = out.shape[1];
  for (int64_t r = 0; r < hidden.shape[0]; ++r) {
    const View x = hidden.rows(r, 1).reshape({2, half}), y = out.rows(r, 1);
    const View rest = a_.head_parts.rows(0, 1).reshape({a_.head_parts.row_size()}).rows(0, width).reshape({1, width});
    backend_.linear(*stream_, *weights_.lm_head, x.rows(0, 1), y);
    backend_.linear(*stream_, *weights_.planted_half, x.rows(1, 1), rest);
    backend_.add(*stream_, 1, y, rest, y);
  }
}

void Engine::report_slots(const Layer& layer, const View& ids, const View& slots) {
  std::vector<int32_t> experts(ids.size());
  View to = ids;
  to.data = reinterpret_cast<std::byte*>(experts.data()), to.space = Space::Host;
  backend_.copy(*stream_, to, ids);
  slots_({layer_number(layer), ids.shape[1], experts, to_host(slots)});
}

}  // namespace fnx
