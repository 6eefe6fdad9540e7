// Runs requests to their ends: several sequences in one forward, prompts in chunks, one draw a sequence and step.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "libcore/engine/draft_policy.h"
#include "libcore/engine/engine.h"

namespace fnx {

struct Request {
  std::vector<int32_t> prompt;    // one token or more
  int64_t max_tokens = 128;       // to generate
  std::vector<int32_t> stop_ids;  // generation ends with the first of these, which is kept
  SampleParams sampling;          // `stream` and `position` are set by the scheduler
  // Prompt lengths, ascending, at which later requests go on; and the request, earlier in the list, and the length from
  // which this one does. A source that ended before it came so far is done without.
  std::vector<int64_t> save_at;
  size_t reuse_of = 0;
  int64_t reuse_tokens = 0;  // 0: none; below the prompt's length
};

enum class Finish : uint8_t { Length, Stop, Interrupted };
constexpr const char* finish_name(Finish f) {
  return f == Finish::Length ? "length" : f == Finish::Stop ? "stop" : "interrupted";
}

struct SchedulerOptions {
  int64_t chunk_rows = 256;   // prompt rows of one sequence in one forward
  int64_t parallel = 1;       // sequences that run at once
  int64_t valid_ids = 0;      // ids at or above are never drawn; 0: the whole vocabulary
  bool all_logits = false;    // report the logits of every row, not of those that predict generated tokens
  bool draft_logits = false;  // report the draft head's logits of every absorbed row; not while drafting
  DraftOptions draft;         // at most as many tokens as the engine's state can take back
  // What earlier runs on the engine measured, with the same draft options, and this one adds to; null: nothing.
  DraftPolicy* policy = nullptr;
};

// What a run reports while it goes. Rows are reported in order within a request; requests may interleave.
struct SchedulerEvents {
  std::function<void(size_t request, int32_t token)> token;
  std::function<void(size_t request, Finish)> finished;
  std::function<void(size_t request, std::span<const float> logits)> logits;        // one row [V]
  std::function<void(size_t request, std::span<const float> logits)> draft_logits;  // one row [V]
  std::function<void(int64_t done, int64_t total)> prompt_rows;                     // over all requests
  std::function<bool()> stop;                                                       // asked before every step
  // May change what was drafted, whose first token would be the sequence's `position`-th: for tests.
  std::function<void(size_t request, int64_t position, std::span<int32_t> drafts)> drafts;
  std::function<void(size_t request, int32_t slot)> closing;  // before a sequence that ended is closed
};

struct SchedulerStats {
  int64_t forwards = 0, prompt_rows = 0, decode_rows = 0;
  int64_t selecting_rows = 0;  // rows with more complete index blocks than their budget: attention is sparse there
  std::vector<double> prompt_ns, decode_ns;  // one sample a forward; a forward with any prompt row counts as prompt
  std::vector<double> first_token_ns;        // one a request, from the start of the run
  std::vector<double> started_ns;            // one a request, likewise
  int64_t snapshots = 0, reused_requests = 0, reused_tokens = 0;
  uint64_t snapshot_bytes = 0;           // of all of them; what nobody goes on from any more is dropped
  int64_t drafted = 0, drafts_kept = 0;  // tokens; decode_rows counts rows that stayed
  std::vector<DraftRound> draft_rounds;  // decode rounds without prompts in order, when drafting
};

// Number of tokens that the KV pool needs for these requests: pass to StateOptions.
StateOptions state_for(std::span<const Request> requests, int64_t parallel);
// Rows of their largest forward: a chunk of a prompt of each sequence, or what each verifies. Pass to EngineOptions.
int64_t max_rows_for(std::span<const Request> requests, int64_t parallel, int64_t chunk_rows, int64_t drafts);

// Lets every request go on from the longest prefix, of `least` tokens or more, that it shares with an earlier one.
void plan_reuse(std::span<Request> requests, int64_t least);

SchedulerStats run_requests(Engine& engine, std::span<const Request> requests, const SchedulerOptions& options,
                            const SchedulerEvents& events);

}  // namespace fnx
