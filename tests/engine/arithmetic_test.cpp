// One arithmetic: the bits of a sequence do not depend on chunking, neighbours, threads or page order.
#include <doctest/doctest.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "libcore/cli/prompts.h"
#include "libcore/engine/scheduler.h"
#include "libcore/format/synthetic_source.h"
#include "libcore/receipt/receipt.h"
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

// What a claim is made about: engines of a model and token lists for it.
struct Subject {
  std::function<std::unique_ptr<Engine>(int64_t slots, int64_t tokens, int64_t max_rows, bool graphs)> engine;
  std::function<std::vector<int32_t>(size_t length, uint32_t seed)> tokens;
};

Subject tiny(On on, DType kv) {
  return {[=](int64_t slots, int64_t tokens, int64_t max_rows, bool graphs) {
            return tiny_engine(slots, tokens, true, max_rows, kv, on, graphs);
          },
          tokens_of};
}

// Eight layers of the published geometry, all experts.
Subject published_slice() {
  static const auto source =
      std::make_shared<SyntheticSource>(SyntheticSpec::parse("synth:flash-next-3.05bpw,layers=8"));
  static const ModelConfig config = ModelConfig::parse(source->config_json());
  static const std::unique_ptr<Backend> backend = make_cuda_backend();  // expert banks of a backend are of one shape
  static const Weights weights = Weights::load(*source, config, *backend);
  return {[](int64_t slots, int64_t tokens, int64_t max_rows, bool graphs) {
            EngineOptions o;
            o.state = {slots, slots * tokens, tokens, DType::BF16, true};
            o.max_rows = max_rows, o.graphs = graphs;
            return std::make_unique<Engine>(weights, *backend, o);
          },
          [](size_t length, uint32_t seed) {
            return made_up_prompt(static_cast<int64_t>(length), config.vocab_size, seed);
          }};
}

std::string hash_of(std::span<const float> values) { return xxh3_hex(values.data(), values.size_bytes()); }
std::string hash_of(const std::vector<std::byte>& bytes) { return xxh3_hex(bytes.data(), bytes.size()); }

// Hashes of the logits of rows of the last forward.
std::vector<std::string> row_hashes(Engine& engine, int32_t first, int32_t count) {
  std::vector<int32_t> rows(count);
  std::iota(rows.begin(), rows.end(), first);
  std::vector<std::string> out;
  if (count == 0) return out;
  const std::vector<float> values = engine.to_host(engine.logits(rows));
  const size_t vocab = values.size() / rows.size();
  for (size_t r = 0; r < rows.size(); ++r) out.push_back(hash_of(std::span(values).subspan(r * vocab, vocab)));
  return out;
}

struct Run {
  std::vector<std::string> logits;  // one hash a row
  std::string state;
  bool operator==(const Run&) const = default;
};

void append(Run& run, const std::vector<std::string>& hashes) {
  run.logits.insert(run.logits.end(), hashes.begin(), hashes.end());
}

// In pieces of `chunk` rows; the logits of the last `rows` rows.
Run run(const Subject& subject, const std::vector<int32_t>& tokens, size_t chunk, size_t rows = 1 << 20) {
  const auto engine = subject.engine(1, std::max<int64_t>(1024, tokens.size()), std::min(chunk, tokens.size()), false);
  const int32_t slot = engine->state().open();
  Run r;
  for (size_t at = 0; at < tokens.size(); at += chunk) {
    const size_t n = std::min(chunk, tokens.size() - at);
    const LaneInput lane{slot, std::span(tokens).subspan(at, n)};
    engine->forward({&lane, 1});
    const size_t skipped = at + rows >= tokens.size() ? 0 : std::min(n, tokens.size() - rows - at);
    append(r, row_hashes(*engine, static_cast<int32_t>(skipped), static_cast<int32_t>(n - skipped)));
  }
  r.state = hash_of(engine->state().dump(slot));
  return r;
}

