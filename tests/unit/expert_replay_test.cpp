#include "libcore/engine/expert_replay.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <map>

#include "kernels/error.h"
#include "tests/support/routing.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

// The fewest misses, by trying everything that could stay after each request.
struct Exhaustive {
  const std::vector<LayerStream::Request>& requests;
  int32_t lines;
  std::map<std::pair<size_t, uint32_t>, int64_t> known;

  int64_t fewest(size_t request, uint32_t resident) {
    if (request == requests.size()) return 0;
    if (const auto it = known.find({request, resident}); it != known.end()) return it->second;
    uint32_t asked = 0;
    for (const int32_t e : requests[request].experts) asked |= 1u << e;
    int64_t best = INT64_MAX;
    const uint32_t all = resident | asked;
    for (uint32_t stay = all;; stay = (stay - 1) & all) {
      if (std::popcount(stay) <= lines) best = std::min(best, fewest(request + 1, stay));
      if (stay == 0) break;
    }
    return known[{request, resident}] = best + std::popcount(asked & ~resident);
  }
};

LayerStream make_stream(int32_t experts, int32_t most, size_t requests, uint64_t seed) {
  LayerStream s;
  s.copy_bytes.assign(static_cast<size_t>(experts), 10);
  for (size_t r = 0; r < requests; ++r) {
    std::vector<int32_t> ids;
    for (uint64_t i = 0; i <= random_bits(seed, r, 99) % static_cast<uint64_t>(most); ++i)
      ids.push_back(static_cast<int32_t>(random_bits(seed, r, i) % static_cast<uint64_t>(experts)));
    s.requests.push_back({distinct_experts(ids, experts), ids.size() == 1});
  }
  return s;
}

}  // namespace

TEST_CASE("expert_replay: the best possible equals an exhaustive search, whatever the pool size") {
  for (const int32_t experts : {3, 5})
    for (int32_t lines = 1; lines <= experts; ++lines)
      for (uint64_t seed = 0; seed < 40; ++seed) {
        const std::vector<LayerStream> streams = {make_stream(experts, seed % 2 ? 2 : 4, 8, seed)};
        Exhaustive search{streams[0].requests, lines, {}};
        CAPTURE(experts);
        CAPTURE(lines);
        CAPTURE(seed);
        CHECK(static_cast<int64_t>(replay_best(streams, lines, nullptr).all.misses) == search.fewest(0, 0));
      }
}

TEST_CASE("expert_replay: no policy beats the best possible, and all are equal when every expert has a line") {
  const TempDir dir;
  const ExpertIdentity id = make_identity(2, 16, 3);
  write_trace(dir / "a", id, 20, 60, 1);
  write_trace(dir / "b", id, 5, 60, 2);
  const RoutingTrace a = RoutingTrace::load(dir / "a");
  const std::vector<LayerStream> streams = layer_streams(RoutingTrace::load(dir / "b"));
  REQUIRE(streams.size() == 3);
  ExpertProfile profile(id);
  for (int64_t l = 0; l < id.all_layers(); ++l)
    for (const RoutingTrace::Forward& f : a.forwards) profile.count(l, a.layer(f, l));
  for (const ExpertProfile* start :
       {static_cast<const ExpertProfile*>(nullptr), static_cast<const ExpertProfile*>(&profile)})
    for (int32_t lines = 1; lines <= 16; ++lines) {
      CAPTURE(lines);
      const ReplayTotals best = replay_best(streams, lines, start);
      for (const PoolPolicy policy : kPoolPolicies) {
        const ReplayTotals t = replay_policy(streams, lines, policy, 64, start);
        CHECK(t.all.touches == best.all.touches);
        CHECK(t.all.misses >= best.all.misses);
        CHECK(t.counters.misses == t.all.misses);
        CHECK(t.decode.touches == 3 * 60 * 3);
        CHECK(t.warm_bytes == best.warm_bytes);
        if (lines == 16) CHECK(t.all.misses == best.all.misses);
      }
    }
}

