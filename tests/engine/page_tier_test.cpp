// The host tier of keys and values: where a page lies changes no bit.
#include <doctest/doctest.h>

#include "kernels/error.h"
#include "libcore/cli/prompts.h"
#include "libcore/format/synthetic_source.h"
#include "tests/support/golden.h"
#include "tests/support/outcome.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct Case {
  int64_t device_tokens = 0, parallel = 2, chunk_rows = 50;
  int32_t drafts = 0;
  bool reuse = false, graphs = false;
};

Outcome run(const Weights& weights, Backend& backend, DType kv, std::vector<Request> requests, const Case& c) {
  if (c.reuse) plan_reuse(requests, 16);
  EngineOptions o;
  o.state = state_for(requests, c.parallel);
  o.state.kv_dtype = kv, o.state.draft_head = true, o.state.trials = c.drafts;
  o.state.device_tokens = c.device_tokens;
  o.max_rows = c.parallel * std::max<int64_t>(c.chunk_rows, 1 + c.drafts), o.graphs = c.graphs;
  Engine engine(weights, backend, o);
  SchedulerOptions options;
  options.chunk_rows = c.chunk_rows, options.parallel = c.parallel, options.draft = {c.drafts, true};
  return run_to_end(engine, requests, options);
}

// Three texts, the last of which begins as the first.
std::vector<Request> requests_of(const std::vector<int32_t>& ids, size_t first, size_t second, int64_t generate) {
  std::vector<Request> out(3);
  out[0].prompt.assign(ids.begin(), ids.begin() + static_cast<long>(first));
  out[1].prompt.assign(ids.begin() + 3, ids.begin() + 3 + static_cast<long>(second));
  out[2].prompt = out[0].prompt;
  for (size_t i = 0; i < second / 2; ++i) out[2].prompt.push_back(ids[i + 7]);
  for (Request& r : out) r.max_tokens = generate;
  return out;
}

void tier_changes_nothing(On on, DType kv) {
  const std::vector<Request> requests = requests_of(Golden::get().prompt("long-700").ids, 400, 150, 24);
  const auto with = [&](const Case& c) { return run(tiny_weights(on), backend_on(on), kv, requests, c); };
  for (const int64_t parallel : {1, 3}) {
    CAPTURE(parallel);
    const Outcome resident = with({0, parallel, 50});
    CHECK(resident.traffic.pages.spilled == 0);
    CHECK(resident.traffic.rows_in_place == 0);
    for (const int64_t device_tokens : {1, 128, 320}) {
      CAPTURE(device_tokens);
      for (const int64_t chunk : {7, 50, 400}) {
        CAPTURE(chunk);
        const Outcome tiered = with({device_tokens, parallel, chunk});
        check_same(tiered, resident);
        CHECK(tiered.traffic.pages.spilled + tiered.traffic.pages.born_far > 0);
        CHECK(tiered.traffic.pages.freed_far == tiered.traffic.pages.spilled + tiered.traffic.pages.born_far);
        CHECK(tiered.traffic.rows_in_place > 0);
      }
      const Outcome drafted = with({device_tokens, parallel, 50, 4});
      check_same(drafted, with({0, parallel, 50, 4}));
      CHECK(drafted.tokens == resident.tokens);
      CHECK(drafted.traffic.staged > 0);
      check_same(with({device_tokens, parallel, 50, 0, true}), resident);
    }
  }
}

// With experts in host memory too, planned on either side; rounds planned on a device are recorded.
void tier_beside_pools(On on) {
  const std::vector<Request> requests = requests_of(Golden::get().prompt("long-700").ids, 300, 90, 32);
  const DType kv = backend_on(on).kv_dtype();
  for (const int32_t drafts : {0, 3}) {
    const Outcome resident = run(tiny_weights(on), backend_on(on), kv, requests, {0, 3, 40, drafts});
    for (const Planner planner : {Planner::Host, Planner::Device}) {
      CAPTURE(static_cast<int>(planner));
      LoadOptions load;
      load.pools.lines = 12, load.pools.planner = planner;
      const Weights weights = Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")),
                                            backend_on(on), load);
      const bool graphs = on != On::Cpu && planner == Planner::Device;
      const Outcome tiered = run(weights, backend_on(on), kv, requests, {128, 3, 40, drafts, false, graphs});
      check_same(tiered, resident);
      CHECK(weights.pools->counters().misses > 0);
      CHECK(tiered.traffic.rows_in_place > 0);
      CHECK((tiered.graphs.replays > 0) == graphs);
    }
  }
}

