// Offloaded experts: pools of any size give the bits of experts that are all on the device.
#include <doctest/doctest.h>

#include <array>
#include <optional>

#include "kernels/error.h"
#include "libcore/engine/scheduler.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct Generated {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> logits;
  bool operator==(const Generated&) const = default;
};

Generated generate(const Weights& weights, On on, size_t sequences, int64_t tokens, size_t prompt = 20,
                   int64_t chunk = 7, int32_t drafts = 0, bool graphs = true) {
  std::vector<Request> requests;
  for (size_t i = 0; i < sequences; ++i) {
    const std::vector<int32_t>& ids =
        prompt > 20 ? Golden::get().prompt("long-1500").ids : Golden::get().prompts()[i].ids;
    Request r;
    r.prompt.assign(ids.begin(), ids.begin() + static_cast<int64_t>(std::min(ids.size(), prompt)));
    r.max_tokens = tokens;
    requests.push_back(r);
  }
  EngineOptions o;
  o.state = state_for(requests, static_cast<int64_t>(sequences));
  o.state.draft_head = true, o.state.trials = drafts;
  o.state.kv_dtype = on == On::Cpu ? DType::F32 : DType::BF16;
  o.max_rows = static_cast<int64_t>(sequences) * chunk;
  o.graphs = graphs && on != On::Cpu;
  Engine engine(weights, backend_on(on), o);
  Generated out;
  out.ids.resize(sequences), out.logits.resize(sequences);
  SchedulerEvents events;
  events.token = [&](size_t i, int32_t t) { out.ids[i].push_back(t); };
  events.logits = [&](size_t i, std::span<const float> row) {
    out.logits[i].insert(out.logits[i].end(), row.begin(), row.end());
  };
  SchedulerOptions so;
  so.parallel = static_cast<int64_t>(sequences);
  so.chunk_rows = chunk;
  so.draft = {drafts, true};
  run_requests(engine, requests, so, events);
  return out;
}

Weights pooled_weights(On on, int64_t lines, PoolPolicy policy, bool check = true, Planner planner = Planner::Host) {
  LoadOptions load;
  load.pools = {lines, policy, check, planner};
  return Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), backend_on(on),
                       load);
}

// 32 experts a layer, 4 a token.
constexpr int64_t kPoolSizes[] = {1, 2, 4, 5, 16, 32};

struct PoolCell {
  size_t sequences = 1;
  PoolPolicy policy = PoolPolicy::LfuDecay;
  Planner planner = Planner::Host;
  bool graphs = false;
};

// Every pool size; misses never rise with it.
void pooled_equals_resident(On on, const PoolCell& cell, const Generated& resident, int64_t tokens) {
  uint64_t fewer = UINT64_MAX;
  for (const int64_t lines : kPoolSizes) {
    CAPTURE(cell.sequences);
    CAPTURE(pool_policy_name(cell.policy));
    CAPTURE(planner_name(cell.planner));
    CAPTURE(cell.graphs);
    CAPTURE(lines);
    const Weights weights = pooled_weights(on, lines, cell.policy, on == On::Cpu, cell.planner);
    CHECK(generate(weights, on, cell.sequences, tokens, 20, 7, 0, cell.graphs) == resident);
    const PoolCounters c = weights.pools->counters();
    CHECK(c.misses > 0);
    CHECK(c.misses <= fewer);
    fewer = c.misses;
    CHECK(weights.pools->planner(8).counters().requests > 0);  // the draft head's
    if (lines < 4) CHECK(c.waves > c.requests);
    if (lines == 32) CHECK(c.evictions == 0);
    const PoolCopies copies = weights.pools->copies();
    if (cell.planner == Planner::Host) CHECK(copies.copies[0] == c.misses);
    if (lines < 4 && cell.planner != Planner::Host) CHECK(copies.in_place > 0);
    if (cell.planner == Planner::Ahead) CHECK(copies.taken_bytes > 0);
    CHECK(copies.copies[0] <= c.misses);
    if (cell.planner != Planner::Ahead) CHECK(copies.bytes[0] == copies.total_bytes);
    CHECK(copies.total_bytes > 0);
  }
}

