// Snapshots: what goes on from one is what would have gone on without it.
#include <doctest/doctest.h>

#include <algorithm>

#include "kernels/error.h"
#include "libcore/engine/snapshot_file.h"
#include "tests/support/golden.h"
#include "tests/support/outcome.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

std::vector<int32_t> text(size_t first, size_t length) {
  const std::vector<int32_t>& all = Golden::get().prompt("long-700").ids;
  return {all.begin() + static_cast<long>(first), all.begin() + static_cast<long>(first + length)};
}

std::vector<int32_t> joined(std::vector<int32_t> a, const std::vector<int32_t>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

Outcome run(std::vector<Request> requests, int64_t parallel, int32_t drafts, bool reuse, On on, DType kv) {
  if (reuse) plan_reuse(requests, 16);
  EngineOptions o;
  o.state = state_for(requests, parallel);
  o.state.kv_dtype = kv, o.state.draft_head = true, o.state.trials = drafts;
  o.max_rows = parallel * 64, o.graphs = on == On::Replayed;
  Engine engine(tiny_weights(on), backend_on(on), o);
  SchedulerOptions options;
  options.chunk_rows = 50, options.parallel = parallel, options.draft = {drafts, true};
  return run_to_end(engine, requests, options);
}

// Two histories: each cold, once more, with another end, and from its middle on.
std::vector<Request> phases() {
  std::vector<Request> out;
  for (const size_t first : {size_t{0}, size_t{350}}) {
    const std::vector<int32_t> history = text(first, 150);
    const std::vector<int32_t> middle(history.begin(), history.begin() + 77);
    for (const std::vector<int32_t>& prompt :
         {history, history, joined({history.begin(), history.end() - 1}, text(200, 9)),
          joined(middle, text(210, 31))}) {
      Request r;
      r.prompt = prompt;
      r.max_tokens = 12;
      out.push_back(r);
    }
  }
  std::swap(out[1], out[4]);  // both cold ones come first
  return out;
}

void reuse_changes_nothing(On on, DType kv) {
  const std::vector<Request> requests = phases();
  for (const int64_t parallel : {1, 2, 8})
    for (const int32_t drafts : {0, 3}) {
      CAPTURE(parallel);
      CAPTURE(drafts);
      const Outcome without = run(requests, parallel, drafts, false, on, kv);
      const Outcome with = run(requests, parallel, drafts, true, on, kv);
      CHECK(with.tokens == without.tokens);
      CHECK(with.logits == without.logits);
      CHECK(with.states == without.states);
      CHECK(with.stats.reused_requests == 6);
      CHECK(with.stats.reused_tokens == 2 * (149 + 149 + 77));
      CHECK(with.stats.prompt_rows + with.stats.reused_tokens == without.stats.prompt_rows);
      CHECK(without.stats.reused_requests == 0);
    }
}

}  // namespace

TEST_CASE("snapshot: warm, branched and rewound requests give what they give cold, alone, together and with drafts") {
  reuse_changes_nothing(On::Cpu, DType::F32);
}

TEST_CASE("snapshot: the same holds for replayed rounds") { reuse_changes_nothing(On::Replayed, DType::F32); }

TEST_CASE("cuda: warm, branched and rewound requests give what they give cold, alone, together and with drafts") {
  if (no_gpu()) return;
  reuse_changes_nothing(On::Cuda, DType::BF16);
}