void replays_change_nothing(On on, int64_t rounds, int64_t least) {
  const DType kv = backend_on(on).kv_dtype();
  const std::vector<Request> requests = requests_of(Golden::get().prompt("long-700").ids, 200, 150, rounds);
  for (const int32_t drafts : {0, 3}) {
    const auto with = [&](int64_t device_tokens, bool graphs) {
      return run(tiny_weights(on), backend_on(on), kv, requests, {device_tokens, 3, 64, drafts, false, graphs});
    };
    const Outcome resident = with(0, false), replayed = with(128, true);
    check_same(with(128, false), resident);
    check_same(replayed, resident);
    CHECK(replayed.graphs.replays > least);
    CHECK(replayed.traffic.rows_in_place > rounds / 2);
  }
}

}  // namespace

TEST_CASE("page_tier: tokens, logits and states are those of resident pages, with drafts, reuse and any chunk size") {
  tier_changes_nothing(On::Cpu, DType::F32);
}

TEST_CASE("page_tier: the same holds with BF16 keys and values") {
  const std::vector<Request> requests = requests_of(Golden::get().prompt("long-700").ids, 300, 90, 12);
  const auto with = [&](int64_t device_tokens) {
    return run(tiny_weights(), cpu_backend(), DType::BF16, requests, {device_tokens, 3, 40});
  };
  check_same(with(64), with(0));
}

TEST_CASE("page_tier: the same holds with experts in host memory") { tier_beside_pools(On::Cpu); }

TEST_CASE("page_tier: replayed rounds give the bits of resident pages, beside experts in host memory too") {
  tier_beside_pools(On::Replayed);
  replays_change_nothing(On::Replayed, 40, 10);
}

TEST_CASE("cuda: pages in host memory beside experts there give the bits of resident ones, recorded too") {
  if (no_gpu()) return;
  tier_beside_pools(On::Cuda);
}

TEST_CASE("cuda: pages in host memory give tokens, logits and states of resident ones") {
  if (no_gpu()) return;
  tier_changes_nothing(On::Cuda, DType::BF16);
  tier_changes_nothing(On::Cuda, DType::F32);
}

TEST_CASE("cuda: rounds that read pages in host memory give the same replayed and eager, whatever is spilled between") {
  if (no_gpu()) return;
  replays_change_nothing(On::Cuda, 200, 100);
}

TEST_CASE("cuda: 8 layers of the published geometry give the same bits with pages in host memory") {
  if (no_gpu()) return;
  const SyntheticSource source(SyntheticSpec::parse("synth:flash-next-3.05bpw,layers=8"));
  const ModelConfig config = ModelConfig::parse(source.config_json());
  const std::unique_ptr<Backend> backend = make_cuda_backend();
  const Weights weights = Weights::load(source, config, *backend);
  const std::vector<Request> requests = requests_of(made_up_prompt(5000, config.vocab_size), 4500, 1200, 16);
  const auto with = [&](int64_t device_tokens, int64_t chunk, int32_t drafts) {
    return run(weights, *backend, DType::BF16, requests, {device_tokens, 3, chunk, drafts});
  };
  const Outcome resident = with(0, 700, 0);
  check_same(with(1024, 700, 0), resident);
  check_same(with(64, 2048, 0), resident);
  check_same(with(1024, 700, 3), with(0, 700, 3));
}

TEST_CASE("page_tier: a snapshot of a sequence with pages in host memory goes on with resident ones, and back") {
  const std::vector<int32_t>& ids = Golden::get().prompt("long-700").ids;
  const std::vector<int32_t> first(ids.begin(), ids.begin() + 333), then(ids.begin() + 333, ids.begin() + 360);
  const auto engine = [&](int64_t device_tokens) {
    EngineOptions o;
    o.state = {2, 1024, 1024, DType::F32, true, 0, device_tokens};
    o.max_rows = 333;
    return std::make_unique<Engine>(tiny_weights(), cpu_backend(), o);
  };
  const auto tiered = engine(64), resident = engine(0);
  std::vector<std::vector<std::byte>> ends;
  for (Engine* from : {tiered.get(), resident.get()}) {
    const int32_t slot = from->state().open();
    feed(*from, slot, first, 333);
    from->settle(slot);
    const Snapshot snapshot = from->state().save(slot);
    from->state().close(slot);
    for (Engine* to : {tiered.get(), resident.get()}) {
      const int32_t restored = to->state().restore(snapshot);
      feed(*to, restored, then, 20);
      to->settle(restored);
      ends.push_back(to->state().dump(restored));
      to->state().close(restored);
    }
  }
  for (const auto& end : ends) CHECK(end == ends[0]);
}
