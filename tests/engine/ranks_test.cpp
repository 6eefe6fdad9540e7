// Ranks that share the tiny checkpoint against one rank: the same tokens, logits and states, byte for byte.
#include <doctest/doctest.h>

#include <chrono>
#include <cstring>
#include <mutex>
#include <thread>

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

  uint64_t requests = 0, waves = 0, streamed = 0;  // of its own pools
  bool copies_counted = false;
};

struct Text {
  std::vector<int32_t> prompt, forced;
  int64_t tokens = 0;  // to draw
};

std::vector<Text> golden_texts() {
  std::vector<Text> out;
  for (const Golden::Prompt& p : Golden::get().prompts())
    out.push_back({p.ids, p.forced(), std::min<int64_t>(24, static_cast<int64_t>(p.greedy.size()))});
  return out;
}

// Two short ones and one whose chunks of 96 rows stream offloaded experts.
std::vector<Text> few_texts() {
  std::vector<Text> out = golden_texts();
  out.resize(2);
  for (Text& t : out) t.forced.resize(24), t.tokens = 6;
  const std::vector<int32_t>& ids = Golden::get().prompt("long-1500").ids;
  out.push_back({{ids.begin(), ids.begin() + 100}, {ids.begin(), ids.begin() + 120}, 6});
  return out;
}

std::vector<std::vector<int32_t>> generate(Engine& engine, float temperature, const std::vector<Text>& texts) {
  std::vector<Request> requests;
  for (const Text& t : texts) {
    Request r;
    r.prompt = t.prompt;
    r.max_tokens = temperature > 0 ? std::min<int64_t>(8, t.tokens) : t.tokens;
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
Outcome run(Communicator* ranks, const std::vector<Text>& texts, const LoadOptions& load = {}) {
  const auto backend = make_cpu_backend({1, 0});
  LoadOptions shard = load;
  if (ranks != nullptr) shard.shard = {ranks->rank(), ranks->world()};
  shard.draft_head = false;
  const Weights weights =
      Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), *backend, shard);
  EngineOptions o;
  o.state = {4, 4 * 2048, 2048};
  o.max_rows = 1024;
  o.ranks = ranks;
  Engine engine(weights, *backend, o);
  Outcome out;
  out.greedy = generate(engine, 0, texts);
  out.seeded = generate(engine, 0.8f, texts);
  for (const Text& t : texts) {
    std::vector<float> logits;
    const int32_t slot = engine.state().open();
    feed(engine, slot, t.forced, 96, &logits);
    out.logits.push_back(xxh3_hex(logits.data(), logits.size() * sizeof(float)));
    const std::vector<std::byte> state = engine.state().dump(slot);
    out.states.push_back(xxh3_hex(state.data(), state.size()));
    engine.state().close(slot);
  }
  if (weights.pools) {
    const PoolCounters c = weights.pools->counters();
    const PoolCopies copies = weights.pools->copies();
    const StreamCounters& s = weights.pools->streamed();
    out.requests = c.requests, out.waves = c.waves, out.streamed = s.forwards;
    out.copies_counted = copies.copies[0] == c.misses + s.demand && copies.total_bytes > 0;
  }
  return out;
}

const Outcome& alone() {
  static const Outcome outcome = run(nullptr, golden_texts());
  return outcome;
}

std::vector<Outcome> same_as(const Outcome& want, int world, const std::vector<Text>& texts,
                             const LoadOptions& load = {}) {
  std::vector<Outcome> got(world);
  for (const auto& end : run_ranks(world, [&](Communicator& c) { got[c.rank()] = run(&c, texts, load); }))
    REQUIRE_MESSAGE(!end.has_value(), (end ? end->what() : ""));
  for (int r = 0; r < world; ++r) {
    CAPTURE(r);
    CHECK(got[r].greedy == want.greedy);
    CHECK(got[r].seeded == want.seeded);
    CHECK(got[r].logits == want.logits);
    CHECK(got[r].states == want.states);
  }
  return got;
}

void offloaded_same_as_alone(int world) {
  const std::vector<Text> texts = few_texts();
  const Outcome want = run(nullptr, texts);
  const int64_t held = 32 / world;
  for (const PoolPolicy policy : kPoolPolicies)
    for (const int64_t lines : {int64_t{1}, int64_t{2}, held / 2, held}) {
      CAPTURE(pool_policy_name(policy));
      CAPTURE(lines);
      LoadOptions load;
      load.pools = {lines, policy, true};
      uint64_t waves = 0;
      for (const Outcome& o : same_as(want, world, texts, load)) {
        CHECK(o.requests > 0);
        CHECK(o.copies_counted);
        CHECK((o.streamed > 0) == (2 * lines <= held));
        waves += o.waves > o.requests;
      }
      if (lines == 1) CHECK(waves == static_cast<uint64_t>(world));
    }
}

struct Drafts {
  int32_t depth = 0;
  bool automatic = false, head = true;
  int64_t lines = 0;
  float temperature = 0;
};

struct Drafted {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::string> logits, states;
  std::vector<int32_t> depths;  // of the rounds
  int64_t drafted = 0;
};