void pooled_equals_resident(On on, int64_t tokens) {
  for (const size_t sequences : {1, 4}) {
    const Generated resident = generate(tiny_weights(on), on, sequences, tokens);
    REQUIRE(resident.ids[0].size() > 1);
    for (const PoolPolicy policy : kPoolPolicies)
      for (const Planner planner : kPlanners)
        for (const bool graphs : {false, true})
          if (!graphs || on == On::Cuda)
            pooled_equals_resident(on, {sequences, policy, planner, graphs}, resident, tokens);
  }
}

void drafted_equals_resident(On on) {
  const Generated resident = generate(tiny_weights(on), on, 2, 16, 20, 7);
  for (const int64_t lines : {2, 16}) {
    CAPTURE(lines);
    const Weights weights = pooled_weights(on, lines, PoolPolicy::LfuDecay);
    CHECK(generate(weights, on, 2, 16, 20, 7, 3) == resident);
    CHECK(weights.pools->copies().total_bytes > 0);
  }
}

// Forwards of 48 rows stream, what follows does not; then the lines are pools again.
void streamed_equals_resident(On on) {
  const Generated resident = generate(tiny_weights(on), on, 2, 12, 100, 24);
  for (const int64_t lines : {1, 2, 5, 16}) {
    CAPTURE(lines);
    const Weights weights = pooled_weights(on, lines, PoolPolicy::LfuDecay);
    for (int turn = 0; turn < 2; ++turn) CHECK(generate(weights, on, 2, 12, 100, 24) == resident);
    const StreamCounters& s = weights.pools->streamed();
    CHECK(s.forwards == 8);
    CHECK(s.needed <= s.ahead + s.demand);
    if (lines == 16) CHECK(s.ahead > s.demand);
    const PoolCopies copies = weights.pools->copies();
    const TimelineSummary t = weights.pools->timeline();
    CHECK(t.forwards == s.forwards);
    CHECK(t.copied_bytes >= copies.bytes[static_cast<size_t>(FillKind::LayerPrefetch)]);
    CHECK(t.copied_bytes <= copies.total_bytes);
    CHECK(t.copying_ns > 0);
    CHECK(t.computing_ns > 0);
    CHECK(t.copying_ns <= t.window_ns);
    CHECK(t.overlapped_ns <= t.copying_ns);
    CHECK(copies.copies[static_cast<size_t>(FillKind::LayerPrefetch)] == s.ahead);
    CHECK(copies.copies[0] == s.demand + weights.pools->counters().misses);
    CHECK(copies.copies[static_cast<size_t>(FillKind::WarmStart)] > 0);
  }
}

void warm_equals_cold(On on) {
  const Generated resident = generate(tiny_weights(on), on, 1, 24);
  const Weights cold = pooled_weights(on, 8, PoolPolicy::LfuDecay), warm = pooled_weights(on, 8, PoolPolicy::LfuDecay);
  CHECK(generate(cold, on, 1, 24) == resident);
  // Counts that fit nothing, and then counts of the run itself.
  std::vector<uint64_t> counts(32);
  for (size_t e = 0; e < counts.size(); ++e) counts[e] = e * e;
  warm.pools->warm([&](int64_t) -> std::span<const uint64_t> { return counts; });
  CHECK(generate(warm, on, 1, 24) == resident);
  const PoolCopies copies = warm.pools->copies();
  CHECK(copies.copies[static_cast<size_t>(FillKind::WarmStart)] == 9 * 8);
  CHECK(copies.copies[0] == warm.pools->counters().misses);
}

// Every key, line and count of a bank's planner, and its heat.
struct BankState {
  std::vector<uint64_t> words, touched, heat;
  std::vector<uint32_t> count;
  std::vector<int32_t> line_of, expert_of;
  bool operator==(const BankState&) const = default;
};

