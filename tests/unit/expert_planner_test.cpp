#include "kernels/expert_planner.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "kernels/error.h"
#include "kernels/random.h"

using namespace fnx;

namespace {

// The policy told from the whole history of touches, slowly: nothing is kept but what happened.
struct Oracle {
  PoolOptions options;
  std::vector<std::vector<int32_t>> history;
  std::vector<uint64_t> warm;                 // counts before the first request
  std::vector<std::optional<int32_t>> lines;  // what each holds

  explicit Oracle(const PoolOptions& o) : options(o), warm(o.experts, 0), lines(o.lines) {}

  uint64_t count(int32_t expert) const {
    uint64_t count = warm[expert], since = 0;
    for (const auto& request : history) {
      while (since >= options.decay_touches) since -= options.decay_touches, count /= 2;
      for (const int32_t e : request) {
        ++since;
        if (e == expert) count += 256;
      }
    }
    return count;
  }
  int64_t last_touch(int32_t expert) const {
    int64_t clock = 0, last = 0;
    for (const auto& request : history)
      for (const int32_t e : request)
        if (++clock; e == expert) last = clock;
    return last;
  }
  std::optional<int32_t> line_of(int32_t expert) const {
    for (int32_t l = 0; l < options.lines; ++l)
      if (lines[l] == expert) return l;
    return {};
  }
  // Lines in the order in which they may be given up.
  std::optional<int32_t> victim(const std::set<int32_t>& keep) const {
    std::vector<std::vector<int64_t>> order;
    for (int32_t l = 0; l < options.lines; ++l) {
      if (!lines[l]) {
        order.push_back({-1, -1, l});
      } else if (!keep.contains(*lines[l])) {
        const uint64_t c = options.policy == PoolPolicy::LfuDecay ? count(*lines[l]) : 0;
        order.push_back({static_cast<int64_t>(c), last_touch(*lines[l]), l});
      }
    }
    if (order.empty()) return {};
    return static_cast<int32_t>(std::min_element(order.begin(), order.end())->back());
  }
  std::vector<Wave> plan(const std::vector<int32_t>& request) {
    history.push_back(request);
    std::vector<Wave> waves(1);
    std::vector<int32_t> left;
    std::set<int32_t> keep;
    for (const int32_t e : request)
      if (const auto l = line_of(e))
        waves[0].serves.push_back({*l, e}), keep.insert(e);
      else
        left.push_back(e);
    for (const int32_t e : left) {
      if (static_cast<int32_t>(keep.size()) == options.lines) keep.clear(), waves.emplace_back();
      const int32_t l = victim(keep).value();
      lines[l] = e;
      keep.insert(e);
      waves.back().fills.push_back({l, e});
      waves.back().serves.push_back({l, e});
    }
    return waves;
  }
  std::vector<Placement> prefetch(const std::vector<int32_t>& experts) {
    const std::set<int32_t> keep(experts.begin(), experts.end());
    std::vector<Placement> fills;
    for (const int32_t e : experts) {
      if (line_of(e)) continue;
      const auto l = victim(keep);
      if (!l) break;
      lines[*l] = e;
      fills.push_back({*l, e});
    }
    return fills;
  }
};

// Streams of requests, some of them made to hurt.
std::vector<int32_t> make_request(const std::string& kind, int32_t experts, uint64_t stream, int64_t step) {
  const auto draw = [&](uint64_t i, int32_t below) {
    return static_cast<int32_t>(random_bits(7, stream, static_cast<uint64_t>(step) * 1000 + i) % below);
  };
  std::vector<int32_t> ids;
  const int32_t size = kind == "whole" ? experts : 1 + draw(0, std::min(experts, 6));
  for (int32_t i = 0; i < size; ++i) {
    int32_t e = draw(i + 1, experts);
    if (kind == "skewed") e = std::min({e, draw(i + 100, experts), draw(i + 200, experts)});
    if (kind == "scan") e = static_cast<int32_t>((step * size + i) % experts);
    if (kind == "phases") e = (e % std::max(1, experts / 3) + static_cast<int32_t>(step / 10) * 3) % experts;
    if (kind == "one") e = draw(500, experts);
    ids.push_back(kind == "whole" ? (step % 2 ? i : experts - 1 - i) : e);
  }
  return distinct_experts(ids, experts);
}

}  // namespace

