// Drafted equals plain: tokens, logits and every byte of the final states, whatever was drafted and kept.
#include <doctest/doctest.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "tests/support/golden.h"
#include "tests/support/outcome.h"

using namespace fnx;
using namespace fnx::test;

namespace {

// How many of the drafts of a round are right; the others are wrong on purpose. The head's own go through at kOwn.
constexpr int32_t kOwn = -1, kByTurns = -2;

struct Case {
  int64_t sequences = 1;
  int32_t depth = 0, right = kOwn;
  float temperature = 0;
  On on = On::Cpu;
  DType kv = DType::F32;
  bool graphs = false, automatic = false;
  int64_t inject = 0, max_tokens = 16;
  bool idle = false;      // could take rows back and drafts none
  int64_t most_rows = 0;  // of a forward; 0: few
  int64_t waiting = 512;
};

std::vector<Request> requests_of(const Case& c) {
  const std::vector<const char*> names{"genesis", "capital", "eos-inside", "long-700"};
  std::vector<Request> out;
  for (int64_t i = 0; i < c.sequences; ++i) {
    std::vector<int32_t> text = Golden::get().prompt(names[static_cast<size_t>(i) % names.size()]).ids;
    // Lengths of every remainder by the block of the index; boundary tokens stay where a text has them.
    text.resize(std::min<size_t>(text.size(), 20 + static_cast<size_t>(i)));
    Request r;
    r.prompt = text;
    r.max_tokens = c.max_tokens + i % 3;
    r.sampling = {c.temperature, 0.95f, 0, 40, 7};
    out.push_back(r);
  }
  return out;
}

Outcome run(const Case& c, const Outcome* plain = nullptr) {
  const std::vector<Request> requests = requests_of(c);
  EngineOptions o;
  o.state = state_for(requests, c.sequences);
  o.state.kv_dtype = c.kv, o.state.draft_head = true, o.state.trials = c.depth, o.state.waiting = c.waiting;
  o.max_rows = c.most_rows > 0 ? c.most_rows : c.sequences * std::max(16, 1 + c.depth);
  o.graphs = c.graphs, o.inject_capture_failures = c.inject;
  Engine engine(tiny_weights(c.on), backend_on(c.on), o);
  SchedulerEvents events;
  size_t turn = 0;
  if (c.right != kOwn)
    events.drafts = [&](size_t i, int64_t position, std::span<int32_t> drafts) {
      const auto right = c.right == kByTurns ? turn++ % (drafts.size() + 1) : static_cast<size_t>(c.right);
      for (size_t j = 0; j < drafts.size(); ++j) {
        const size_t at = static_cast<size_t>(position) - requests[i].prompt.size() + j;
        const int32_t truth = plain->tokens[i].at(at);
        drafts[j] = j < right ? truth : (truth + 1) % 4000;
      }
    };
  SchedulerOptions options;
  options.chunk_rows = 16;
  options.parallel = c.sequences;
  options.draft.most = c.idle ? 0 : c.depth, options.draft.fixed = !c.automatic;
  return run_to_end(engine, requests, options, events);
}

Outcome plain_of(Case c) {
  c.depth = 0, c.right = kOwn, c.graphs = false, c.automatic = false, c.inject = 0;
  return run(c);
}

void every_acceptance_equals_plain(On on, DType kv, bool graphs) {
  for (const float temperature : {0.0f, 0.9f}) {
    const Outcome plain = plain_of({1, 0, kOwn, temperature, on, kv});
    REQUIRE(plain.states[0].size() > 100000);
    for (int32_t depth = 1; depth <= kMostDrafts; ++depth)
      for (int32_t right = kByTurns; right <= depth; ++right) {
        CAPTURE(temperature);
        CAPTURE(depth);
        CAPTURE(right);
        const Outcome drafted = run({1, depth, right, temperature, on, kv, graphs}, &plain);
        check_same(drafted, plain);
        CHECK(drafted.stats.drafted > 0);
        if (right == 0) CHECK(drafted.stats.drafts_kept == 0);
        if (right == depth) CHECK(drafted.stats.drafts_kept == drafted.stats.drafted);
        if (graphs && right >= 0 && right <= 2) CHECK(drafted.graphs.replays > 0);  // many rounds
      }
  }
}

void company_equals_plain(On on, DType kv, bool graphs) {
  for (const float temperature : {0.0f, 0.9f})
    for (int64_t sequences = 2; sequences <= 8; ++sequences) {
      CAPTURE(temperature);
      CAPTURE(sequences);
      const Outcome plain = plain_of({sequences, 0, kOwn, temperature, on, kv});
      for (const auto& [depth, right] : {std::pair{1, kOwn}, {3, kByTurns}, {8, kByTurns}}) {
        CAPTURE(depth);
        check_same(run({sequences, depth, right, temperature, on, kv, graphs}, &plain), plain);
      }
    }
}

void automatic_equals_plain(On on, DType kv, bool graphs) {
  for (const int64_t sequences : {1, 3}) {
    Case c{sequences, 4, kOwn, 0, on, kv, graphs, true};
    c.max_tokens = 60;
    const Outcome plain = plain_of(c), drafted = run(c);
    check_same(drafted, plain);
    CHECK(drafted.stats.drafted > 0);
    // The decisions are those of a policy that is told the same rounds.
    DraftPolicy policy({c.depth, false});
    int64_t plain_rounds = 0;
    for (const DraftRound& round : drafted.stats.draft_rounds) {
      CHECK(policy.decide(std::vector<DraftStream>(round.streams.begin(), round.streams.end())) == round.depth);
      policy.observe(round);
      plain_rounds += round.depth == 0;
    }
    CHECK(plain_rounds >= 2);
  }
}

// Rows wait for the draft head, are absorbed many at a time, and the last ones by settle().
void idle_equals_plain(On on, DType kv, bool graphs) {
  for (const int64_t max_tokens : {2, 47, 48, 49, 100})
    for (const int64_t most_rows : {32, 70, 128}) {  // passes of pieces of a sequence, of one, and of both
      CAPTURE(max_tokens);
      CAPTURE(most_rows);
      Case c{2, 4, kOwn, 0, on, kv, graphs};
      c.max_tokens = max_tokens, c.idle = true, c.most_rows = most_rows, c.waiting = 48;
      const Outcome plain = plain_of(c), idle = run(c);
      check_same(idle, plain);
      CHECK(idle.stats.drafted == 0);
    }
}

// Of a sequence's first token the draft head takes no row, of each later one a row: rounds of one shape differ in that.
void beginnings_equal_eager(On on, DType kv) {
  std::array<std::vector<float>, 2> logits;
  for (const bool graphs : {false, true}) {
    const auto engine = tiny_engine(3, 64, true, 16, kv, on, graphs);
    std::array<int32_t, 3> slots{}, tokens{17, 450, 3001};
    for (int32_t& slot : slots) slot = engine->state().open();
    for (size_t round = 0; round < 40; ++round) {
      const size_t width = 1 + round % 3;
      if (round % 7 == 6) {
        engine->state().close(slots[round % width]);
        slots[round % width] = engine->state().open();
      }
      std::vector<LaneInput> lanes;
      std::vector<Draw> draws;
      for (size_t i = 0; i < width; ++i) {
        lanes.push_back({slots[i], std::span(tokens).subspan(i, 1)});
        draws.push_back({static_cast<int32_t>(i), {}});
      }
      const std::vector<int32_t> next = engine->round(lanes, draws, engine->config().vocab_size);
      std::vector<int32_t> rows(width);
      std::iota(rows.begin(), rows.end(), 0);
      const std::vector<float> values = engine->to_host(engine->logits(rows));
      logits[graphs ? 1 : 0].insert(logits[graphs ? 1 : 0].end(), values.begin(), values.end());
      std::copy(next.begin(), next.end(), tokens.begin());
    }
    CHECK(engine->graph_counters().replays == (graphs ? 34 : 0));
  }
  CHECK(logits[0] == logits[1]);
}

void stops_equal_plain(On on) {
  Case c{1, 8, kOwn, 0, on};
  const Outcome plain = plain_of(c);
  // The first token that was not there before, at every place that a chain of drafts may reach.
  for (size_t at = 1; at < 12; ++at) {
    const int32_t stop = plain.tokens[0][at];
    if (std::find(plain.tokens[0].begin(), plain.tokens[0].begin() + static_cast<long>(at), stop) !=
        plain.tokens[0].begin() + static_cast<long>(at))
      continue;
    std::vector<std::vector<std::byte>> states;
    for (const int32_t depth : {0, 8}) {
      std::vector<Request> requests = requests_of(c);
      requests[0].stop_ids = {stop};
      EngineOptions o;
      o.state = state_for(requests, 1);
      o.state.draft_head = true, o.state.trials = depth;
      o.max_rows = 64;
      Engine engine(tiny_weights(on), backend_on(on), o);
      SchedulerEvents events;
      std::vector<int32_t> tokens;
      events.token = [&](size_t, int32_t t) { tokens.push_back(t); };
      events.finished = [&](size_t, Finish why) { CHECK(why == Finish::Stop); };
      events.closing = [&](size_t, int32_t slot) {
        engine.settle(slot);
        states.push_back(engine.state().dump(slot));
      };
      events.drafts = [&](size_t, int64_t position, std::span<int32_t> drafts) {
        for (size_t j = 0; j < drafts.size(); ++j)
          drafts[j] = plain.tokens[0].at(static_cast<size_t>(position) - requests[0].prompt.size() + j);
      };
      SchedulerOptions options;
      options.draft = {depth, true};
      run_requests(engine, requests, options, events);
      CHECK(tokens ==
            std::vector<int32_t>(plain.tokens[0].begin(), plain.tokens[0].begin() + static_cast<long>(at) + 1));
    }
    CHECK(states[0] == states[1]);
  }
}

// So many tokens that each shape of a round comes often enough to be recorded, also after its first try has failed.
void failed_captures_change_nothing(On on, DType kv) {
  Case c{2, 3, kByTurns, 0, on, kv, true, false, 3, 120};
  const Outcome plain = plain_of(c), injected = run(c, &plain);
  check_same(injected, plain);
  CHECK(injected.graphs.failed == 3);
  CHECK(injected.graphs.captures >= 1);
  CHECK(injected.graphs.replays >= 1);
}

}  // namespace