BankState state_of(ExpertPools& pools, int64_t bank) {
  const PoolOptions& o = pools.planner(bank).options();
  std::vector<uint64_t> memory(PoolState::bytes(o.experts, o.lines, o.experts) / 8);
  const PoolState s = PoolState::at(reinterpret_cast<std::byte*>(memory.data()), o.experts, o.lines, o.experts);
  pools.planner(bank).store(s);
  const std::span<const uint64_t> heat = pools.heat(bank);
  return {{memory.begin(), memory.begin() + sizeof(PoolWords) / 8},
          {s.touched, s.touched + o.experts},
          {heat.begin(), heat.end()},
          {s.count, s.count + o.experts},
          {s.line_of, s.line_of + o.experts},
          {s.expert_of, s.expert_of + o.lines}};
}

// The same rounds planned on the host and on the device; the states are compared every few rounds, because asking for
// one brings it to the host.
void planners_agree(On on, Planner other, int64_t rounds) {
  const auto& prompts = Golden::get().prompts();
  for (const PoolPolicy policy : kPoolPolicies)
    for (const int64_t lines : kPoolSizes) {
      const int64_t every = policy == PoolPolicy::Lru ? 7 : 1;
      CAPTURE(pool_policy_name(policy));
      CAPTURE(lines);
      std::array<std::optional<Weights>, 2> weights;
      std::array<std::unique_ptr<Engine>, 2> engines;
      std::array<std::vector<int32_t>, 2> tokens;
      for (size_t i = 0; i < 2; ++i) {
        weights[i].emplace(pooled_weights(on, lines, policy, on == On::Cpu, i == 0 ? Planner::Host : other));
        EngineOptions o;
        o.state.slots = 3, o.state.tokens = 3 * (rounds + 64), o.state.max_tokens = rounds + 64;
        o.state.draft_head = true;
        o.state.kv_dtype = on == On::Cpu ? DType::F32 : DType::BF16;
        o.graphs = on != On::Cpu;
        engines[i] = std::make_unique<Engine>(*weights[i], backend_on(on), o);
        for (int32_t slot = 0; slot < 3; ++slot) {
          CHECK(engines[i]->state().open() == slot);
          const std::span<const int32_t> ids(prompts[static_cast<size_t>(slot)].ids);
          const LaneInput lane{slot, ids.first(std::min<size_t>(ids.size(), 9))};
          const Draw draw{static_cast<int32_t>(lane.tokens.size()) - 1, {}};
          tokens[i].push_back(engines[i]->round({&lane, 1}, {&draw, 1}, engines[i]->config().vocab_size)[0]);
        }
      }
      for (int64_t r = 0; r < rounds; ++r) {
        const int32_t width = r % 3 == 2 ? 3 : 1;  // requests of 4 to 12 experts
        for (size_t i = 0; i < 2; ++i) {
          std::vector<LaneInput> lanes;
          std::vector<Draw> draws;
          for (int32_t slot = 0; slot < width; ++slot) {
            lanes.push_back({slot, std::span(tokens[i]).subspan(static_cast<size_t>(slot), 1)});
            draws.push_back({slot, {}});
          }
          const std::vector<int32_t> next = engines[i]->round(lanes, draws, engines[i]->config().vocab_size);
          std::copy(next.begin(), next.end(), tokens[i].begin());
        }
        REQUIRE(tokens[0] == tokens[1]);
        if (r % every > 0) continue;
        for (int64_t b = 0; b < weights[0]->pools->banks(); ++b)
          REQUIRE(state_of(*weights[0]->pools, b) == state_of(*weights[1]->pools, b));
      }
      ExpertPools &host = *weights[0]->pools, &device = *weights[1]->pools;
      CHECK(host.counters().misses == device.counters().misses);
      const PoolCopies a = host.copies(), b = device.copies();
      CHECK(b.copies[0] <= a.copies[0]);
      CHECK(host.rounds().forwards == device.rounds().forwards);
      CHECK(host.rounds().misses == device.rounds().misses);
      CHECK(host.prompts().misses == device.prompts().misses);
      constexpr auto ahead = static_cast<size_t>(FillKind::LayerPrefetch);
      CHECK((b.copies[ahead] > 0) == (other == Planner::Ahead));
      CHECK((b.taken_bytes > 0) == (other == Planner::Ahead));
      CHECK(b.taken_bytes <= b.bytes[ahead]);
      if (lines < 12) CHECK(b.in_place > 0);
      if (lines >= 12) CHECK(b.in_place == 0);
      if (lines >= 12) CHECK(host.rounds().bytes == device.rounds().bytes);
      if (on != On::Cpu) CHECK(engines[0]->graph_counters().replays == 0);
      if (on != On::Cpu) CHECK(engines[1]->graph_counters().replays > rounds / 2);
    }
}

