#include <doctest/doctest.h>

#include "libcore/cli/prompts.h"
#include "libcore/engine/scheduler.h"
#include "libcore/engine/workload.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

Workload work_of(size_t sequences, int64_t length, int64_t rounds) {
  Workload work;
  for (size_t i = 0; i < sequences; ++i) work.prompts.push_back(made_up_prompt(length, 4000, i));
  work.rounds = rounds;
  work.hash_logits = true;
  return work;
}

WorkloadRun run_of(const Workload& work) {
  EngineOptions o;
  o.state = work.state();
  o.max_rows = work.max_rows();
  Engine engine(tiny_weights(), cpu_backend(), o);
  const WorkloadRun first = run_workload(engine, work);
  // Sequences are fresh each time.
  CHECK(different_rounds(first, run_workload(engine, work)) == 0);
  return first;
}

}  // namespace

TEST_CASE("workload: draws what the scheduler draws, and times and hashes every round") {
  const Workload work = work_of(3, 20, 4);
  const WorkloadRun run = run_of(work);
  REQUIRE(run.tokens.size() == 3 * 5);
  CHECK(run.logits_hashes.size() == 3 + 4);
  CHECK(run.round_ns.size() == 4);
  CHECK(run.prompts_ns > 0);
  CHECK(run.rounds_ns() > 0);
  std::vector<Request> requests;
  for (const auto& p : work.prompts) {
    Request r;
    r.prompt = p;
    r.max_tokens = 5;
    requests.push_back(r);
  }
  auto engine = tiny_engine(3, 64);
  std::vector<std::vector<int32_t>> want(3);
  SchedulerEvents events;
  events.token = [&](size_t i, int32_t t) { want[i].push_back(t); };
  SchedulerOptions options;
  options.parallel = 3;
  run_requests(*engine, requests, options, events);
  for (size_t i = 0; i < 3; ++i)
    for (size_t t = 0; t < 5; ++t) CHECK(run.tokens[t * 3 + i] == want[i][t]);
}

TEST_CASE("workload: chunks change no hash, and a run of other bits is told from it") {
  Workload work = work_of(1, 50, 3);
  const WorkloadRun whole = run_of(work);
  work.chunk_rows = 7;
  CHECK(different_rounds(whole, run_of(work)) == 0);
  work.prompts[0][10] ^= 1;
  CHECK(different_rounds(whole, run_of(work)) == 4);
  WorkloadRun other = whole;
  other.logits_hashes[2] = "";
  CHECK(different_rounds(whole, other) == 1);
  other = whole;
  other.tokens[1] += 1;
  CHECK(different_rounds(whole, other) == 1);
  other.tokens.pop_back();
  CHECK(different_rounds(whole, other) == 4);
}

TEST_CASE("workload: stops before the next forward when asked, and closes its sequences") {
  const Workload work = work_of(2, 10, 8);
  EngineOptions o;
  o.state = work.state();
  o.max_rows = work.max_rows();
  Engine engine(tiny_weights(), cpu_backend(), o);
  int asked = 0;
  const WorkloadRun run = run_workload(engine, work, [&] { return ++asked > 4; });
  CHECK(run.stopped);
  CHECK(run.tokens.size() == 2 + 2 * 2);
  CHECK_FALSE(run_workload(engine, work).stopped);
}