TEST_CASE("expert_planner: plans as the policy told from the whole history, at every pool size, on every stream") {
  int64_t requests = 0;
  for (const int32_t experts : {1, 2, 5, 8, 12})
    for (int32_t lines = 1; lines <= experts; ++lines)
      for (const PoolPolicy policy : kPoolPolicies)
        for (const uint32_t decay : {1u, 3u, 16u, 4096u})
          for (const char* kind : {"uniform", "skewed", "scan", "phases", "one", "whole"}) {
            if (policy == PoolPolicy::Lru && decay != 16) continue;
            CAPTURE(experts);
            CAPTURE(lines);
            CAPTURE(decay);
            CAPTURE(kind);
            const PoolOptions options{experts, lines, policy, decay};
            ExpertPlanner planner(options);
            Oracle oracle(options);
            const uint64_t stream = static_cast<uint64_t>(experts) * 100 + lines;
            if (lines % 2 == 0) {  // half of the pools start warm
              std::vector<uint64_t> heat(experts);
              for (int32_t e = 0; e < experts; ++e) heat[e] = random_bits(9, stream, e) % 4;
              const uint64_t sum = std::accumulate(heat.begin(), heat.end(), uint64_t{0});
              for (int32_t e = 0; e < experts; ++e) oracle.warm[e] = sum == 0 ? 0 : heat[e] * decay * 256 / sum;
              for (const Placement& p : planner.warm_start(heat)) oracle.lines[p.line] = p.expert;
            }
            for (int64_t step = 0; step < 40; ++step, ++requests) {
              const std::vector<int32_t> request = make_request(kind, experts, stream, step);
              REQUIRE(planner.plan(request) == oracle.plan(request));
              if (step % 7 == 3) {
                const std::vector<int32_t> guess = make_request(kind, experts, stream + 1, step);
                REQUIRE(planner.prefetch(guess, FillKind::LayerPrefetch) == oracle.prefetch(guess));
              }
              if (step == 25 && lines % 3 == 0) {
                planner.clear();
                std::fill(oracle.lines.begin(), oracle.lines.end(), std::nullopt);
              }
              for (int32_t l = 0; l < lines; ++l) REQUIRE(planner.expert_of(l) == oracle.lines[l].value_or(-1));
            }
            planner.counters().check();
          }
  MESSAGE(requests, " requests");
}

TEST_CASE("expert_planner: serves every expert once, from a line that holds it, when a request exceeds the pool") {
  for (int32_t lines = 1; lines <= 10; ++lines) {
    ExpertPlanner planner({16, lines, PoolPolicy::LfuDecay, 64});
    planner.plan(std::vector<int32_t>{3, 9, 12});
    std::vector<int32_t> holds(16, -1);
    for (int32_t l = 0; l < lines; ++l) holds[l] = planner.expert_of(l);
    std::vector<int32_t> request = {0, 1, 2, 3, 4, 9, 15, 14, 13, 12};
    const int64_t hits =
        std::count_if(request.begin(), request.end(), [&](int32_t e) { return planner.line_of(e) >= 0; });
    std::vector<int32_t> served;
    int64_t fills = 0;
    for (const Wave& w : planner.plan(request)) {
      CHECK(w.serves.size() <= static_cast<size_t>(lines));
      for (const Placement& p : w.fills) holds[p.line] = p.expert, ++fills;
      for (const Placement& p : w.serves) {
        CHECK(holds[p.line] == p.expert);
        served.push_back(p.expert);
      }
    }
    CHECK(fills == static_cast<int64_t>(request.size()) - hits);
    std::sort(served.begin(), served.end());
    std::sort(request.begin(), request.end());
    CHECK(served == request);
  }
}

TEST_CASE("expert_planner: halves counts every decay_touches touches, so that an expert of old fame leaves") {
  ExpertPlanner planner({4, 2, PoolPolicy::LfuDecay, 4});
  const auto plan = [&](std::vector<int32_t> request) { planner.plan(request); };
  for (int i = 0; i < 4; ++i) plan({0});  // count 1024
  plan({1});                              // 0 falls to 512 first
  plan({2});                              // replaces 1
  CHECK(planner.line_of(0) == 0);
  CHECK(planner.line_of(1) == -1);
  for (int i = 0; i < 8; ++i) plan({2});
  plan({3});
  CHECK(planner.line_of(0) == -1);
  CHECK(planner.line_of(2) == 1);
}

