// The engine on a device: operations, ids and logits against the cpu backend and the golden outputs; graphs.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <functional>

#include "kernels/devices.h"
#include "kernels/error.h"
#include "libcore/engine/memory_plan.h"
#include "libcore/engine/scheduler.h"
#include "tests/support/compared_backend.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct TopTwo {
  int32_t id = 0;
  double margin = 0;
};
TopTwo top_two(const float* x, int64_t n) {
  TopTwo t;
  for (int64_t i = 1; i < n; ++i)
    if (x[i] > x[t.id]) t.id = static_cast<int32_t>(i);
  float second = -INFINITY;
  for (int64_t i = 0; i < n; ++i)
    if (i != t.id) second = std::max(second, x[i]);
  t.margin = double{x[t.id]} - second;
  return t;
}

// Of softmax(want) against softmax(got).
double divergence(const float* want, const float* got, int64_t n) {
  const auto log_sum = [&](const float* x) {
    const double high = *std::max_element(x, x + n);
    double sum = 0;
    for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - high);
    return high + std::log(sum);
  };
  const double a = log_sum(want), b = log_sum(got);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(want[i] - a) * ((want[i] - a) - (got[i] - b));
  return sum;
}

std::vector<float> forced_logits(const Golden::Prompt& p, DType kv, On on) {
  auto engine = tiny_engine(1, 2048, false, 2048, kv, on);
  std::vector<float> logits;
  feed(*engine, engine->state().open(), p.forced(), 512, &logits);
  return logits;
}

struct Generated {
  std::vector<std::vector<int32_t>> ids;
  std::vector<std::vector<float>> logits;
  GraphCounters graphs;
};

Generated generate(int64_t parallel, DType kv, bool graphs, int64_t inject = 0, float temperature = 0) {
  std::vector<Request> requests;
  for (const Golden::Prompt& p : Golden::get().prompts()) {
    Request r;
    r.prompt = p.ids;
    r.max_tokens = static_cast<int64_t>(p.greedy.size());
    r.sampling.temperature = temperature;
    requests.push_back(r);
  }
  const StateOptions state = state_for(requests, parallel);
  auto engine = tiny_engine(state.slots, state.max_tokens, false, parallel * 256, kv, On::Cuda, graphs, inject);
  Generated out;
  out.ids.resize(requests.size()), out.logits.resize(requests.size());
  SchedulerEvents events;
  events.token = [&](size_t i, int32_t t) { out.ids[i].push_back(t); };
  events.logits = [&](size_t i, std::span<const float> row) {
    out.logits[i].insert(out.logits[i].end(), row.begin(), row.end());
  };
  SchedulerOptions options;
  options.parallel = parallel;
  run_requests(*engine, requests, options, events);
  out.graphs = engine->graph_counters();
  return out;
}

MemoryPlan tiny_plan(const EngineOptions& engine, uint64_t limit) {
  return plan_memory(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), {}, engine, limit);
}

EngineOptions planned_options() {
  EngineOptions o;
  o.state = {4, 4000, 1000, DType::BF16, true};
  o.max_rows = 300;
  return o;
}

}  // namespace

TEST_CASE("memory plan: counts every term without a GPU and refuses a limit with the largest and its way out") {
  if (cuda_runtime_version() == "none") return;  // there is no backend to plan for
  const MemoryPlan plan = tiny_plan(planned_options(), 0);
  CHECK(plan.weights > 20'000'000);
  CHECK(plan.weights < 40'000'000);
  CHECK(plan.states > 0);
  CHECK(plan.workspaces > 0);
  CHECK(plan_text(plan).find("weights") != std::string::npos);
  EngineOptions more = planned_options();
  more.state.slots = 8;
  CHECK(tiny_plan(more, 0).states > plan.states);
  CHECK(tiny_plan(more, 0).weights == plan.weights);
  CHECK_NOTHROW(require_fit(tiny_plan(planned_options(), plan.total())));
  CHECK_THROWS_WITH_AS(require_fit(tiny_plan(planned_options(), plan.total() - 1)), doctest::Contains("--vram-limit"),
                       Error);
}

