// One arithmetic: the bits of a sequence do not depend on chunking, neighbours, threads or page order.
#include <doctest/doctest.h>

#include <algorithm>
#include <random>

#include "libcore/engine/scheduler.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

std::vector<int32_t> tokens_of(size_t length, uint32_t seed) {
  // Text that the model knows, cut from a long prompt, with a boundary token here and there.
  const std::vector<int32_t>& source = Golden::get().prompt("long-1500").ids;
  std::mt19937 random(seed);
  std::vector<int32_t> out(length);
  const size_t first = random() % 200;
  for (size_t i = 0; i < length; ++i) out[i] = random() % 50 == 0 ? 4000 : source[(first + i) % source.size()];
  return out;
}

struct Run {
  std::vector<float> logits;
  std::vector<std::byte> state;
  bool operator==(const Run&) const = default;
};

Run run(const std::vector<int32_t>& tokens, int64_t chunk, DType kv = DType::F32, On on = On::Cpu) {
  auto engine = tiny_engine(1, 1024, true, 1024, kv, on);
  const int32_t slot = engine->state().open();
  Run r;
  feed(*engine, slot, tokens, chunk, &r.logits);
  r.state = engine->state().dump(slot);
  return r;
}

void chunked_equals_whole(On on, DType kv) {
  for (const size_t length : {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300}) {
    const std::vector<int32_t> tokens = tokens_of(length, static_cast<uint32_t>(length));
    const Run whole = run(tokens, 1024, kv, on);
    for (const int64_t chunk : {1, 3, 16, 64}) {
      CAPTURE(length);
      CAPTURE(chunk);
      const Run chunked = run(tokens, chunk, kv, on);
      CHECK(whole.logits == chunked.logits);
      CHECK(whole.state == chunked.state);
    }
  }
}

void boundaries_change_nothing(On on) {
  for (const std::vector<size_t>& at : {std::vector<size_t>{0}, {1}, {2}, {0, 1, 2}, {15, 16, 17}, {14}, {31, 33}}) {
    std::vector<int32_t> tokens = tokens_of(40, 9);
    for (int32_t& t : tokens)
      if (t == 4000) t = 17;
    for (size_t i : at) tokens[i] = 4000;
    const Run whole = run(tokens, 1024, DType::F32, on);
    for (const int64_t chunk : {1, 2, 16}) CHECK(whole == run(tokens, chunk, DType::F32, on));
  }
}

void concurrent_equals_alone(On on, DType kv) {
  std::vector<std::vector<int32_t>> texts;
  for (uint32_t i = 0; i < 8; ++i) texts.push_back(tokens_of(40 + 37 * i, 100 + i));
  std::vector<Run> alone;
  for (const auto& t : texts) alone.push_back(run(t, 1024, kv, on));
  for (size_t count = 1; count <= 8; ++count) {
    auto engine = tiny_engine(8, 512, true, 1024, kv, on);
    // Slots and pages used before, so that they are neither fresh nor in order.
    std::vector<int32_t> used;
    for (int i = 0; i < 8; ++i) used.push_back(engine->state().open());
    for (int i : {3, 0, 6}) feed(*engine, used[i], texts[i], 64);
    for (int i : {0, 1, 2, 3, 4, 5, 6, 7}) engine->state().close(used[i]);

    std::vector<int32_t> slots(count);
    std::vector<size_t> done(count, 0);
    std::vector<Run> got(count);
    for (size_t i = 0; i < count; ++i) slots[count - 1 - i] = engine->state().open();
    for (int step = 0;; ++step) {
      std::vector<LaneInput> lanes;
      std::vector<size_t> owner;
      for (size_t i = 0; i < count; ++i) {
        const size_t chunk = (step + i) % 3 == 0 ? 1 : 20 + i;
        const size_t n = std::min(chunk, texts[i].size() - done[i]);
        if (n == 0) continue;
        lanes.push_back({slots[i], std::span(texts[i]).subspan(done[i], n)});
        owner.push_back(i);
        done[i] += n;
      }
      if (lanes.empty()) break;
      engine->forward(lanes);
      int32_t row = 0;
      for (size_t l = 0; l < lanes.size(); ++l)
        for (size_t j = 0; j < lanes[l].tokens.size(); ++j) {
          const std::vector<float> v = engine->to_host(engine->logits(std::vector<int32_t>{row++}));
          got[owner[l]].logits.insert(got[owner[l]].logits.end(), v.begin(), v.end());
        }
    }
    for (size_t i = 0; i < count; ++i) {
      CAPTURE(count);
      CAPTURE(i);
      CHECK(got[i].logits == alone[i].logits);
      CHECK(engine->state().dump(slots[i]) == alone[i].state);
    }
  }
}

