#include "tests/support/outcome.h"

#include <doctest/doctest.h>

namespace fnx::test {

Outcome run_to_end(Engine& engine, const std::vector<Request>& requests, const SchedulerOptions& options,
                   SchedulerEvents events) {
  Outcome out;
  out.tokens.resize(requests.size()), out.logits.resize(requests.size()), out.states.resize(requests.size());
  events.token = [&](size_t i, int32_t t) { out.tokens[i].push_back(t); };
  events.logits = [&](size_t i, std::span<const float> row) {
    out.logits[i].insert(out.logits[i].end(), row.begin(), row.end());
  };
  events.closing = [&](size_t i, int32_t slot) {
    engine.settle(slot);
    out.states[i] = engine.state().dump(slot);
  };
  out.stats = run_requests(engine, requests, options, events);
  out.graphs = engine.graph_counters();
  out.traffic = engine.state().traffic();
  return out;
}

void check_same(const Outcome& got, const Outcome& want) {
  CHECK(got.tokens == want.tokens);
  CHECK(got.logits == want.logits);
  CHECK(got.states == want.states);
}

}  // namespace fnx::test