TEST_CASE("memory plan: what ranks talk through costs expert lines") {
  if (cuda_runtime_version() == "none") return;
  const ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  const uint64_t limit = tiny_plan(planned_options(), 0).total() + kPlanReserve - 1;  // one byte short
  const auto lines = [&](uint64_t exchange) {
    return plan_lines(tiny_checkpoint(), config, {}, planned_options(), limit, exchange);
  };
  const MemoryPlan alone = lines(0);
  REQUIRE(alone.lines > 4);
  const uint64_t line = alone.pools / static_cast<uint64_t>(alone.lines);
  const MemoryPlan ranks = lines(3 * line);
  CHECK(ranks.lines <= alone.lines - 3);
  CHECK(ranks.total() + kPlanReserve <= limit);
  CHECK(plan_text(ranks).find("exchange") != std::string::npos);
}

TEST_CASE("cuda: a memory plan is what a run then uses, to the byte") {
  if (no_gpu()) return;
  const auto backend = make_cuda_backend();
  const Weights weights =
      Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), *backend);
  const uint64_t loaded = backend->device_bytes();
  Engine engine(weights, *backend, planned_options());
  const MemoryPlan plan = tiny_plan(planned_options(), 0);
  CHECK(plan.weights == loaded);
  CHECK(plan.total() == backend->device_bytes());
}

TEST_CASE("cuda: every operation of a prompt and of single rows lies near the cpu backend's from the same inputs") {
  if (no_gpu()) return;
  const std::unique_ptr<ComparedBackend> backend = make_compared_backend(backend_on(On::Cuda), cpu_backend());
  const Weights weights =
      Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), *backend);
  EngineOptions o;
  o.state = {2, 1024, 512, DType::BF16, true};
  o.max_rows = 400;
  Engine engine(weights, *backend, o);
  const std::vector<int32_t> tokens = Golden::get().prompt("long-700").ids;
  const int32_t a = engine.state().open(), b = engine.state().open();
  const auto step = [&](size_t from, size_t count_a, size_t count_b) {
    const LaneInput lanes[2] = {{a, std::span(tokens).subspan(from, count_a)},
                                {b, std::span(tokens).subspan(from + 7, count_b)}};
    std::vector<Draw> draws{{static_cast<int32_t>(count_a) - 1, {}}};
    draws.push_back({static_cast<int32_t>(count_a + count_b) - 1, {0.8f, 0.9f, 0, 40, 7, 1, 5}});
    engine.round(lanes, draws, 4007);
  };
  step(0, 330, 40);
  for (size_t i = 0; i < 3; ++i) step(330 + i, 1, 1);
  REQUIRE(backend->operations().size() > 400);
  double worst = 0;
  int over = 0;
  for (const ComparedOperation& c : backend->operations()) {
    // Products take fp16 operands on the device; a selection may differ where scores are equal to the last bit or two.
    const double bound = c.name.rfind("linear", 0) == 0 || c.name.rfind("experts", 0) == 0 ? 2e-3 : 1e-4;
    worst = std::max(worst, c.distance);
    if (c.distance <= bound) continue;
    if (++over <= 20) std::printf("operation %ld %s: %.3g\n", static_cast<long>(c.call), c.name.c_str(), c.distance);
  }
  CHECK(over == 0);
  MESSAGE(backend->operations().size() << " operations, largest distance " << worst);
}