TEST_CASE("drafts: every depth and every forced acceptance gives plain tokens, logits and final states") {
  every_acceptance_equals_plain(On::Cpu, DType::F32, false);
}

TEST_CASE("drafts: replayed rounds of every depth and every forced acceptance give plain tokens, logits and states") {
  every_acceptance_equals_plain(On::Replayed, DType::F32, true);
}

TEST_CASE("cuda: every depth and every forced acceptance gives plain tokens, logits and final states") {
  if (no_gpu()) return;
  every_acceptance_equals_plain(On::Cuda, DType::BF16, false);
  every_acceptance_equals_plain(On::Cuda, DType::BF16, true);
}

TEST_CASE("drafts: 2 to 8 sequences that draft together, by themselves and by force, give what each gives plain") {
  company_equals_plain(On::Cpu, DType::F32, false);
}

TEST_CASE("drafts: replayed rounds of 2 to 8 sequences that draft together give what each gives plain") {
  company_equals_plain(On::Replayed, DType::F32, true);
}

TEST_CASE("cuda: 2 to 8 sequences that draft together, by themselves and by force, give what each gives plain") {
  if (no_gpu()) return;
  company_equals_plain(On::Cuda, DType::BF16, false);
  company_equals_plain(On::Cuda, DType::BF16, true);
}

