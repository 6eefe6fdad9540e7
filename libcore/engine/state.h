// What a sequence is between two forwards: recurrent states by slot, keys and values in pages, tokens on the host.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "libcore/engine/page_pool.h"
#include "libcore/engine/weights.h"

namespace fnx {

struct StateOptions {
  int64_t slots = 1;            // sequences that may live at once
  int64_t tokens = 0;           // KV capacity over all of them, rounded up to pages
  int64_t max_tokens = 0;       // of one sequence
  DType kv_dtype = DType::F32;  // F32 or BF16
  bool draft_head = false;      // also the draft head's caches
  int64_t trials = 0;           // most rows of a forward that a sequence may take back
  int64_t waiting = 512;        // most rows of a sequence that wait for the draft head, where rows may be tried
  int64_t device_tokens = 0;    // whose keys and values stay on the device, rounded up to pages; 0: all
};

// Bytes and pages between the device and the host tier.
struct PageTraffic {
  PageCounts pages;
  int64_t staged = 0;         // brought back for one layer's attention
  int64_t rows_in_place = 0;  // rows whose attention read pages where they are in host memory
  uint64_t spilled_bytes = 0, staged_bytes = 0;
};

// Everything that defines a sequence, on the host.
struct Snapshot {
  std::vector<int32_t> tokens;
  std::vector<std::byte> states;  // in the order of StatePool::dump
  uint64_t bytes() const { return tokens.size() * sizeof(int32_t) + states.size(); }
};

// Owned by one engine; not thread-safe.
class StatePool {
 public:
  // `stream` is the engine's: what the pool does stands in order with the forwards.
  StatePool(const ModelConfig& config, Backend& backend, Stream& stream, const StateOptions& options);

  // A fresh sequence: zero states, no tokens. Throws Unsupported when every slot is in use.
  int32_t open();
  void close(int32_t slot);
  // Makes pages for the tokens that come next and appends them to the history. Throws Unsupported, changing nothing,
  // when the pool or the sequence's limit is too small.
  void append(int32_t slot, std::span<const int32_t> tokens);
  // Makes pages for a sequence of that many tokens. Throws as append() does.
  void reserve(int32_t slot, int64_t length);

  // The last `tried` of the tokens appended last are on trial: keep() ends that, which must come before the next
  // append(). Their rows are in the caches; recurrent states lag behind, see Trial in kernels/ops.h.
  void try_rows(int32_t slot, int32_t tried);
  // Cuts the sequence off behind the first `kept` of the tokens on trial.
  void keep(int32_t slot, int32_t kept);
  // Rows that the states lag behind the tokens: the next forward's first work, which calls caught_up().
  int32_t lag(int32_t slot) const { return sequences_[slot].lag; }
  void caught_up(int32_t slot) { sequences_[slot].lag = 0; }
  // Rows at the sequence's end that the draft head has not absorbed when `token` follows, -1: any; at most
  // waiting_rows().
  int32_t waiting(int32_t slot, int32_t token) const {
    const Sequence& s = sequences_[slot];
    return s.absorbed >= 0 && s.absorbed == token ? 0 : s.waiting;
  }
  // As many wait now. One row may have been absorbed with the token that was drawn, -1: it was not.
  void set_waiting(int32_t slot, int32_t rows, int32_t absorbed) {
    sequences_[slot].waiting = rows, sequences_[slot].absorbed = absorbed;
  }
  // Where rows may be tried plain rounds let rows wait, so that one pass of the draft head serves many.
  int64_t waiting_rows() const { return waiting_rows_; }

  int64_t length(int32_t slot) const { return static_cast<int64_t>(sequences_[slot].tokens.size()); }
  std::span<const int32_t> tokens(int32_t slot) const { return sequences_[slot].tokens; }
  const StateOptions& options() const { return options_; }
  int64_t page_tokens() const { return page_tokens_; }
  // As a pool of these options has them.
  static int64_t page_tokens_of(const ModelConfig& config);
  static PagePool page_pool(const StateOptions& options, int64_t page_tokens);
  int64_t device_bytes() const { return bytes_of(buffers_); }
  int64_t host_bytes() const { return bytes_of(host_buffers_); }  // of the host tier
  // Whose tables forwards take a copy of.
  const PagePool& pages() const { return pages_; }