void sampled_alone_equals_company(On on) {
  std::vector<Request> requests;
  for (uint32_t i = 0; i < 5; ++i) {
    Request r;
    r.prompt = tokens_of(10 + 30 * i, 40 + i);
    r.max_tokens = 20;
    r.sampling = {0.9f, 0.95f, 0.02f, 40, 1234};
    requests.push_back(r);
  }
  std::vector<std::vector<int32_t>> first;
  for (const int64_t parallel : {1, 2, 5}) {
    auto engine = tiny_engine(parallel, 256, false, 256, DType::F32, on);
    std::vector<std::vector<int32_t>> out(requests.size());
    SchedulerEvents events;
    events.token = [&](size_t i, int32_t t) { out[i].push_back(t); };
    SchedulerOptions options;
    options.parallel = parallel;
    options.chunk_rows = 32;
    run_requests(*engine, requests, options, events);
    if (first.empty()) first = out;
    CHECK(out == first);
  }
  CHECK(first[0] != first[1]);
}

}  // namespace

TEST_CASE("arithmetic: prompts of every length give equal logits and states in chunks of 1, 3, 16, 64 and whole") {
  chunked_equals_whole(On::Cpu, DType::F32);
}

TEST_CASE("cuda: prompts of every length give equal logits and states in chunks of 1, 3, 16, 64 and whole") {
  if (no_gpu()) return;
  chunked_equals_whole(On::Cuda, DType::BF16);
  chunked_equals_whole(On::Cuda, DType::F32);
}

TEST_CASE("arithmetic: boundary tokens at positions 0, 1, 2 and around chunk ends change nothing between chunkings") {
  boundaries_change_nothing(On::Cpu);
}

TEST_CASE("cuda: boundary tokens at positions 0, 1, 2 and around chunk ends change nothing between chunkings") {
  if (no_gpu()) return;
  boundaries_change_nothing(On::Cuda);
}

TEST_CASE("arithmetic: 1 to 8 sequences in one forward give the bits of each alone, in whatever slot and page order") {
  concurrent_equals_alone(On::Cpu, DType::F32);
}

TEST_CASE("cuda: 1 to 8 sequences in one forward give the bits of each alone, in whatever slot and page order") {
  if (no_gpu()) return;
  concurrent_equals_alone(On::Cuda, DType::BF16);
}

TEST_CASE("arithmetic: sampled text is the same alone and in company") { sampled_alone_equals_company(On::Cpu); }

TEST_CASE("cuda: sampled text is the same alone and in company") {
  if (no_gpu()) return;
  sampled_alone_equals_company(On::Cuda);
}

TEST_CASE("arithmetic: the same holds with BF16 keys and values") {
  const std::vector<int32_t> tokens = tokens_of(290, 5);
  const Run whole = run(tokens, 1024, DType::BF16);
  CHECK(whole == run(tokens, 7, DType::BF16));
  CHECK(whole.logits != run(tokens, 1024).logits);
}

TEST_CASE("arithmetic: the number of threads and a full decoded-weight cache change no bit") {
  const std::vector<int32_t> tokens = tokens_of(70, 3);
  const Run want = run(tokens, 1024);
  for (const auto& [threads, cache] : {std::pair{1, uint64_t{0}}, {3, uint64_t{0}}, {2, uint64_t{1} << 20}}) {
    const auto backend = make_cpu_backend({threads, cache});
    const ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
    EngineOptions o;
    o.state = {1, 1024, 1024, DType::F32, true};
    o.max_rows = 128;
    const Weights weights = Weights::load(tiny_checkpoint(), config, *backend);
    Engine engine(weights, *backend, o);
    Run got;
    const int32_t slot = engine.state().open();
    feed(engine, slot, tokens, 64, &got.logits);
    got.state = engine.state().dump(slot);
    CHECK(got == want);
  }
}