TEST_CASE("drafts: depths chosen by measurement give plain output, and a replay of the rounds makes the same choices") {
  automatic_equals_plain(On::Cpu, DType::F32, false);
}

TEST_CASE("cuda: depths chosen by measurement give plain output, and a replay of the rounds makes the same choices") {
  if (no_gpu()) return;
  automatic_equals_plain(On::Cuda, DType::BF16, true);
}

TEST_CASE("drafts: plain rounds of an engine that may draft end in the plain states") {
  idle_equals_plain(On::Cpu, DType::F32, false);
}

TEST_CASE("drafts: replayed plain rounds, whose draft head keeps up or lets rows wait, end in the plain states") {
  idle_equals_plain(On::Replayed, DType::F32, true);
  for (const int64_t sequences : {1, 3}) {
    const Outcome replayed = run({sequences, 0, kOwn, 0, On::Replayed, DType::F32, true});
    check_same(replayed, run({sequences, 0, kOwn, 0, On::Cpu, DType::F32}));
    CHECK(replayed.graphs.replays > replayed.graphs.captures);
  }
}

TEST_CASE("drafts: replayed rounds do not depend on how many rows the draft head takes behind them") {
  beginnings_equal_eager(On::Replayed, DType::F32);
}

TEST_CASE("cuda: replayed rounds do not depend on how many rows the draft head takes behind them") {
  if (no_gpu()) return;
  beginnings_equal_eager(On::Cuda, DType::BF16);
}

TEST_CASE("cuda: plain rounds of an engine that may draft end in the plain states") {
  if (no_gpu()) return;
  idle_equals_plain(On::Cuda, DType::BF16, true);
}

TEST_CASE("cuda: plain rounds are replays while rows wait and are absorbed") {
  if (no_gpu()) return;
  Case c{2, 4, kOwn, 0, On::Cuda, DType::BF16, true};
  c.idle = true, c.most_rows = 256, c.waiting = 128;
  c.max_tokens = 300;  // the draft head absorbs twice
  const Outcome twice = run(c);
  c.max_tokens = 420;  // and once more
  const Outcome thrice = run(c);
  CHECK(thrice.graphs.eager == twice.graphs.eager);
  CHECK(thrice.graphs.captures == twice.graphs.captures);
  CHECK(thrice.graphs.replays == twice.graphs.replays + 120);
}

TEST_CASE("drafts: an answer that stops inside a chain of right drafts ends in the plain state") {
  stops_equal_plain(On::Cpu);
}

TEST_CASE("drafts: failed captures of rounds that are replayed change no bit") {
  failed_captures_change_nothing(On::Replayed, DType::F32);
}

TEST_CASE("cuda: failed captures of drafted rounds change no bit") {
  if (no_gpu()) return;
  failed_captures_change_nothing(On::Cuda, DType::BF16);
}
