// The engine against outputs of an independent implementation, on the tiny checkpoint.
#include <doctest/doctest.h>

#include <algorithm>
#include <cstring>

#include "libcore/engine/scheduler.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

int32_t argmax(const float* x, int64_t n) { return static_cast<int32_t>(std::max_element(x, x + n) - x); }

// Second largest minus largest, negated.
double margin(const float* x, int64_t n) {
  float first = -INFINITY, second = -INFINITY;
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] > first)
      second = first, first = x[i];
    else
      second = std::max(second, x[i]);
  }
  return double{first} - second;
}

}  // namespace

TEST_CASE("golden: greedy generation gives the reference's ids for every prompt, alone and eight at a time") {
  const Golden& golden = Golden::get();
  std::vector<Request> requests;
  for (const Golden::Prompt& p : golden.prompts()) {
    Request r;
    r.prompt = p.ids;
    r.max_tokens = static_cast<int64_t>(p.greedy.size());
    requests.push_back(r);
  }
  for (const int64_t parallel : {1, 8}) {
    EngineOptions o;
    const StateOptions state = state_for(requests, parallel);
    auto engine = tiny_engine(state.slots, state.max_tokens, false, parallel * 256);
    std::vector<std::vector<int32_t>> out(requests.size());
    SchedulerEvents events;
    events.token = [&](size_t i, int32_t t) { out[i].push_back(t); };
    SchedulerOptions options;
    options.parallel = parallel;
    run_requests(*engine, requests, options, events);
    for (size_t i = 0; i < requests.size(); ++i) {
      CAPTURE(golden.prompts()[i].name);
      CHECK(out[i] == golden.prompts()[i].greedy);
    }
  }
}

TEST_CASE("golden: logits lie within 5e-4 of every stored row") {
  const Golden& golden = Golden::get();
  double worst = 0;
  for (const Golden::Prompt& p : golden.prompts()) {
    auto engine = tiny_engine();
    const int32_t slot = engine->state().open();
    std::vector<float> logits;
    feed(*engine, slot, p.forced(), 2048, &logits);
    int64_t rows = 0, width = 0;
    CAPTURE(p.name);
    const float* stored = golden.tensor(p.name + ".logits", &rows, &width);
    REQUIRE(stored != nullptr);
    REQUIRE(width == engine->config().vocab_size);
    const auto n = static_cast<int64_t>(p.ids.size());
    double d = max_abs_difference(logits.data() + (n - 1) * width, stored, rows * width);
    CHECK(d < 5e-4);
    worst = std::max(worst, d);
    if (const float* prompt = golden.tensor(p.name + ".prompt_logits", &rows, &width)) {
      d = max_abs_difference(logits.data(), prompt, rows * width);
      CHECK(d < 5e-4);
      worst = std::max(worst, d);
    }
  }
  MESSAGE("largest difference of a logit: " << worst);
}

TEST_CASE("golden: hidden states of genesis and long-700 lie within 1e-5 relative norm at every layer") {
  const Golden& golden = Golden::get();
  for (const char* name : {"genesis", "long-700"}) {
    const Golden::Prompt& p = golden.prompt(name);
    auto engine = tiny_engine();
    const int64_t L = engine->config().layers(), wide = engine->config().streams * engine->config().hidden_size;
    std::vector<std::vector<float>> stacks(L + 1);
    // The stored last row of long-700 belongs to the whole forced list.
    const std::vector<int32_t> tokens = p.forced();
    const LaneInput lane{engine->state().open(), tokens};
    engine->forward({&lane, 1}, [&](int64_t l, const View& stack) { stacks[l] = engine->to_host(stack); });
    const std::vector<float> mixed = engine->to_host(engine->mixed());
    const auto n = static_cast<int64_t>(tokens.size());
    const bool whole = std::string(name) == "genesis";
    double worst = 0;
    const auto check = [&](const std::string& tensor, const std::vector<float>& got, int64_t width) {
      CAPTURE(tensor);
      int64_t rows = 0, stored_width = 0;
      const float* want = golden.tensor(tensor, &rows, &stored_width);
      REQUIRE(want != nullptr);
      REQUIRE(stored_width == width);
      REQUIRE(rows == (whole ? n : 1));
      const double d = relative_norm(got.data() + (n - rows) * width, want, rows * width);
      CHECK(d < 1e-5);
      worst = std::max(worst, d);
    };
    const std::string prefix = std::string(name) + (whole ? ".hidden." : ".hidden_last.");
    for (int64_t l = 0; l < L; ++l) check(prefix + std::to_string(l), stacks[l], wide);
    check(prefix + std::to_string(L), mixed, engine->config().hidden_size);
    if (whole) check("genesis.stack", stacks[L], wide);
    MESSAGE(name << ": largest relative norm " << worst);
  }
}

TEST_CASE("golden: the draft head proposes the reference's token at every row with a margin over 0.001") {
  const Golden& golden = Golden::get();
  int compared = 0;
  for (const Golden::Prompt& p : golden.prompts()) {
    auto engine = tiny_engine(1, 2048, true);
    const std::vector<int32_t> tokens = p.forced();
    const LaneInput lane{engine->state().open(), tokens};
    engine->forward({&lane, 1});
    REQUIRE(engine->draft_rows().size() == 1);
    const Engine::DraftRows d = engine->draft_rows()[0];
    REQUIRE(d.start == 0);
    REQUIRE(d.count == static_cast<int32_t>(p.draft_argmax.size()));
    std::vector<int32_t> rows(d.count);
    for (int32_t i = 0; i < d.count; ++i) rows[i] = d.first_row + i;
    const std::vector<float> logits = engine->to_host(engine->draft_logits(rows));
    const int64_t V = engine->config().vocab_size;
    int wrong = 0;
    for (int32_t i = 0; i < d.count; ++i) {
      if (margin(logits.data() + i * V, V) <= 0.001) continue;
      wrong += argmax(logits.data() + i * V, V) != p.draft_argmax[i];
      ++compared;
    }
    CAPTURE(p.name);
    CHECK(wrong == 0);
    int64_t stored = 0, width = 0;
    const float* last = golden.tensor(p.name + ".mtp_logits", &stored, &width);
    REQUIRE(last != nullptr);
    CHECK(max_abs_difference(logits.data() + (d.count - stored) * V, last, stored * V) < 5e-4);
  }
  CHECK(compared > 3000);
}
