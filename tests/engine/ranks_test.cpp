// Ranks that share the tiny checkpoint against one rank: the same tokens, logits and states, byte for byte.
#include <doctest/doctest.h>

#include <cstring>
#include <mutex>

#include "libcore/engine/scheduler.h"
#include "libcore/receipt/receipt.h"
#include "tests/support/golden.h"
#include "tests/support/ranks.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct Outcome {
  std::vector<std::vector<int32_t>> greedy, seeded;  // a prompt each
  std::vector<std::string> logits, states;           // hashes: every row; the state after them

  bool operator==(const Outcome&) const = default;
};

std::vector<std::vector<int32_t>> generate(Engine& engine, float temperature) {
  std::vector<Request> requests;
  for (const Golden::Prompt& p : Golden::get().prompts()) {
    Request r;
    r.prompt = p.ids;
    r.max_tokens = std::min<int64_t>(static_cast<int64_t>(p.greedy.size()), temperature > 0 ? 8 : 24);
    r.sampling.temperature = temperature, r.sampling.seed = 7;
    requests.push_back(r);
  }
  std::vector<std::vector<int32_t>> out(requests.size());
  SchedulerEvents events;
  events.token = [&](size_t i, int32_t t) { out[i].push_back(t); };
  SchedulerOptions options;
  options.parallel = engine.options().state.slots;
  run_requests(engine, requests, options, events);
  return out;
}

// A model of one rank's own, as a process of its own would have it.
Outcome run(Communicator* ranks, const LoadOptions& load = {}, Plant plant = Plant::None) {
  const auto backend = make_cpu_backend({1, 0});
  LoadOptions shard = load;
  if (ranks != nullptr) shard.shard = {ranks->rank(), ranks->world()};
  shard.draft_head = false;
  const Weights weights =
      Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), *backend, shard);
  EngineOptions o;
  o.state = {4, 4 * 2048, 2048};
  o.max_rows = 1024;
  o.ranks = ranks, o.plant = plant;
  Engine engine(weights, *backend, o);
  Outcome out;
  out.greedy = generate(engine, 0);
  out.seeded = generate(engine, 0.8f);
  for (const Golden::Prompt& p : Golden::get().prompts()) {
    std::vector<float> logits;
    const int32_t slot = engine.state().open();
    feed(engine, slot, p.forced(), 96, &logits);
    out.logits.push_back(xxh3_hex(logits.data(), logits.size() * sizeof(float)));
    const std::vector<std::byte> state = engine.state().dump(slot);
    out.states.push_back(xxh3_hex(state.data(), state.size()));
    engine.state().close(slot);
  }
  return out;
}

const Outcome& alone() {
  static const Outcome outcome = run(nullptr);
  return outcome;
}

void same_as_alone(int world) {
  const Outcome& want = alone();
  std::vector<Outcome> got(world);
  for (const auto& end : run_ranks(world, [&](Communicator& c) { got[c.rank()] = run(&c); }))
    REQUIRE_MESSAGE(!end.has_value(), (end ? end->what() : ""));
  for (int r = 0; r < world; ++r) {
    CAPTURE(r);
    CHECK(got[r].greedy == want.greedy);
    CHECK(got[r].seeded == want.seeded);
    CHECK(got[r].logits == want.logits);
    CHECK(got[r].states == want.states);
  }
}

}  // namespace

TEST_CASE("ranks: one rank with a communicator gives tokens, logits and states of none over all golden prompts") {
  same_as_alone(1);
}

TEST_CASE("ranks: two ranks give tokens, logits and states of one over all golden prompts") { same_as_alone(2); }

TEST_CASE("ranks: four ranks give tokens, logits and states of one over all golden prompts") { same_as_alone(4); }