// Steps of a small margin are listed, whether they differ or not.
TEST_CASE("cuda: forced logits give the ids of the reference where its margin exceeds 0.05, KL to cpu under 1e-3") {
  if (no_gpu()) return;
  // With BF16 keys the cpu backend leaves the golden ids too: it is then the reference itself.
  for (const DType kv : {DType::F32, DType::BF16}) {
    double sum = 0, worst = 0;
    int64_t rows = 0;
    int wrong = 0, near = 0, near_wrong = 0;
    for (const Golden::Prompt& p : Golden::get().prompts()) {
      const std::vector<float> got = forced_logits(p, kv, On::Cuda), want = forced_logits(p, kv, On::Cpu);
      REQUIRE(got.size() == want.size());
      const int64_t vocab = 4096, valid = 4007, count = static_cast<int64_t>(got.size()) / vocab;
      for (int64_t r = 0; r < count; ++r) {
        const double kl = divergence(want.data() + r * vocab, got.data() + r * vocab, vocab);
        sum += kl, ++rows;
        if (!(kl <= worst)) worst = kl;
      }
      const auto first = static_cast<int64_t>(p.ids.size()) - 1;
      for (size_t s = 0; s < p.greedy.size(); ++s) {
        const int64_t at = (first + static_cast<int64_t>(s)) * vocab;
        const TopTwo top = top_two(got.data() + at, valid), cpu = top_two(want.data() + at, valid);
        const TopTwo reference = kv == DType::F32 ? TopTwo{p.greedy[s], p.margins[s]} : cpu;
        const bool differs = top.id != reference.id;
        if (reference.margin > 0.05) {
          wrong += differs;
          continue;
        }
        ++near, near_wrong += differs;
        std::printf("%s keys, %s step %zu: margin %.4f of the reference, %.4f here, ids %d and %d\n", dtype_name(kv),
                    p.name.c_str(), s, reference.margin, top.margin, reference.id, top.id);
      }
    }
    CHECK(wrong == 0);
    CHECK(sum / static_cast<double>(rows) < 1e-3);
    MESSAGE(std::string(dtype_name(kv)) << " keys: mean KL " << sum / static_cast<double>(rows) << ", largest " << worst
                                        << ", " << rows << " rows; " << near << " steps of margin up to 0.05, "
                                        << near_wrong << " differ");
  }
}

TEST_CASE("cuda: greedy generation follows the reference up to a margin of 0.05, alone and eight at a time") {
  if (no_gpu()) return;
  const auto& prompts = Golden::get().prompts();
  const Generated alone = generate(1, DType::F32, false);
  for (size_t i = 0; i < prompts.size(); ++i) {
    CAPTURE(prompts[i].name);
    size_t s = 0;
    while (s < alone.ids[i].size() && alone.ids[i][s] == prompts[i].greedy[s]) ++s;
    if (s == prompts[i].greedy.size()) continue;
    std::printf("%s leaves the reference at step %zu, margin %.4f\n", prompts[i].name.c_str(), s,
                prompts[i].margins[s]);
    CHECK(prompts[i].margins[s] <= 0.05);
  }
  const Generated together = generate(8, DType::F32, false);
  CHECK(together.ids == alone.ids);
  CHECK(together.logits == alone.logits);
}

TEST_CASE("cuda: replayed rounds give the bits of eager ones, greedy and drawn, alone and eight at a time") {
  if (no_gpu()) return;
  for (const int64_t parallel : {1, 8})
    for (const float temperature : {0.0f, 0.8f}) {
      CAPTURE(parallel);
      CAPTURE(temperature);
      const Generated eager = generate(parallel, DType::BF16, false, 0, temperature);
      const Generated graph = generate(parallel, DType::BF16, true, 0, temperature);
      CHECK(graph.ids == eager.ids);
      CHECK(graph.logits == eager.logits);
      CHECK(eager.graphs.captures == 0);
      CHECK(graph.graphs.failed == 0);
      CHECK(graph.graphs.captures >= 1);
      CHECK(graph.graphs.replays > 2 * graph.graphs.captures);
    }
}

TEST_CASE("cuda: failed captures are counted, paused and change no bit") {
  if (no_gpu()) return;
  const Generated eager = generate(2, DType::BF16, false), injected = generate(2, DType::BF16, true, 3);
  CHECK(injected.ids == eager.ids);
  CHECK(injected.logits == eager.logits);
  CHECK(injected.graphs.failed == 3);
  CHECK(injected.graphs.captures >= 1);
}