TEST_CASE("expert_replay: counts each miss with the bytes of its expert") {
  LayerStream s;
  s.copy_bytes = {1, 10, 100, 1000};
  for (const std::vector<int32_t>& r : std::vector<std::vector<int32_t>>{{0, 1}, {1, 2}, {0}, {3}})
    s.requests.push_back({r, r.size() == 1});
  const std::vector<LayerStream> streams = {s};
  const ReplayTotals t = replay_policy(streams, 2, PoolPolicy::Lru, 1, nullptr);
  CHECK(t.all.touches == 6);
  CHECK(t.all.misses == 5);  // the second request finds 1
  CHECK(t.all.bytes == 1 + 10 + 100 + 1 + 1000);
  CHECK(t.decode.bytes == 1 + 1000);
  CHECK(replay_best(streams, 2, nullptr).all.bytes == 1 + 10 + 100 + 1000);  // keeps 0
  CHECK(replay_best(streams, 1, nullptr).all.misses == 5);
}

TEST_CASE("expert_trace: gives back what was recorded, with and without draft rows") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  const std::vector<uint32_t> bytes(static_cast<size_t>(id.all_layers() * id.experts), 7);
  TraceRecorder recorder(id, bytes);
  std::vector<std::vector<int32_t>> layers;
  for (int64_t l = 0; l < 3; ++l) recorder.add(l, layers.emplace_back(make_ids(id, 5, 1, l)));
  for (int64_t l = 0; l < 4; ++l) recorder.add(l, layers.emplace_back(make_ids(id, l < 3 ? 2 : 6, 2, l)));
  recorder.save(dir / "t");
  const RoutingTrace t = RoutingTrace::load(dir / "t");
  CHECK(t.identity.difference(id) == "");
  CHECK(t.copy_bytes == bytes);
  REQUIRE(t.forwards.size() == 2);
  CHECK((t.forwards[0].rows == 5 && t.forwards[0].draft_rows == 0));
  CHECK((t.forwards[1].rows == 2 && t.forwards[1].draft_rows == 6));
  CHECK(t.rows() == 7);
  for (int64_t l = 0; l < 3; ++l) CHECK(t.layer(t.forwards[0], l) == layers[l]);
  CHECK(t.layer(t.forwards[0], 3).empty());
  for (int64_t l = 0; l < 4; ++l) CHECK(t.layer(t.forwards[1], l) == layers[3 + l]);
  CHECK_THROWS_WITH_AS(recorder.add(2, {}), doctest::Contains("layer 2 after layer 3"), Error);
  recorder.add(0, {});
  CHECK_THROWS_WITH_AS(recorder.save(dir / "t"), doctest::Contains("ends after layer 0"), Error);
}

TEST_CASE("expert_trace: refuses cut, damaged and foreign files, and ids that are no experts") {
  const TempDir dir;
  const ExpertIdentity id = make_identity();
  write_trace(dir / "good", id, 3, 2, 1);
  const std::string bytes = read_file(dir / "good");
  for (size_t cut = 0; cut < bytes.size(); cut += 3) {
    write_file(dir / "bad", std::string_view(bytes).substr(0, cut));
    REQUIRE_THROWS_WITH_AS(RoutingTrace::load(dir / "bad"), doctest::Contains("bad"), Error);
  }
  for (size_t at = 0; at < bytes.size(); at += 3) {
    std::string changed = bytes;
    changed[at] ^= 1;
    write_file(dir / "bad", changed);
    REQUIRE_THROWS_AS(RoutingTrace::load(dir / "bad"), Error);
  }
  ExpertProfile(id).save(dir / "profile");
  CHECK_THROWS_WITH_AS(RoutingTrace::load(dir / "profile"), doctest::Contains("no routing trace"), Error);
  const std::vector<uint32_t> sizes(static_cast<size_t>(id.all_layers() * id.experts), 7);
  TraceRecorder wrong(id, sizes);
  for (int64_t l = 0; l < 3; ++l) wrong.add(l, std::vector<int32_t>{1, 8});
  wrong.save(dir / "bad");
  CHECK_THROWS_WITH_AS(RoutingTrace::load(dir / "bad"), doctest::Contains("expert 8 of 8"), Error);
  TraceRecorder short_sizes(id, std::span(sizes).first(3));
  short_sizes.save(dir / "bad");
  CHECK_THROWS_WITH_AS(RoutingTrace::load(dir / "bad"), doctest::Contains("too short"), Error);
}