// Texts that run together.
Drafted run_drafts(Communicator* ranks, const Drafts& d) {
  const auto backend = make_cpu_backend({1, 0});
  LoadOptions load;
  if (ranks != nullptr) load.shard = {ranks->rank(), ranks->world()};
  load.pools.lines = d.lines;
  const Weights weights =
      Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), *backend, load);
  std::vector<Request> requests;
  for (const Text& t : few_texts()) {
    Request r;
    r.prompt = t.prompt;
    r.max_tokens = d.automatic ? 40 : 12;
    r.sampling.temperature = d.temperature, r.sampling.seed = 7;
    requests.push_back(r);
  }
  EngineOptions o;
  o.state = state_for(requests, 3);
  o.state.draft_head = d.head, o.state.trials = d.depth;
  o.max_rows = 3 * 96;
  o.ranks = ranks;
  Engine engine(weights, *backend, o);
  Drafted out;
  out.tokens.resize(3), out.states.resize(3);
  std::vector<std::vector<float>> logits(3);
  SchedulerEvents events;
  events.drafts = [&](size_t, int64_t, std::span<int32_t> drafts) { out.depths.push_back(std::ssize(drafts)); };
  events.token = [&](size_t i, int32_t t) {
    out.tokens[i].push_back(t);
    // The last rank finds drafting slow: its own times would have it stop.
    if (d.automatic && ranks != nullptr && ranks->rank() + 1 == ranks->world() && !out.depths.empty())
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
  };
  events.logits = [&](size_t i, std::span<const float> row) {
    logits[i].insert(logits[i].end(), row.begin(), row.end());
  };
  events.closing = [&](size_t i, int32_t slot) {
    engine.settle(slot);
    const std::vector<std::byte> state = engine.state().dump(slot);
    out.states[i] = xxh3_hex(state.data(), state.size());
  };
  SchedulerOptions options;
  options.parallel = 3, options.chunk_rows = 96;
  options.draft.most = d.depth, options.draft.fixed = !d.automatic;
  out.drafted = run_requests(engine, requests, options, events).drafted;
  for (const auto& rows : logits) out.logits.push_back(xxh3_hex(rows.data(), rows.size() * sizeof(float)));
  return out;
}

void drafted_same_as_plain(int world, std::initializer_list<Drafts> cases) {
  for (const Drafts& d : cases) {
    CAPTURE(d.depth);
    CAPTURE(d.lines);
    CAPTURE(d.temperature);
    const Drafted with_head = run_drafts(nullptr, {0, d.automatic, true, 0, d.temperature});
    const Drafted without = run_drafts(nullptr, {0, d.automatic, false, 0, d.temperature});
    std::vector<Drafted> got(world);
    for (const auto& end : run_ranks(world, [&](Communicator& c) { got[c.rank()] = run_drafts(&c, d); }))
      REQUIRE_MESSAGE(!end.has_value(), (end ? end->what() : ""));
    CHECK(got[0].drafted > 0);
    for (int r = 0; r < world; ++r) {
      CAPTURE(r);
      CHECK(got[r].tokens == with_head.tokens);
      CHECK(got[r].logits == with_head.logits);
      // The draft head's states are rank 0's.
      CHECK(got[r].states == (r == 0 ? with_head : without).states);
      CHECK(got[r].depths == got[0].depths);
    }
  }
}

}  // namespace

TEST_CASE("ranks: one rank with a communicator gives tokens, logits and states of none over all golden prompts") {
  same_as(alone(), 1, golden_texts());
}

TEST_CASE("ranks: two ranks give tokens, logits and states of one over all golden prompts") {
  same_as(alone(), 2, golden_texts());
}

TEST_CASE("ranks: four ranks give tokens, logits and states of one over all golden prompts") {
  same_as(alone(), 4, golden_texts());
}

TEST_CASE("ranks: two ranks that offload their experts, in pools of any size and either policy, give the bits of one") {
  offloaded_same_as_alone(2);
}

TEST_CASE(
    "ranks: four ranks that offload their experts, in pools of any size and either policy, give the bits of one") {
  offloaded_same_as_alone(4);
}

TEST_CASE("ranks: two ranks that draft give tokens, logits and states of one that does not, experts offloaded or not") {
  drafted_same_as_plain(2, {{1}, {3}, {3, false, true, 2}, {3, false, true, 0, 0.9f}});
}

TEST_CASE("ranks: four ranks that draft give tokens, logits and states of one that does not") {
  drafted_same_as_plain(4, {{3}});
}

TEST_CASE("ranks: drafts that are tried as they pay, by the times of rank 0, give the bits of one plain rank") {
  drafted_same_as_plain(2, {{4, true}});
}

TEST_CASE("ranks: more lines than a rank has experts are refused by number") {
  for (const auto& end : run_ranks(2, [](Communicator& c) {
         LoadOptions load;
         load.pools.lines = 17;
         run(&c, few_texts(), load);
       })) {
    REQUIRE(end.has_value());
    CHECK(std::string(end->what()).find("17 expert lines a layer: give 1 to 16") != std::string::npos);
  }
}
