// What requests end in, down to the last byte of their states.
#pragma once

#include <vector>

#include "libcore/engine/scheduler.h"

namespace fnx::test {

struct Outcome {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::vector<float>> logits;
  std::vector<std::vector<std::byte>> states;  // settled
  SchedulerStats stats;
  GraphCounters graphs;
  PageTraffic traffic;
};

// Runs them all; of `events` the drafts may be given.
Outcome run_to_end(Engine& engine, const std::vector<Request>& requests, const SchedulerOptions& options,
                   SchedulerEvents events = {});

// Tokens, logits and states, as checks of the test that runs.
void check_same(const Outcome& got, const Outcome& want);

}  // namespace fnx::test
