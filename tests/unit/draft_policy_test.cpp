#include <doctest/doctest.h>

#include <cmath>

#include "libcore/engine/draft_policy.h"

using namespace fnx;

namespace {

// A made-up machine: what a draft costs, in plain rounds, and how often drafts of a stream are right.
struct Machine {
  double step = 0.2, noise = 0;
  std::vector<double> right{0.8};
  uint64_t state = 1;

  double uniform() {
    state = state * 6364136223846793005u + 1442695040888963407u;
    return static_cast<double>(state >> 11) / 9007199254740992.0;
  }
};

struct Tally {
  double ns = 0, tokens = 0;
  std::vector<int32_t> depths;
  std::vector<DraftRound> rounds;
  double rate() const { return tokens / ns; }
};

Tally run(DraftPolicy& policy, Machine& machine, int rounds) {
  Tally t;
  std::vector<size_t> ids;
  for (size_t i = 0; i < machine.right.size(); ++i) ids.push_back(i);
  for (int r = 0; r < rounds; ++r) {
    const int32_t depth = policy.decide(ids);
    DraftRound round{depth, {}, 1e6 * (1 + machine.step * depth) * (1 + machine.noise * machine.uniform())};
    for (const size_t id : ids) {
      int32_t kept = 0;
      while (kept < depth && machine.uniform() < machine.right[id]) ++kept;
      round.streams.push_back({id, depth, kept});
      t.tokens += 1 + kept;
    }
    t.ns += round.ns / 1e6;
    t.depths.push_back(depth);
    policy.observe(round);
    t.rounds.push_back(round);
  }
  return t;
}

}  // namespace

TEST_CASE("draft_policy: plain rounds come first, and right drafts are then made as deep as they pay") {
  Machine machine{0.1, 0.02, {0.9}};
  DraftPolicy policy({8, false});
  const Tally t = run(policy, machine, 400);
  CHECK(t.depths[0] == 0);
  CHECK(t.depths[1] == 0);
  CHECK(t.rate() > 2.2);  // the best depth here, 8, gives 3.4 tokens in 1.8 plain rounds but for noise
  Machine dear{0.45, 0.02, {0.9}};
  DraftPolicy other({8, false});
  const Tally d = run(other, dear, 400);
  CHECK(d.rate() > 1.3);
  double deep = 0;
  for (const int32_t depth : d.depths) deep += depth;
  CHECK(deep / 400 < 5);
}

TEST_CASE("draft_policy: wrong drafts are given up, and tried again after 8 plain rounds, doubling to 512") {
  Machine machine{0.2, 0, {0.0}};
  DraftPolicy policy({4, false});
  const Tally t = run(policy, machine, 2000);
  std::vector<int> plain_runs;
  int length = 0;
  for (const int32_t depth : t.depths) {
    if (depth == 0) {
      ++length;
    } else if (length > 0) {
      plain_runs.push_back(length);
      length = 0;
    }
  }
  REQUIRE(plain_runs.size() >= 9);
  const std::vector<int> want{2, 8, 16, 32, 64, 128, 256, 512, 512};
  for (size_t i = 0; i < want.size(); ++i) CHECK(plain_runs[i] == want[i]);
  CHECK(t.rate() > 0.97);
}

TEST_CASE("draft_policy: drafts that gain less than the guard are not made, those that gain more are") {
  for (const double step : {0.70, 0.55}) {  // one draft, right at 0.7: gains of 1.0 and 1.10
    Machine machine{step, 0, {0.7}};
    DraftPolicy policy({1, false});
    const Tally t = run(policy, machine, 2000);
    int drafted = 0;
    for (const int32_t depth : t.depths) drafted += depth > 0;
    CAPTURE(step);
    CHECK((drafted > 1000) == (step < 0.6));
    CHECK(t.rate() > 0.98);
  }
}

TEST_CASE("draft_policy: a stream whose text changes is followed both ways") {
  Machine machine{0.15, 0.02, {0.9}};
  DraftPolicy policy({4, false});
  CHECK(run(policy, machine, 200).rate() > 1.7);
  machine.right = {0.0};
  run(policy, machine, 40);
  CHECK(run(policy, machine, 400).rate() > 0.94);
  machine.right = {0.9};
  run(policy, machine, 300);
  CHECK(run(policy, machine, 200).rate() > 1.7);
}

TEST_CASE("draft_policy: several streams share a depth that pays for all together; a fixed depth is always taken") {
  Machine machine{0.3, 0.02, {0.9, 0.1, 0.9}};
  DraftPolicy policy({4, false});
  CHECK(run(policy, machine, 400).rate() / 3 > 1.1);
  Machine wrong{0.3, 0, {0.0}};
  DraftPolicy fixed({3, true});
  for (const int32_t depth : run(fixed, wrong, 20).depths) CHECK(depth == 3);
  DraftPolicy none({0, false});
  for (const int32_t depth : run(none, wrong, 20).depths) CHECK(depth == 0);
}

TEST_CASE("draft_policy: the same rounds lead to the same decisions") {
  Machine machine{0.2, 0.3, {0.6, 0.8}};
  DraftPolicy policy({8, false}), again({8, false});
  for (const DraftRound& round : run(policy, machine, 500).rounds) {
    CHECK(again.decide(std::vector<size_t>{0, 1}) == round.depth);
    again.observe(round);
  }
}