void device_planned_equals_resident(On on, int64_t tokens) {
  const Generated resident = generate(tiny_weights(on), on, 4, tokens);
  for (const int64_t lines : kPoolSizes) {
    CAPTURE(lines);
    const Weights weights = pooled_weights(on, lines, PoolPolicy::LfuDecay, true, Planner::Device);
    CHECK(generate(weights, on, 4, tokens) == resident);
  }
  const Weights weights = pooled_weights(on, 2, PoolPolicy::LfuDecay, false, Planner::Ahead);
  CHECK(generate(weights, on, 2, 16, 20, 7, 3) == generate(tiny_weights(on), on, 2, 16, 20, 7));
  CHECK(weights.pools->copies().in_place > 0);
  // Prompts that stream lie between rounds that are planned on the device.
  const Generated streamed = generate(tiny_weights(on), on, 2, 12, 100, 24);
  for (int turn = 0; turn < 2; ++turn) CHECK(generate(weights, on, 2, 12, 100, 24) == streamed);
  CHECK(weights.pools->streamed().forwards == 8);
}

void foreign_line_is_found(On on) {
  const Weights weights = pooled_weights(on, 2, PoolPolicy::Lru);
  ExpertBank& bank = *weights.layers[0].moe.experts;
  Backend& backend = backend_on(on);
  const auto stream = backend.make_stream();
  const Buffer memory = backend.allocate(static_cast<size_t>(2 * bank.line_bytes), Space::Device);
  const View lines = memory.view(DType::U8, {2, bank.line_bytes});
  backend.fill(*stream, bank, 3, lines.rows(0, 1));
  backend.fill(*stream, bank, 5, lines.rows(1, 1));
  const ServedExpert right[] = {{3, lines.rows(0, 1)}, {5, lines.rows(1, 1)}};
  backend.serve(*stream, bank, right);
  CHECK_NOTHROW(backend.check_served(*stream, bank));
  const ServedExpert crossed[] = {{5, lines.rows(0, 1)}};
  backend.serve(*stream, bank, crossed);
  CHECK_THROWS_WITH_AS(backend.check_served(*stream, bank), doctest::Contains("canary in the line of expert 5"), Error);
  const ServedExpert gone[] = {{5, {}}};
  backend.serve(*stream, bank, gone);
  CHECK_NOTHROW(backend.check_served(*stream, bank));
}

void refused_host_memory(On on) {
  Backend& backend = backend_on(on);
  const size_t bytes = size_t{1} << 52;
  CHECK_THROWS_WITH_AS(backend.allocate(bytes, Space::Host), doctest::Contains("4503599627370496 bytes"), Error);
  // Nothing of that sticks.
  const auto stream = backend.make_stream();
  std::vector<int32_t> numbers(1000, 7), back(1000);
  const auto view = [](std::vector<int32_t>& v) {
    return View{reinterpret_cast<std::byte*>(v.data()), DType::I32, Space::Host, 1, {static_cast<int64_t>(v.size())}};
  };
  const Buffer device = backend.allocate(4000, Space::Device);
  backend.copy(*stream, device.view(DType::I32, {1000}), view(numbers));
  backend.copy(*stream, view(back), device.view(DType::I32, {1000}));
  stream->synchronize();
  CHECK(back == numbers);
}

}  // namespace