  // Some keys and values may be in pinned host memory: the older pages of sequences. Attention may read them there; or,
  // for many rows, from staged(), after stage().
  bool host_tier() const { return pages_.tiered(); }
  // A lane of more rows than this is staged; rounds of up to as many a lane are the ones that may be recorded.
  static constexpr int64_t kInPlaceRows = 16;
  bool stages(const Lane& lane) const { return lane.rows > kInPlaceRows && pages_.spilled(lane.slot) > 0; }
  // Copies one cache's pages of a sequence in host memory to the device, in the stream's order.
  void stage(int32_t slot, const KvCache& kv);
  // That cache, with what was staged as its far pages: numbered by the last of the tables.
  KvCache staged(const KvCache& kv) const;
  // Notes a lane of the trunk, for the traffic.
  void count(const Lane& lane) {
    if (!stages(lane) && pages_.spilled(lane.slot) > 0) traffic_.rows_in_place += lane.rows;
  }
  // Checked: throws Internal when bytes and pages do not agree.
  PageTraffic traffic() const;

  // By layer; only those of the layer's kind have buffers. The draft head's cache is the last.
  const GdnState& gdn(int64_t layer) const { return gdn_[layer]; }
  const KvCache& kv(int64_t layer) const { return kv_[layer]; }
  const KvCache& draft_kv() const { return kv_.back(); }
  View ple(size_t index) const { return ple_[index]; }  // F32 [slots, (taps - 1) * dilation + trials, n * H]
  // F32 [slots * waiting_rows(), n, H]: stacks of the last rows of each slot, at stack_place().
  View last_stacks() const { return last_stack_; }
  int32_t stack_place(int32_t slot, int64_t position) const {
    return static_cast<int32_t>(slot * waiting_rows() + position % waiting_rows());
  }

  // Every byte that defines the sequence, in one order that does not depend on where its pages lie. Its states must not
  // lag.
  std::vector<std::byte> dump(int32_t slot) const;
  // The same as a thing to go on from, any number of times. Waits for the device.
  Snapshot save(int32_t slot) const;
  // Opens a sequence that goes on where the snapshot stands. Throws as open() and append() do, and Input for a snapshot
  // of another shape.
  int32_t restore(const Snapshot& snapshot);

 private:
  static constexpr int64_t kWaiting = 2048, kLeastWaiting = 64;  // of all sequences; of each
  struct Sequence {
    bool open = false;
    std::vector<int32_t> tokens;
    int32_t on_trial = 0, lag = 0, waiting = 0, absorbed = -1;
  };
  View make(DType dtype, std::initializer_list<int64_t> dims, Space space = Space::Device);
  static int64_t bytes_of(const std::vector<Buffer>& buffers);
  void spill(std::span<const PagePool::Move> moves);
  int64_t caches() const;  // with keys and values
  void each_part(int32_t slot, const std::function<void(const View&)>& part) const;
  size_t saved_bytes(int32_t slot) const;  // of all parts

  const ModelConfig& config_;
  Backend& backend_;
  StateOptions options_;
  Stream& stream_;
  int64_t page_tokens_ = 0, waiting_rows_ = 1;
  PagePool pages_;
  std::vector<Buffer> buffers_, host_buffers_;
  std::vector<GdnState> gdn_;
  std::vector<KvCache> kv_;
  std::vector<View> ple_;
  View last_stack_;
  View staged_keys_, staged_values_;  // as keys, for the pages of one sequence
  PageTraffic traffic_;
  std::vector<Sequence> sequences_;
};

}  // namespace fnx