void chunked_equals_whole(const Subject& subject, const std::vector<size_t>& lengths, const std::vector<size_t>& chunks,
                          size_t rows = 1 << 20) {
  for (const size_t length : lengths) {
    const std::vector<int32_t> tokens = subject.tokens(length, static_cast<uint32_t>(length));
    const Run whole = run(subject, tokens, length, rows);
    for (const size_t chunk : chunks) {
      CAPTURE(length);
      CAPTURE(chunk);
      const Run chunked = run(subject, tokens, chunk, rows);
      CHECK(whole.logits == chunked.logits);
      CHECK(whole.state == chunked.state);
    }
  }
}

void boundaries_change_nothing(const Subject& subject) {
  for (const std::vector<size_t>& at : {std::vector<size_t>{0}, {1}, {2}, {0, 1, 2}, {15, 16, 17}, {14}, {31, 33}}) {
    std::vector<int32_t> tokens = tokens_of(40, 9);
    for (int32_t& t : tokens)
      if (t == 4000) t = 17;
    for (size_t i : at) tokens[i] = 4000;
    const Run whole = run(subject, tokens, 1024);
    for (const size_t chunk : {1, 2, 16}) CHECK(whole == run(subject, tokens, chunk));
  }
}

void concurrent_equals_alone(const Subject& subject) {
  std::vector<std::vector<int32_t>> texts;
  for (uint32_t i = 0; i < 8; ++i) texts.push_back(subject.tokens(40 + 37 * i, 100 + i));
  std::vector<Run> alone;
  for (const auto& t : texts) alone.push_back(run(subject, t, 1024));
  for (size_t count = 1; count <= 8; ++count) {
    auto engine = subject.engine(8, 512, 1024, false);
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
      for (size_t l = 0; l < lanes.size(); ++l) {
        const auto n = static_cast<int32_t>(lanes[l].tokens.size());
        append(got[owner[l]], row_hashes(*engine, row, n));
        row += n;
      }
    }
    for (size_t i = 0; i < count; ++i) {
      CAPTURE(count);
      CAPTURE(i);
      CHECK(got[i].logits == alone[i].logits);
      CHECK(hash_of(engine->state().dump(slots[i])) == alone[i].state);
    }
  }
}