TEST_CASE(
    "offload: pools of any size, policy and planner give the bits of resident experts, alone and four at a time") {
  pooled_equals_resident(On::Cpu, 10);
}

TEST_CASE(
    "cuda: pools of any size, policy and planner, graphs on and off, give the bits of resident experts over 512 "
    "tokens") {
  if (no_gpu()) return;
  pooled_equals_resident(On::Cuda, 512);
}

TEST_CASE("offload: prompts that stream experts through all lines give the bits of resident experts") {
  streamed_equals_resident(On::Cpu);
}

TEST_CASE("cuda: prompts that stream experts through all lines give the bits of resident experts") {
  if (no_gpu()) return;
  streamed_equals_resident(On::Cuda);
}

TEST_CASE("offload: drafted rounds give the bits of plain ones with resident experts") {
  drafted_equals_resident(On::Cpu);
}

TEST_CASE("cuda: drafted rounds with offloaded experts give the bits of plain ones with resident experts") {
  if (no_gpu()) return;
  drafted_equals_resident(On::Cuda);
}

TEST_CASE("offload: pools that start warm give the bits of cold ones, whatever the counts") {
  warm_equals_cold(On::Cpu);
}

TEST_CASE("cuda: pools that start warm give the bits of cold ones, whatever the counts") {
  if (no_gpu()) return;
  warm_equals_cold(On::Cuda);
}

TEST_CASE("offload: plans on the device leave the host's keys, lines and counts after every round") {
  planners_agree(On::Cpu, Planner::Device, 8);
}

TEST_CASE("offload: copies ahead of a layer's plan leave the host's keys, lines and counts after every round") {
  planners_agree(On::Cpu, Planner::Ahead, 8);
}

TEST_CASE("offload: replayed rounds with plans on the device leave the host's keys, lines and counts") {
  planners_agree(On::Replayed, Planner::Device, 12);
  planners_agree(On::Replayed, Planner::Ahead, 12);
}

TEST_CASE(
    "offload: replayed rounds planned on the device give the bits of resident experts, drafted and streamed too") {
  device_planned_equals_resident(On::Replayed, 10);
}

TEST_CASE("cuda: plans on the device leave the host's keys, lines and counts over recorded rounds") {
  if (no_gpu()) return;
  planners_agree(On::Cuda, Planner::Device, 300);
}

TEST_CASE("cuda: copies ahead of a layer's plan leave the host's keys, lines and counts over recorded rounds") {
  if (no_gpu()) return;
  planners_agree(On::Cuda, Planner::Ahead, 150);
}

TEST_CASE("offload: checked, drafted and streamed rounds planned on the device give the bits of resident experts") {
  device_planned_equals_resident(On::Cpu, 10);
}

TEST_CASE("cuda: checked, drafted and streamed rounds planned on the device give the bits of resident experts") {
  if (no_gpu()) return;
  device_planned_equals_resident(On::Cuda, 32);
}

TEST_CASE("offload: a line that holds another expert is found by its canary") { foreign_line_is_found(On::Cpu); }

TEST_CASE("cuda: a line that holds another expert is found by its canary") {
  if (no_gpu()) return;
  foreign_line_is_found(On::Cuda);
}

TEST_CASE("offload: host memory that is not there is refused with the bytes asked") { refused_host_memory(On::Cpu); }

TEST_CASE("cuda: a refused pin names the bytes asked and leaves no error behind") {
  if (no_gpu()) return;
  refused_host_memory(On::Cuda);
}

TEST_CASE("offload: more lines than a layer has experts are refused by number") {
  CHECK_THROWS_WITH_AS(pooled_weights(On::Cpu, 33, PoolPolicy::Lru), doctest::Contains("33 expert lines a layer"),
                       Error);
}
