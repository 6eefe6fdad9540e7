// Plans of expert pools on the device.
#include <algorithm>
#include <tuple>
#include <utility>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/pool_problem.h"

namespace fnx::contract {

namespace {

// The request, and heat for every choice.
std::vector<int32_t> take_choices(const Problem& p, const PoolState& s) {
  std::vector<int32_t> request;
  const auto* ids = p["ids"].as<int32_t>();
  for (int64_t i = 0; i < p.rows * p.number("k"); ++i) {
    const int32_t id = ids[i / p.number("k") * p.number("columns") + i % p.number("k")];
    const auto e = static_cast<int32_t>(id - p.number("first"));
    if (id >= 0 && id < s.all) ++s.heat[id];
    if (e >= 0 && e < s.experts && std::find(request.begin(), request.end(), e) == request.end()) request.push_back(e);
  }
  return request;
}

// What a plan of this request orders.
StageOrder ordered(const Problem& p, const PoolState& s, const std::vector<int32_t>& request) {
  StageOrder order = order_of(p);
  order.given = order.go = 1, order.places = 0, order.count = 0;
  order.guessed = std::exchange(order.drawn, StageOrder::kClosed);
  for (const int32_t e : request) {
    if (std::ssize(request) > s.lines || s.line_of[e] >= 0) continue;
    if (const int64_t place = place_of(p, e); place >= 0)
      order.places |= 1u << place;
    else if (order.count < StageOrder::kMost)
      order.experts[order.count++] = e;
  }
  return order;
}

enum class PlanFault : uint8_t {
  None,
  LargestKey,
  NoDecay,
  WavesProtected,
  HitsUnprotected,
  NoOrder,
  HitsOrdered,
  OpenGuess,
  NoPlaces,
  ServedFromLines
};

// Where a plan finds what it only reckons with; the bank lies at 0.
constexpr int64_t kLines = int64_t{1} << 40, kStage = int64_t{1} << 41;

// Of the table's entry: the trellis addresses.
void serve(Problem& p, int64_t e, int64_t at) {
  auto& entry = reinterpret_cast<cuda::Exl3Expert*>(p["table"].data())[e];
  const auto address = [](int64_t a) { return reinterpret_cast<const uint16_t*>(static_cast<uintptr_t>(a)); };
  entry.gate.trellis = address(at), entry.up.trellis = address(at + kUp), entry.down.trellis = address(at + kDown);
}

void list_copies(Problem& p, const PoolState& s, const std::vector<int32_t>& was, const std::vector<int32_t>& request,
                 PlanFault fault = PlanFault::None) {
  *s.fill_count = 0;
  for (int32_t l = 0; l < s.lines; ++l) {
    const int32_t old = was[static_cast<size_t>(l)], e = s.expert_of[l];
    if (e == old) continue;
    const auto place = static_cast<int32_t>(staged_at(p, e));
    s.fills[(*s.fill_count)++] = {l, e, fault == PlanFault::NoPlaces ? -1 : place};
    if (old >= 0) serve(p, old, old * p.number("bytes"));
    serve(p, e,
          place >= 0 && fault != PlanFault::ServedFromLines ? kStage + place * p.number("bytes")
                                                            : kLines + l * p.number("bytes"));
    ++s.words->placed, s.words->placed_bytes += static_cast<uint64_t>(expert_bytes(p, e));
  }
  for (const int32_t e : request)
    if (s.line_of[e] < 0) ++s.words->in_place, s.words->in_place_bytes += static_cast<uint64_t>(expert_bytes(p, e));
}

std::vector<int32_t> held(const PoolState& s) { return {s.expert_of, s.expert_of + s.lines}; }

// As the planner of a host leaves it.
Problem planned(const Problem& given) {
  Problem p = given;
  const PoolState s = state_of(p);
  const std::vector<int32_t> was = held(s), request = take_choices(p, s);
  order_of(p) = ordered(p, s, request);
  ExpertPlanner planner(options_of(p));
  planner.load(s);
  planner.plan(request);
  planner.store(s);
  list_copies(p, s, was, request);
  return p;
}

// The rule read aloud, on the state alone.
void plan_host(Problem& p, PlanFault fault) {
  const PoolState s = state_of(p);
  const std::vector<int32_t> was = held(s), request = take_choices(p, s);
  PoolWords& w = *s.words;
  const auto decay = static_cast<uint64_t>(p.number("decay"));
  for (; w.since_decay >= decay && fault != PlanFault::NoDecay; w.since_decay -= decay)
    for (int32_t e = 0; e < s.experts; ++e) s.count[e] /= 2;
  std::vector<int32_t> misses;
  std::vector<bool> kept(static_cast<size_t>(s.lines), false);
  size_t serves = 0;
  StageOrder& order = order_of(p);
  order.given = order.go = fault != PlanFault::NoOrder, order.places = 0, order.count = 0;
  order.guessed = std::exchange(order.drawn, fault == PlanFault::OpenGuess ? order.drawn : StageOrder::kClosed);
  for (const int32_t e : request) {
    s.count[e] += 256, s.touched[e] = ++w.clock, ++w.since_decay;
    if (request.size() <= kept.size() && (s.line_of[e] < 0 || fault == PlanFault::HitsOrdered)) {
      if (const int64_t place = place_of(p, e); place >= 0)
        order.places |= 1u << place;
      else if (order.count < StageOrder::kMost)
        order.experts[order.count++] = e;
    }
    if (s.line_of[e] < 0) {
      misses.push_back(e);
    } else {
      ++serves;
      kept[static_cast<size_t>(s.line_of[e])] = fault != PlanFault::HitsUnprotected;
    }
  }
  ++w.requests, w.touches += request.size(), w.misses += misses.size(), w.hits += serves;
  w.waves += request.empty() ? 0 : 1;
  for (const int32_t e : misses) {
    if (serves == static_cast<size_t>(s.lines)) {
      if (fault != PlanFault::WavesProtected) kept.assign(kept.size(), false);
      serves = 0, ++w.waves;
    }
    int32_t best = -1;
    const auto key = [&](int32_t l) {
      const int32_t x = s.expert_of[l];
      const uint32_t count = x >= 0 && p.number("counts") != 0 ? s.count[x] : 0;
      return x < 0 ? std::tuple(0, 0u, uint64_t{0}) : std::tuple(1, count, s.touched[x]);
    };
    for (int32_t l = 0; l < s.lines; ++l) {
      if (kept[static_cast<size_t>(l)]) continue;
      if (best < 0 || (fault == PlanFault::LargestKey ? key(l) > key(best) : key(l) < key(best))) best = l;
    }
    if (best < 0) best = 0;  // of a fault
    if (const int32_t old = s.expert_of[best]; old >= 0) s.line_of[old] = -1, ++w.evictions, --w.resident;
    s.expert_of[best] = e, s.line_of[e] = best, kept[static_cast<size_t>(best)] = true;
    ++w.fills, ++w.fills_by_kind[0], ++w.resident, ++serves;
  }
  list_copies(p, s, was, request, fault);
}

}  // namespace

std::unique_ptr<Kernel> plan_experts_entry() {
  Entry e;
  e.record = {"plan_experts",
              "plan_experts",
              {{"plan_experts_kernel", 512, 64, 44 * 1024, 0, 0}},
              "1 <= lines <= experts <= 1024, 1 <= k <= columns, rows * k up to 65536, a decay from 1 touch on",
              "one block of 512 threads",
              {{"ids", "I32", "[rows, columns]", 4, "read"},
               {"state", "bytes", "PoolState of experts, lines and all", 8, "read and written"},
               {"foreseen", "I32", "[up to 16]", 4, "read"},
               {"order", "bytes", "StageOrder", 4, "written, given last"},
               {"table", "bytes", "Exl3Expert of the pool's experts", 8,
                "trellis addresses of experts that lost or got a line written"}},
              "none",
              "none: a request is the choices of all rows",
              "none: integers, by the rule of the planner on the host",
              "none",
              "choices outside the pool's experts are no part of the request; lines and the stage are not read"};
  e.host_shapes = {pool_shape(16, 5, true, 64, 0), pool_shape(16, 1, true, 3, 4), pool_shape(12, 12, false, 16, 0),
                   pool_shape(40, 17, false, 5, 8), pool_shape(200, 60, true, 64, 0)};
  e.more_device_shapes = {pool_shape(512, 105, true, 2048, 0), pool_shape(512, 2, true, 2048, 0),
                          pool_shape(256, 256, true, 1, 256), pool_shape(1024, 700, false, 4096, 0),
                          pool_shape(1, 1, true, 1, 0)};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 1);
    const int64_t columns = p.number("columns");
    auto* ids = p.add("ids", DType::I32, Role::In, true, {rows, columns}).as<int32_t>();
    for (int64_t i = 0; i < rows * columns; ++i) ids[i] = static_cast<int32_t>(random.below(p.number("all")));
    add_state(p, kind, random);
    add_foreseen(p, kind, random, 12);
    add_order(p, Role::InOut);
    order_of(p).drawn = guessed_draws(p, kind, random);
    add_words(p, "table", Role::InOut, sizeof(cuda::Exl3Expert) / 4 * p.number("experts"));
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    const Problem wanted = planned(given);
    return std::vector<Expectation>{words_as(given, wanted, "state"), words_as(given, wanted, "order"),
                                    words_as(given, wanted, "table")};
  };
  e.domain = [](const Problem& p) {
    require_range("experts", p.number("experts"), 1, 1024);
    require_range("lines", p.number("lines"), 1, p.number("experts"));
    require_range("k", p.number("k"), 1, p.number("columns"));
    require_range("choices", p.rows * p.number("k"), 0, 65536);
    require_range("decay", p.number("decay"), 1, UINT32_MAX);
  };
  e.host = [](Problem& p) { plan_host(p, PlanFault::None); };
  e.exact_kinds = {Kind::Normal, Kind::Directed};
  e.refusals = {{"no lines", set_number("lines", 0)},
                {"a choice longer than a row", set_number("k", 6)},
                {"a decay at every touch less than one", set_number("decay", 0)}};
  const auto fault = [](const char* name, PlanFault f) {
    return host_control(name, 2, [f](Problem& p) { plan_host(p, f); });
  };
  e.controls = {fault("the largest key leaves", PlanFault::LargestKey),
                fault("counts never halved", PlanFault::NoDecay),
                fault("every wave protected", PlanFault::WavesProtected),
                fault("hits not protected", PlanFault::HitsUnprotected),
                fault("an order that is not given", PlanFault::NoOrder),
                fault("hits ordered too", PlanFault::HitsOrdered),
                fault("a guess that goes on", PlanFault::OpenGuess),
                fault("no places", PlanFault::NoPlaces),
                fault("lines served that wait on the stage", PlanFault::ServedFromLines)};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::PlanExpertsParams q;
    q.state = device_state(p, d);
    q.counts = p.number("counts") != 0, q.decay_touches = static_cast<uint32_t>(p.number("decay"));
    q.ids = d.get<int32_t>("ids"), q.rows = p.rows, q.columns = p.number("columns"), q.k = p.number("k");
    q.first = p.number("first");
    q.homes = homes(p, d, nullptr);
    q.table = d.get<cuda::Exl3Expert>("table");
    q.lines = reinterpret_cast<std::byte*>(kLines), q.line_bytes = p.number("bytes");
    q.foreseen.ids = d.get<int32_t>("foreseen"), q.foreseen.count = static_cast<int32_t>(p["foreseen"].size());
    q.foreseen.first = static_cast<int32_t>(q.first);
    q.foreseen.stage = {reinterpret_cast<std::byte*>(kStage), d.get<StageOrder>("order"), q.line_bytes, 0};
    cuda::plan_experts(q, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace fnx::contract