// Prompts, then greedy rounds of all sequences together.
std::vector<Run> decode(const Subject& subject, size_t sequences, int rounds, bool graphs, GraphCounters* counters) {
  const auto engine = subject.engine(static_cast<int64_t>(sequences), 512, 256, graphs);
  const int64_t vocab = engine->config().vocab_size;
  std::vector<Run> out(sequences);
  std::vector<int32_t> slots, pending;
  for (size_t i = 0; i < sequences; ++i) {
    slots.push_back(engine->state().open());
    const std::vector<int32_t> prompt = subject.tokens(30 + 11 * i, static_cast<uint32_t>(i));
    const LaneInput lane{slots[i], prompt};
    const Draw draw{static_cast<int32_t>(prompt.size()) - 1, {}};
    pending.push_back(engine->round({&lane, 1}, {&draw, 1}, vocab)[0]);
  }
  for (int round = 0; round < rounds; ++round) {
    std::vector<LaneInput> lanes;
    std::vector<Draw> draws;
    for (size_t i = 0; i < sequences; ++i) {
      lanes.push_back({slots[i], std::span(pending).subspan(i, 1)});
      draws.push_back({static_cast<int32_t>(i), {}});
    }
    pending = engine->round(lanes, draws, vocab);
    for (size_t i = 0; i < sequences; ++i)
      out[i].logits.push_back(hash_of(engine->to_host(engine->drawn_logits().rows(static_cast<int64_t>(i), 1))));
  }
  for (size_t i = 0; i < sequences; ++i) out[i].state = hash_of(engine->state().dump(slots[i]));
  *counters = engine->graph_counters();
  return out;
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

const std::vector<size_t> kLengths = {1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300};

TEST_CASE("arithmetic: prompts of every length give equal logits and states in chunks of 1, 3, 16, 64 and whole") {
  chunked_equals_whole(tiny(On::Cpu, DType::F32), kLengths, {1, 3, 16, 64});
}

TEST_CASE("cuda: prompts of every length give equal logits and states in chunks of 1, 3, 16, 64 and whole") {
  if (no_gpu()) return;
  chunked_equals_whole(tiny(On::Cuda, DType::BF16), kLengths, {1, 3, 16, 64});
  chunked_equals_whole(tiny(On::Cuda, DType::F32), kLengths, {1, 3, 16, 64});
}

// The longest prompt selects: it has more complete index blocks than the budget.
TEST_CASE("cuda: 8 layers of the published geometry give equal logits and states in chunks of any size") {
  if (no_gpu()) return;
  chunked_equals_whole(published_slice(), {1, 33, 300}, {1, 3, 16, 64, 200});
  chunked_equals_whole(published_slice(), {2500}, {64, 700, 2499}, 40);
}

TEST_CASE("arithmetic: boundary tokens at positions 0, 1, 2 and around chunk ends change nothing between chunkings") {
  boundaries_change_nothing(tiny(On::Cpu, DType::F32));
}

TEST_CASE("cuda: boundary tokens at positions 0, 1, 2 and around chunk ends change nothing between chunkings") {
  if (no_gpu()) return;
  boundaries_change_nothing(tiny(On::Cuda, DType::F32));
}

TEST_CASE("arithmetic: 1 to 8 sequences in one forward give the bits of each alone, in whatever slot and page order") {
  concurrent_equals_alone(tiny(On::Cpu, DType::F32));
}

TEST_CASE("cuda: 1 to 8 sequences in one forward give the bits of each alone, in whatever slot and page order") {
  if (no_gpu()) return;
  concurrent_equals_alone(tiny(On::Cuda, DType::BF16));
}

TEST_CASE("cuda: 1 to 8 sequences over 8 layers of the published geometry give the bits of each alone") {
  if (no_gpu()) return;
  concurrent_equals_alone(published_slice());
}

TEST_CASE("cuda: replayed rounds over 8 layers of the published geometry give the logits and states of eager ones") {
  if (no_gpu()) return;
  for (const size_t sequences : {1, 2, 4, 8}) {
    CAPTURE(sequences);
    GraphCounters eager, replayed;
    CHECK(decode(published_slice(), sequences, 24, false, &eager) ==
          decode(published_slice(), sequences, 24, true, &replayed));
    CHECK(eager.replays == 0);
    CHECK(replayed.failed == 0);
    CHECK(replayed.replays >= 20);
  }
}

TEST_CASE("arithmetic: sampled text is the same alone and in company") { sampled_alone_equals_company(On::Cpu); }

TEST_CASE("cuda: sampled text is the same alone and in company") {
  if (no_gpu()) return;
  sampled_alone_equals_company(On::Cuda);
}

TEST_CASE("arithmetic: the same holds with BF16 keys and values") {
  const std::vector<int32_t> tokens = tokens_of(290, 5);
  const Run whole = run(tiny(On::Cpu, DType::BF16), tokens, 1024);
  CHECK(whole == run(tiny(On::Cpu, DType::BF16), tokens, 7));
  CHECK(whole.logits != run(tiny(On::Cpu, DType::F32), tokens, 1024).logits);
}

TEST_CASE("arithmetic: the number of threads and a full decoded-weight cache change no bit") {
  const std::vector<int32_t> tokens = tokens_of(70, 3);
  const Run want = run(tiny(On::Cpu, DType::F32), tokens, 1024);
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
    for (size_t at = 0; at < tokens.size(); at += 64) {
      const LaneInput lane{slot, std::span(tokens).subspan(at, std::min<size_t>(64, tokens.size() - at))};
      engine.forward({&lane, 1});
      append(got, row_hashes(engine, 0, static_cast<int32_t>(lane.tokens.size())));
    }
    got.state = hash_of(engine.state().dump(slot));
    CHECK(got == want);
  }
}
