// Recorded rounds of an engine, by everything that their launches depend on.
#pragma once

#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>

#include "kernels/ops.h"

namespace fnx {

struct GraphCounters {
  int64_t captures = 0, replays = 0, eager = 0, failed = 0;
  int64_t firsts = 0;  // eager rounds that were the first of their key
  uint64_t bytes = 0;  // device memory of the graphs that are kept, as measured
};

// Shapes and choices of a round. Addresses do not change while an engine lives, and what a launch reads from memory
// (tokens, positions, slots, pages, seeds) is no part of it.
struct RoundKey {
  int64_t rows = 0, lanes = 0, draws = 0, draft_rows = 0, draft_lanes = 0, most_positions = 0, valid = 0;
  int64_t draft_steps = 0;  // of a proposal
  bool greedy = false, trials = false, ahead = false;
  auto operator<=>(const RoundKey&) const = default;
};

class Communicator;

class GraphCache {
 public:
  // The first `inject_failures` captures fail, for tests of what follows; with ranks, those of the last one, and a
  // recording that fails on one rank is dropped by all.
  GraphCache(Backend& backend, bool enabled, int64_t inject_failures, Communicator* ranks = nullptr);

  // Replays the key's graph; false when there is none, or none of any key (`recordable` false): then the caller runs
  // the round and calls record().
  bool replay(const RoundKey& key, bool recordable, Stream& stream);
  // Records the round for later, but not a key's first, for many keys come once. A failure pauses the key for 8 of its
  // rounds, doubling to 128, and is only counted.
  void record(const RoundKey& key, Stream& stream, const std::function<void()>& work);
  const GraphCounters& counters() const { return counters_; }

 private:
  struct Entry {
    std::unique_ptr<Graph> graph;
    bool seen = false;
    int64_t pause = 0, next_pause = 8, used = 0;
  };
  void drop_oldest();

  Backend& backend_;
  Communicator* ranks_;
  bool enabled_;
  int64_t inject_failures_, clock_ = 0;
  std::map<RoundKey, Entry> entries_;
  GraphCounters counters_;
};

}  // namespace fnx
