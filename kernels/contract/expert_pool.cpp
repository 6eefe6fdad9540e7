// Pools of offloaded experts on the device: their copies.
#include <algorithm>
#include <cstring>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/pool_problem.h"

namespace fnx::contract {

namespace {

void fill_words(Operand& o, Random& random) {
  auto* words = o.as<int32_t>();
  for (int64_t i = 0; i < o.size(); ++i) words[i] = static_cast<int32_t>(random.below(1 << 30));
}

void add_bank(Problem& p, Random& random) {
  fill_words(p.add("bank", DType::I32, Role::In, false, {p.number("experts"), p.number("bytes") / 4}), random);
}

// Of launches that copy experts.
void copies_domain(const Problem& p) {
  require_range("experts", p.number("experts"), 1, 1024);
  require_range("lines", p.number("lines"), 1, p.number("experts"));
  require_range("bytes", p.number("bytes"), 16, INT32_MAX, 16);
}

void add_stage(Problem& p, Role role) {
  p.add("stage", DType::I32, role, false, {PoolStage::kPlaces, p.number("bytes") / 4});
}

// Of each place of the stage, the pieces that the guess brought, and those that the order wants beside them.
struct PlacePieces {
  int64_t from = 0, wanted = 0;
};
std::vector<PlacePieces> place_pieces(const Problem& p) {
  const StageOrder order = order_of(p);
  std::vector<PlacePieces> places(PoolStage::kPlaces);
  int64_t guessed = order.guessed;
  for (int32_t i = 0; i < PoolStage::kPlaces; ++i) {
    PlacePieces& place = places[static_cast<size_t>(i)];
    const bool foreseen = i < PoolStage::kForeseen;
    if (foreseen && (order.lacking >> i & 1) != 0) guessed -= place.from = std::min(guessed, pieces(p));
    if (foreseen ? (order.places >> i & 1) != 0 : i - PoolStage::kForeseen < order.count)
      place.wanted = pieces(p) - place.from;
  }
  return places;
}

#ifdef FNX_HAS_CUDA
PoolStage device_stage(const Problem& p, DeviceProblem& d) {
  return {d.get<std::byte>("stage"), d.get<StageOrder>("order"), p.number("bytes"), pieces(p)};
}
#endif

// Of each place of the stage, the pieces that are there: the first.
std::vector<int64_t> pieces_there(const Problem& p) {
  const uint32_t drawn = order_of(p).drawn;
  int64_t draws = drawn < StageOrder::kClosed ? 0 : drawn - StageOrder::kClosed;
  std::vector<int64_t> there;
  for (const PlacePieces& place : place_pieces(p)) {
    const int64_t more = std::min(place.wanted, draws);
    there.push_back(place.from + more), draws -= more;
  }
  return there;
}

// A plan's copies, of experts some of which have a place on the stage.
void add_fills(Problem& p, int64_t rows, uint64_t seed, Kind kind, Random& random) {
  const PoolState s = state_of(p);
  // Every other line gets another expert.
  for (int32_t l = static_cast<int32_t>(random.below(2)); l < s.lines && *s.fill_count < rows; l += 2)
    s.fills[(*s.fill_count)++] = {l, static_cast<int32_t>((l * 5 + seed) % p.number("experts")), -1};
  StageOrder& order = order_of(p);
  order.given = 1, order.go = 1;
  for (int32_t i = 0; i < *s.fill_count && kind != Kind::Cancelling; i += kind == Kind::Normal ? 3 : 1) {
    const int32_t expert = s.fills[i].expert;
    if (const int64_t place = place_of(p, expert); place >= 0)
      order.places |= 1u << place;
    else if (staged_at(p, expert) < 0 && order.count < StageOrder::kMost)
      order.experts[order.count++] = expert;
  }
  const int64_t guessed = kind == Kind::Extremes ? 0 : random.below(1 << StageOrder::kForeseen);
  order.lacking = StageOrder::kKnown | static_cast<uint32_t>(guessed);
  order.guessed = guessed_draws(p, kind, random);
  order.drawn = StageOrder::kClosed + 2 * guessed_draws(p, kind, random);
  for (int32_t i = 0; i < *s.fill_count; ++i) s.fills[i].place = static_cast<int32_t>(staged_at(p, s.fills[i].expert));
}

// Problems of launches that make a plan's copies: from the bank to the stage and to lines, or from the stage to lines.
void take_planned(Entry& e, bool from_bank) {
  e.host_shapes = {pool_shape(16, 5, true, 64, 0), pool_shape(12, 12, false, 16, 3, 40960)};
  e.more_device_shapes = {pool_shape(512, 105, true, 2048, 0), pool_shape(300, 200, true, 2048, 5),
                          pool_shape(24, 20, true, 2048, 0, 368640)};
  e.make = [from_bank](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 1);
    if (from_bank) add_bank(p, random);
    add_state(p, kind, random);
    add_foreseen(p, kind, random, 12);
    add_stage(p, from_bank ? Role::InOut : Role::In);
    add_order(p, Role::InOut);
    add_fills(p, rows, seed, kind, random);
    // Other values than the bank's, so that it shows where a piece comes from.
    fill_words(p["stage"], random);
    p.add("lines", DType::I32, Role::Out, false, {p.number("lines"), p.number("bytes") / 4});
    return p;
  };
  e.domain = copies_domain;
  e.exact_kinds = {Kind::Normal, Kind::Exponents, Kind::NonFinite, Kind::Directed};
}

// Copy by copy what those of the state bring from the bank.
enum class FillFault : uint8_t { None, Crossed, WholeStage, ToLines, GoKept };
void fill_host(Problem& p, FillFault fault) {
  const PoolState s = state_of(p);
  const int64_t line = p.number("bytes");
  const std::vector<int64_t> there = pieces_there(p);
  for (int32_t i = 0; i < *s.fill_count; ++i) {
    const auto [l, expert, place] = s.fills[i];
    const int32_t from = fault == FillFault::Crossed ? s.fills[*s.fill_count - 1 - i].expert : expert;
    const bool staged = place >= 0 && fault != FillFault::ToLines;
    const int64_t bytes = expert_bytes(p, expert), whole = fault == FillFault::WholeStage ? bytes : 0;
    const int64_t first = staged ? std::max(whole, there[static_cast<size_t>(place)] * PoolStage::kPiece) : 0;
    if (first >= bytes) continue;
    std::memcpy((staged ? p["stage"].data() + place * line : p["lines"].data() + l * line) + first,
                p["bank"].data() + from * line + first, static_cast<size_t>(bytes - first));
    (staged ? s.words->chosen_bytes : s.words->copied_bytes) += static_cast<uint64_t>(bytes - first);
  }
  if (fault != FillFault::GoKept) order_of(p).go = 0;
}

std::unique_ptr<Kernel> fill_entry() {
  Entry e;
  e.record = {
      "fill_planned",
      "fill_planned",
      {{"fill_planned_kernel", 256, 64, 3072, 0, 0}},
      "1 <= lines <= experts <= 1024, lines of a multiple of 16 bytes",
      "132 blocks of 256 threads",
      {{"bank", "bytes", "[experts, bytes], in host memory or not", 16, "read"},
       {"state", "bytes", "PoolState of experts, lines and all", 8, "read, copied_bytes and chosen_bytes written"},
       {"order", "bytes", "StageOrder", 4, "read; go set to 0"},
       {"stage", "bytes", "[32, bytes]", 16, "written where a copy has a place and pieces are not there"},
       {"lines", "bytes", "[lines, bytes]", 16, "written where a copy is listed that has no place"}},
      "none",
      "a line or a place depends on the expert that is listed for it",
      "none: no sums of values",
      "none",
      "lines that no copy is listed for stay as they are"};
  take_planned(e, true);
  e.expect = [](const Problem& given, const Problem&) {
    Problem wanted = given;
    const PoolState s = state_of(wanted);
    const int64_t words = given.number("bytes") / 4;
    const std::vector<int64_t> pieces = pieces_there(given);
    order_of(wanted).go = 0;
    Expectation lines = expect_elements(given["lines"], [](int64_t) { return Bounded{0, kUntouched}; });
    for (int32_t i = 0; i < *s.fill_count; ++i) {
      const auto [line, expert, place] = s.fills[i];
      for (int64_t j = 0; j < expert_bytes(given, expert) / 4; ++j) {
        const int64_t word = given["bank"].as<int32_t>()[expert * words + j];
        if (place < 0) {
          const auto at = static_cast<size_t>(line * words + j);
          lines.value[at] = static_cast<double>(word), lines.bound[at] = 0;
          s.words->copied_bytes += 4;
        } else if (4 * j / PoolStage::kPiece >= pieces[static_cast<size_t>(place)]) {
          wanted["stage"].as<int32_t>()[place * words + j] = static_cast<int32_t>(word);
          s.words->chosen_bytes += 4;
        }
      }
    }
    return std::vector<Expectation>{lines, words_as(given, wanted, "state"), words_as(given, wanted, "order"),
                                    words_as(given, wanted, "stage")};
  };
  e.host = [](Problem& p) { fill_host(p, FillFault::None); };
  e.refusals = {{"no lines", set_number("lines", 0)},
                {"lines off by 4 bytes", misalign("lines", 4)},
                {"a stage off by 4 bytes", misalign("stage", 4)}};
  const auto fault = [](const char* name, FillFault f) {
    return host_control(name, 2, [f](Problem& p) { fill_host(p, f); });
  };
  e.controls = {fault("crossed lines", FillFault::Crossed), fault("pieces that are not there", FillFault::WholeStage),
                fault("all to lines", FillFault::ToLines), fault("a go that stays", FillFault::GoKept)};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::fill_planned({device_state(p, d), homes(p, d, d.get<std::byte>("bank")), d.get<std::byte>("lines"),
                        p.number("bytes"), device_stage(p, d)},
                       d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

// Copy by copy what those of the state bring from the stage.
enum class SettleFault : uint8_t { None, NextPlace, NotCounted, Closed };
void settle_host(Problem& p, SettleFault fault) {
  const PoolState s = state_of(p);
  const int64_t line = p.number("bytes");
  for (int32_t i = 0; i < *s.fill_count; ++i) {
    const auto [l, expert, place] = s.fills[i];
    if (place < 0) continue;
    const int64_t bytes = expert_bytes(p, expert), from = fault == SettleFault::NextPlace ? place ^ 1 : place;
    std::memcpy(p["lines"].data() + l * line, p["stage"].data() + from * line, static_cast<size_t>(bytes));
    s.words->copied_bytes += static_cast<uint64_t>(bytes);
    s.words->taken_bytes += fault == SettleFault::NotCounted ? 0 : static_cast<uint64_t>(bytes);
  }
  StageOrder& order = order_of(p);
  if (fault != SettleFault::Closed) order.given = 0, order.drawn = 0, order.lacking = 0;
}

std::unique_ptr<Kernel> settle_entry() {
  Entry e;
  e.record = {
      "settle_planned",
      "settle_planned",
      {{"settle_planned_kernel", 256, 64, 3072, 0, 0}},
      "1 <= lines <= experts <= 1024, lines of a multiple of 16 bytes",
      "66 blocks of 256 threads",
      {{"state", "bytes", "PoolState of experts, lines and all", 8, "read, copied_bytes and taken_bytes written"},
       {"order", "bytes", "StageOrder", 4, "given, drawn and lacking set to 0"},
       {"stage", "bytes", "[32, bytes]", 16, "read where a copy has a place"},
       {"lines", "bytes", "[lines, bytes]", 16, "written where a copy is listed that has a place"}},
      "none",
      "a line depends on the expert that is listed for it",
      "none: no sums of values",
      "none",
      "lines that no copy with a place is listed for stay as they are"};
  take_planned(e, false);
  e.expect = [](const Problem& given, const Problem&) {
    Problem wanted = given;
    const PoolState s = state_of(wanted);
    const int64_t words = given.number("bytes") / 4;
    Expectation lines = expect_elements(given["lines"], [](int64_t) { return Bounded{0, kUntouched}; });
    for (int32_t i = 0; i < *s.fill_count; ++i) {
      const auto [line, expert, place] = s.fills[i];
      for (int64_t j = 0; place >= 0 && j < expert_bytes(given, expert) / 4; ++j) {
        const auto at = static_cast<size_t>(line * words + j);
        lines.value[at] = given["stage"].at(place * words + j), lines.bound[at] = 0;
        s.words->copied_bytes += 4, s.words->taken_bytes += 4;
      }
    }
    StageOrder& order = order_of(wanted);
    order.given = 0, order.drawn = 0, order.lacking = 0;
    return std::vector<Expectation>{lines, words_as(given, wanted, "state"), words_as(given, wanted, "order")};
  };
  e.host = [](Problem& p) { settle_host(p, SettleFault::None); };
  e.refusals = {{"no lines", set_number("lines", 0)}, {"lines off by 4 bytes", misalign("lines", 4)}};
  const auto fault = [](const char* name, SettleFault f) {
    return host_control(name, 2, [f](Problem& p) { settle_host(p, f); });
  };
  e.controls = {fault("another place", SettleFault::NextPlace),
                fault("bytes that are not counted", SettleFault::NotCounted),
                fault("a guess that stays closed", SettleFault::Closed)};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    const int64_t table = p.number("experts") * static_cast<int64_t>(sizeof(cuda::Exl3Expert));
    cuda::settle_planned(
        {device_state(p, d), homes(p, d, nullptr), static_cast<cuda::Exl3Expert*>(d.workspace("table", table)),
         d.get<std::byte>("lines"), device_stage(p, d)},
        d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

// What a stage gets: of each place the state's expert, -1 where it gets none, and the pieces of it.
struct StagedPlace {
  int64_t expert = -1, first = 0, last = 0;
};
uint32_t lacking_of(const Problem& p) {
  Problem copy = p;
  const PoolState s = state_of(copy);
  uint32_t lacking = StageOrder::kKnown;
  for (int64_t i = 0; i < p["foreseen"].size(); ++i) {
    const int64_t e = p["foreseen"].as<int32_t>()[i] - p.number("first");
    if (e >= 0 && e < s.experts && s.line_of[e] < 0 && place_of(p, e) == i) lacking |= 1u << i;
  }
  return lacking;
}
std::vector<StagedPlace> staged_places(const Problem& p) {
  Problem known = p;
  StageOrder& order = order_of(known);
  order.lacking = lacking_of(p);
  const bool given = order.given != 0;
  if (!given) order.guessed = UINT32_MAX;
  const std::vector<PlacePieces> pieces = place_pieces(known);
  std::vector<StagedPlace> places(PoolStage::kPlaces);
  for (size_t i = 0; i < places.size(); ++i) {
    StagedPlace& place = places[i];
    const bool foreseen = i < PoolStage::kForeseen;
    if (given)
      place.first = pieces[i].from, place.last = pieces[i].from + pieces[i].wanted;
    else
      place.last = pieces[i].from;
    if (place.first < place.last)
      place.expert =
          foreseen ? p["foreseen"].as<int32_t>()[i] - p.number("first") : order.experts[i - PoolStage::kForeseen];
  }
  return places;
}

// Each warp draws once more than it copies.
uint32_t draws_of(const std::vector<StagedPlace>& places) {
  int64_t draws = cuda::kForeseenWarps;
  for (const StagedPlace& place : places) draws += place.last - place.first;
  return static_cast<uint32_t>(draws);
}

enum class AheadFault : uint8_t { None, Residents, Guessed, NoOrder, NoGo };
void foreseen_host(Problem& p, AheadFault fault) {
  const PoolState s = state_of(p);
  Problem read = p;
  if (fault == AheadFault::NoOrder) order_of(read).given = 0;
  if (fault == AheadFault::Guessed) order_of(read).guessed = 0;
  if (fault == AheadFault::Residents) std::fill_n(state_of(read).line_of, s.experts, -1);
  const bool given = order_of(read).given != 0;
  const std::vector<StagedPlace> places = staged_places(read);
  const int64_t line = p.number("bytes");
  StageOrder& order = order_of(p);
  order.lacking = lacking_of(read);
  order.drawn += draws_of(places);
  for (size_t i = 0; i < places.size(); ++i) {
    const auto [e, first, last] = places[i];
    if (e < 0) continue;
    const int64_t from = first * PoolStage::kPiece, to = std::min(last * PoolStage::kPiece, expert_bytes(p, e));
    std::memcpy(p["stage"].data() + static_cast<int64_t>(i) * line + from, p["bank"].data() + e * line + from,
                static_cast<size_t>(to - from));
    (given ? s.words->chosen_bytes : s.words->ahead_bytes) += static_cast<uint64_t>(to - from);
    s.words->ahead += given ? 0 : 1;
  }
  reinterpret_cast<StageOrder*>(p["next"].data())->go = fault != AheadFault::NoGo;
}

std::unique_ptr<Kernel> foreseen_entry() {
  Entry e;
  e.record = {
      "fill_foreseen",
      "fill_foreseen",
      {{"fill_foreseen_kernel", cuda::kForeseenThreads, 128, 0, 0, 0}},
      "1 <= lines <= experts <= 1024, lines of a multiple of 16 bytes",
      std::to_string(cuda::kForeseenBlocks) + " blocks of " + std::to_string(cuda::kForeseenThreads) + " threads",
      {{"bank", "bytes", "[experts, bytes], in host memory or not", 16, "read"},
       {"state", "bytes", "PoolState of experts, lines and all", 8,
        "read, ahead, ahead_bytes and chosen_bytes written"},
       {"foreseen", "I32", "[up to 16]", 4, "read"},
       {"order", "bytes", "StageOrder", 4, "read again and again, drawn and lacking written"},
       {"next", "bytes", "StageOrder", 4, "go set to 1"},
       {"stage", "bytes", "[32, bytes]", 16, "written where experts are foreseen and have no line, or ordered"}},
      "none",
      "a place depends on the expert that is foreseen or ordered for it, how much of it is there on when the order is "
      "given",
      "none: no sums of values",
      "none",
      "ids outside the state's experts, experts with a line and second places of an expert get nothing unless ordered"};
  e.host_shapes = {pool_shape(16, 5, true, 64, 0), pool_shape(12, 4, false, 16, 3, 40960)};
  e.more_device_shapes = {pool_shape(512, 105, true, 2048, 0), pool_shape(300, 200, true, 2048, 5),
                          pool_shape(24, 8, true, 2048, 0, 368640)};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 1);
    add_bank(p, random);
    add_state(p, kind, random);
    add_foreseen(p, kind, random, PoolStage::kForeseen);
    add_stage(p, Role::Out);
    add_order(p, Role::InOut);
    add_words(p, "next", Role::InOut, sizeof(StageOrder) / 4);
    StageOrder& order = order_of(p);
    order.go = 1;
    if (kind != Kind::Normal) {
      order.given = 1, order.drawn = StageOrder::kClosed;
      order.guessed = guessed_draws(p, kind, random);
      for (int64_t e = random.below(3); e < p.number("experts") && kind != Kind::Cancelling; e += 3)
        if (const int64_t place = place_of(p, e); place >= 0)
          order.places |= 1u << place;
        else if (order.count < StageOrder::kMost)
          order.experts[order.count++] = static_cast<int32_t>(e);
    }
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    Problem wanted = given;
    const PoolState s = state_of(wanted);
    const int64_t words = given.number("bytes") / 4;
    Expectation stage = expect_elements(given["stage"], [](int64_t) { return Bounded{0, kUntouched}; });
    const std::vector<StagedPlace> places = staged_places(given);
    const bool ordered = order_of(given).given != 0;
    for (size_t i = 0; i < places.size(); ++i) {
      const auto [expert, first, last] = places[i];
      if (expert < 0) continue;
      const int64_t each = PoolStage::kPiece / 4, to = std::min(last * each, expert_bytes(given, expert) / 4);
      s.words->ahead += ordered ? 0 : 1;
      (ordered ? s.words->chosen_bytes : s.words->ahead_bytes) += static_cast<uint64_t>(4 * (to - first * each));
      for (int64_t j = first * each; j < to; ++j) {
        const size_t at = i * static_cast<size_t>(words) + static_cast<size_t>(j);
        stage.value[at] = given["bank"].at(expert * words + j), stage.bound[at] = 0;
      }
    }
    StageOrder& order = order_of(wanted);
    order.lacking = lacking_of(given), order.drawn += draws_of(places);
    reinterpret_cast<StageOrder*>(wanted["next"].data())->go = 1;
    return std::vector<Expectation>{stage, words_as(given, wanted, "state"), words_as(given, wanted, "order"),
                                    words_as(given, wanted, "next")};
  };
  e.domain = copies_domain;
  e.host = [](Problem& p) { foreseen_host(p, AheadFault::None); };
  e.exact_kinds = {Kind::Normal, Kind::Exponents, Kind::NonFinite, Kind::Directed};
  e.refusals = {{"no lines", set_number("lines", 0)}, {"a stage off by 4 bytes", misalign("stage", 4)}};
  e.controls = {
      host_control("residents too", 2, [](Problem& p) { foreseen_host(p, AheadFault::Residents); }),
      host_control("what the guess brought too", 2, [](Problem& p) { foreseen_host(p, AheadFault::Guessed); }),
      host_control("no go", 2, [](Problem& p) { foreseen_host(p, AheadFault::NoGo); }),
      host_control("an order that is not read", 2, [](Problem& p) { foreseen_host(p, AheadFault::NoOrder); })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::ForeseenExperts f;
    f.ids = d.get<int32_t>("foreseen"), f.count = static_cast<int32_t>(p["foreseen"].size());
    f.first = static_cast<int32_t>(p.number("first")), f.stage = device_stage(p, d);
    cuda::fill_foreseen({device_state(p, d), homes(p, d, d.get<std::byte>("bank")), f, true, d.get<StageOrder>("next")},
                        d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace

void add_expert_pool(KernelList& list) {
  list.push_back(plan_experts_entry());
  list.push_back(fill_entry());
  list.push_back(settle_entry());
  list.push_back(foreseen_entry());
}

}  // namespace fnx::contract