TEST_CASE(
    "expert_planner: a warm start takes the hottest experts and gives up the coldest first, under both policies") {
  for (const PoolPolicy policy : kPoolPolicies) {
    ExpertPlanner planner({6, 3, policy, 16});
    const std::vector<uint64_t> heat = {5, 0, uint64_t{1} << 62, 7, 0, uint64_t{1} << 63};
    const std::vector<Placement> fills = planner.warm_start(heat);
    REQUIRE(fills.size() == 2);  // beside those two the others round down to nothing
    CHECK(fills[0] == Placement{2, 5});
    CHECK(fills[1] == Placement{1, 2});
    planner.plan(std::vector<int32_t>{0});
    CHECK(planner.line_of(0) == 0);
    planner.plan(std::vector<int32_t>{0, 1});
    CHECK(planner.line_of(2) == -1);
    CHECK(planner.line_of(5) == 2);
    CHECK_THROWS_WITH_AS(planner.warm_start(heat), doctest::Contains("3 resident"), Error);
  }
}

TEST_CASE("expert_planner: counts each fill in one kind, and refuses counters that do not add up") {
  ExpertPlanner planner({8, 4, PoolPolicy::Lru, 16});
  planner.warm_start(std::vector<uint64_t>{1, 1, 0, 0, 0, 0, 0, 0});
  planner.prefetch(std::vector<int32_t>{2}, FillKind::InitialPrefetch);
  planner.prefetch(std::vector<int32_t>{0, 3, 4}, FillKind::LayerPrefetch);
  planner.plan(std::vector<int32_t>{0, 5});
  PoolCounters c = planner.counters();
  c.check();
  CHECK(c.fills_by_kind == std::array<uint64_t, 4>{1, 1, 2, 2});
  CHECK((c.touches == 2 && c.hits == 1 && c.misses == 1 && c.fills == 6 && c.resident == 4 && c.evictions == 2));
  c += c;
  c.check();
  for (uint64_t PoolCounters::*member : {&PoolCounters::touches, &PoolCounters::misses, &PoolCounters::fills,
                                         &PoolCounters::evictions, &PoolCounters::resident}) {
    PoolCounters wrong = c;
    ++(wrong.*member);
    try {
      wrong.check();
      FAIL("passed");
    } catch (const Error& e) {
      CHECK(e.kind() == ErrorKind::Internal);
    }
  }
}

TEST_CASE("expert_planner: refuses sizes, ids and requests that make no sense, naming the numbers") {
  CHECK_THROWS_WITH_AS(ExpertPlanner({8, 0, PoolPolicy::Lru, 1}), doctest::Contains("0 expert lines"), Error);
  CHECK_THROWS_WITH_AS(ExpertPlanner({8, 9, PoolPolicy::Lru, 1}), doctest::Contains("9 expert lines"), Error);
  CHECK_THROWS_WITH_AS(ExpertPlanner({8, 8, PoolPolicy::Lru, 0}), doctest::Contains("0 touches"), Error);
  ExpertPlanner planner({8, 8, PoolPolicy::Lru, 1});
  CHECK_THROWS_WITH_AS(planner.plan(std::vector<int32_t>{1, 8}), doctest::Contains("expert 8 of 8"), Error);
  CHECK_THROWS_WITH_AS(planner.plan(std::vector<int32_t>{1, 2, 1}), doctest::Contains("expert 1 twice"), Error);
  CHECK_THROWS_AS(distinct_experts(std::vector<int32_t>{-1}, 8), Error);
  CHECK(distinct_experts(std::vector<int32_t>{5, 1, 5, 0, 1}, 8) == std::vector<int32_t>{5, 1, 0});
}

TEST_CASE("expert_planner: touch moves the keys as a plan does, and reset leaves nothing of them") {
  for (const PoolPolicy policy : kPoolPolicies) {
    ExpertPlanner planned({8, 2, policy, 8}), touched({8, 2, policy, 8}), fresh({8, 2, policy, 8});
    const std::vector<std::vector<int32_t>> requests = {{1, 2}, {1, 3}, {4, 1, 5}, {5, 6}};
    for (const auto& r : requests) {
      planned.plan(r);
      touched.touch(r);
    }
    for (const int32_t e : {1, 2, 3, 4, 5, 6}) CHECK(touched.touched(e));
    CHECK_FALSE(touched.touched(0));
    CHECK(touched.counters().touches == 0);
    planned.clear();
    CHECK(planned.warm_start(std::vector<uint64_t>(8)) == touched.warm_start(std::vector<uint64_t>(8)));
    CHECK(planned.plan(std::vector<int32_t>{7, 2}) == touched.plan(std::vector<int32_t>{7, 2}));
    touched.reset();
    CHECK_FALSE(touched.touched(1));
    for (const auto& r : requests) CHECK(touched.plan(r) == fresh.plan(r));
    touched.counters().check();
  }
}
