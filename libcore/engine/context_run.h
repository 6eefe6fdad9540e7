// Sequences that grow side by side through a long context, with decode rounds timed along it.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libcore/engine/engine.h"

namespace fnx {

struct ContextWork {
  std::vector<std::vector<int32_t>> texts;  // one a sequence, as long as the last point
  std::vector<int64_t> points;              // tokens of each sequence, ascending: the rounds before them are timed
  int64_t chunk_rows = 4096;                // prompt rows of one forward, which are one sequence's
  int64_t rounds = 16;                      // timed at a point, of one token a sequence
  // Asked of each sequence at the end, one after the other, and as many tokens of an answer taken for each.
  std::vector<std::vector<std::vector<int32_t>>> questions;
  int64_t answer_tokens = 8;
  bool hash_states = false;
  std::function<void(int64_t rows)> after;  // called between what is timed, with the rows so far
  std::function<void(int64_t tokens, const std::vector<double>& round_ns)> measured;  // called behind a point's rounds
  std::function<bool()> stop;                                                         // asked before every forward

  // Rounds that are run before those that are timed, for pools and recordings to settle.
  static constexpr int64_t kWarmRounds = 4;
  int64_t rounds_at_point() const { return kWarmRounds + rounds; }
  // For EngineOptions::state, and the rows of the largest forward.
  StateOptions state() const;
  int64_t max_rows() const;
};

struct ContextRun {
  struct Point {
    int64_t tokens = 0;
    std::vector<double> round_ns;  // each until its tokens are on the host
  };
  std::vector<Point> points;
  std::vector<double> prompt_ns;                           // of each sequence, all its prompt forwards
  std::vector<int32_t> tokens;                             // drawn, in order
  std::vector<std::string> logits_hashes;                  // one a draw of a prompt, one a point's last round
  std::vector<std::string> state_hashes;                   // one a sequence
  std::vector<std::vector<std::vector<int32_t>>> answers;  // as questions
  bool stopped = false;
};

// Opens the sequences and closes them. Throws Internal for points that leave no room for their rounds.
ContextRun run_context(Engine& engine, const ContextWork& work);

}  // namespace fnx