// A sequence of one token a round.
class Decoding {
 public:
  explicit Decoding(Engine& engine) : engine_(engine), slot_(engine.state().open()) {}
  ~Decoding() { engine_.state().close(slot_); }
  // Draws from ids below `valid`, which is part of a recorded round's key.
  void step(int64_t valid) {
    const LaneInput lane{slot_, {&token_, 1}};
    const Draw draw{0, {}};
    token_ = engine_.round({&lane, 1}, {&draw, 1}, valid)[0];
  }

 private:
  Engine& engine_;
  int32_t slot_, token_ = 17;
};

// Whether `work` leaves the card's free memory as it was, and no more bytes in its graphs, which are measured by it.
// Other processes may change it in some of the turns; what is lost here changes it in all.
bool leaves_memory_flat(const std::function<void()>& work, const Engine* engine = nullptr) {
  const auto graphs = [&] { return engine == nullptr ? 0 : engine->graph_counters().bytes; };
  for (int turn = 0; turn < 5; ++turn) {
    const uint64_t held = backend_on(On::Cuda).device_bytes(), recorded = graphs(), free = free_device_bytes();
    work();
    if (backend_on(On::Cuda).device_bytes() != held) return false;
    if (free_device_bytes() == free && graphs() <= recorded) return true;
  }
  return false;
}

TEST_CASE("cuda: 1000 replays, 50 recordings of new keys and 50 engines with recordings leave device memory flat") {
  if (no_gpu()) return;
  const auto decode = [](Engine& engine, int rounds) {
    Decoding sequence(engine);
    for (int i = 0; i < rounds; ++i) sequence.step(4007);
  };
  {
    const auto engine = tiny_engine(1, 1300, true, 16, DType::BF16, On::Cuda, true);
    decode(*engine, 3);
    CHECK(leaves_memory_flat([&] { decode(*engine, 1000); }));
    CHECK(engine->graph_counters().replays >= 1000);
    int64_t valid = 4007;
    const auto record = [&](int keys) {  // each by its second round
      Decoding sequence(*engine);
      for (int i = 0; i < keys; ++i) --valid, sequence.step(valid), sequence.step(valid);
    };
    record(80);  // more keys than are kept: from then on each recording drops one
    const int64_t captures = engine->graph_counters().captures;
    int64_t turns = 0;
    CHECK(leaves_memory_flat([&] { record(50), ++turns; }, engine.get()));
    CHECK(engine->graph_counters().captures == captures + 50 * turns);
  }
  const auto engines = [&](int count) {
    for (int i = 0; i < count; ++i) {
      const auto engine = tiny_engine(1, 64, true, 16, DType::BF16, On::Cuda, true);
      decode(*engine, 4);
      CHECK(engine->graph_counters().captures >= 1);
      CHECK(engine->graph_counters().replays >= 1);
    }
  };
  engines(1);
  CHECK(leaves_memory_flat([&] { engines(50); }));
}

TEST_CASE("cuda: device memory that is lost is seen") {
  if (no_gpu()) return;
  const auto other = make_cuda_backend();
  std::vector<Buffer> lost;
  CHECK_FALSE(leaves_memory_flat([&] { lost.push_back(other->allocate(4 << 20, Space::Device)); }));
  CHECK_FALSE(leaves_memory_flat([&] { lost.push_back(backend_on(On::Cuda).allocate(512, Space::Device)); }));
}

TEST_CASE("cuda: a device memory limit that is too small refuses with the bytes asked, in use and the limit") {
  if (no_gpu()) return;
  CudaOptions o;
  o.memory_limit = 8 << 20;
  const auto backend = make_cuda_backend(o);
  try {
    Weights::load(tiny_checkpoint(), ModelConfig::load(fixture("flashnext-tiny/config.json")), *backend);
    FAIL("loaded");
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::Unsupported);
    CHECK(std::string(e.what()).find("8388608") != std::string::npos);
    CHECK(std::string(e.what()).find("--vram-limit") != std::string::npos);
  }
  CHECK(backend->device_bytes() == 0);
}