TEST_CASE("snapshot: at every length a restored sequence has the states of the one that it was taken from") {
  auto engine = tiny_engine(3, 512, true);
  const std::vector<int32_t> tokens = text(0, 140);
  for (const size_t length : {1, 2, 3, 4, 5, 63, 64, 65, 127, 128, 129}) {
    CAPTURE(length);
    const int32_t slot = engine->state().open();
    feed(*engine, slot, {tokens.begin(), tokens.begin() + static_cast<long>(length)}, 64);
    const Snapshot snapshot = engine->state().save(slot);
    feed(*engine, slot, {tokens.begin() + static_cast<long>(length), tokens.end()}, 64);
    for (int copy = 0; copy < 2; ++copy) {
      const int32_t other = engine->state().restore(snapshot);
      CHECK(engine->state().length(other) == static_cast<int64_t>(length));
      feed(*engine, other, {tokens.begin() + static_cast<long>(length), tokens.end()}, 64);
      CHECK(engine->state().dump(other) == engine->state().dump(slot));
      engine->state().close(other);
    }
    engine->state().close(slot);
  }
}

TEST_CASE("snapshot: a file gives the snapshot back; damaged, cut and foreign ones are refused by name") {
  const TempDir dir;
  auto engine = tiny_engine(2, 256, true);
  const int32_t slot = engine->state().open();
  feed(*engine, slot, text(0, 70), 64);
  const Snapshot snapshot = engine->state().save(slot);
  const SnapshotOwner owner{"0123", "cpu", DType::F32, true};
  const auto file = dir / "a.fnxsnapshot";
  write_snapshot(file, owner, snapshot);
  const Snapshot back = read_snapshot(file, owner);
  CHECK(back.tokens == snapshot.tokens);
  CHECK(back.states == snapshot.states);
  CHECK(engine->state().dump(engine->state().restore(back)) == engine->state().dump(slot));

  const std::string bytes = read_file(file);
  const auto refused = [&](const std::string& content, const SnapshotOwner& who, const char* word) {
    const auto bad = dir / "bad.fnxsnapshot";
    write_file(bad, content);
    CHECK_THROWS_WITH_AS(read_snapshot(bad, who), doctest::Contains("bad.fnxsnapshot"), Error);
    CHECK_THROWS_WITH_AS(read_snapshot(bad, who), doctest::Contains(word), Error);
  };
  for (const size_t at : {size_t{0}, size_t{9}, size_t{30}, size_t{60}, bytes.size() / 2, bytes.size() - 1}) {
    std::string damaged = bytes;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    refused(damaged, owner, "");
  }
  refused(bytes.substr(0, bytes.size() - 1), owner, "");
  refused(bytes.substr(0, 20), owner, "");
  refused(bytes + "x", owner, "");
  refused("", owner, "");
  refused(bytes, {"0124", "cpu", DType::F32, true}, "checkpoint");
  refused(bytes, {"0123", "cuda", DType::F32, true}, "backend");
  refused(bytes, {"0123", "cpu", DType::BF16, true}, "kv_dtype");
  refused(bytes, {"0123", "cpu", DType::F32, false}, "draft_head");
  CHECK_THROWS_WITH_AS(read_snapshot(dir / "none.fnxsnapshot", owner), doctest::Contains("none.fnxsnapshot"), Error);
  // Of another shape, whatever the file says.
  auto plain = tiny_engine(1, 256, false);
  CHECK_THROWS_AS(plain->state().restore(snapshot), Error);
  CHECK_NOTHROW(plain->state().open());
}

TEST_CASE("snapshot: a source that ended before it came so far is done without") {
  std::vector<Request> requests = phases();
  requests.resize(2);
  requests[1].prompt = requests[0].prompt;
  requests[1].reuse_of = 0, requests[1].reuse_tokens = 100;  // nobody ends a chunk there
  EngineOptions o;
  o.state = state_for(requests, 1);
  o.max_rows = 64;
  Engine engine(tiny_weights(), cpu_backend(), o);
  std::vector<std::vector<int32_t>> tokens(2);
  SchedulerEvents events;
  events.token = [&](size_t i, int32_t t) { tokens[i].push_back(t); };
  SchedulerOptions options;
  options.chunk_rows = 64;
  const SchedulerStats stats = run_requests(engine, requests, options, events);
  CHECK(stats.reused_requests == 0);
  CHECK(tokens[0] == tokens[1]);
}
