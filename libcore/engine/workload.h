// Prompts and decode rounds of fresh sequences, timed: what the measuring tools run.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libcore/engine/engine.h"

namespace fnx {

struct Workload {
  std::vector<std::vector<int32_t>> prompts;  // one a sequence
  int64_t chunk_rows = 256;                   // prompt rows of one forward
  int64_t rounds = 0;                         // of one token a sequence, after each prompt's first token
  SampleParams sampling;                      // stream and position are set by the run; greedy unless told
  bool hash_logits = false;                   // costs a copy of every drawn row: no times are worth anything then
  // Called with what a forward drew, after each.
  std::function<void(std::span<const int32_t> drawn)> after_forward;

  // For EngineOptions::state: slots and tokens that it needs.
  StateOptions state() const;
  int64_t max_rows() const;
};

struct WorkloadRun {
  double prompts_ns = 0;                   // until every prompt's first token is on the host
  std::vector<double> round_ns;            // each until its tokens are on the host
  std::vector<int32_t> tokens;             // greedy: the prompts' first tokens, then round by round
  std::vector<std::string> logits_hashes;  // XXH3-128 of the drawn rows: one a prompt, then one a round
  bool stopped = false;

  double rounds_ns() const;  // sum
};

// Opens a sequence a prompt, reads one prompt after the other, decodes all together, closes the sequences. `stop` is
// asked before every forward.
WorkloadRun run_workload(Engine& engine, const Workload& work, const std::function<bool()>& stop = nullptr);

// How many rounds differ between two runs of one workload: in a drawn row's logits, or in its tokens. All of them count
// when one run is shorter.
int64_t different_rounds(const WorkloadRun& a, const WorkloadRun& b);

// One hash of all of a run's logits_hashes.
std::string logits_hash(const WorkloadRun& run);

// XXH3-128 of the rows that the engine's last round drew from.
std::string drawn_logits_hash(Engine& engine);

}  // namespace fnx
