// Router, activation, combination in slot order.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/cuda/moe.h"
#include "kernels/ops.h"

namespace fnx::contract {

namespace {

// One row's probabilities with their errors: exp of a rounded difference (|d| u), expf (4u), the sum (gamma of its
// length in a lane and of the butterfly), one division. A row with a number that is not finite has none.
struct Probabilities {
  std::vector<Bounded> p;
  bool sound = true;

  explicit Probabilities(const float* x, int64_t experts) : p(static_cast<size_t>(experts)) {
    const double highest = *std::max_element(x, x + experts);
    double total = 0, total_error = 0;
    for (size_t i = 0; i < p.size(); ++i) {
      sound = sound && std::isfinite(x[i]);
      const double d = x[i] - highest, e = std::exp(d);
      p[i] = {e, (std::abs(d) + 4) * kUnit * e * 1.0001 + 0x1p-148};
      total += e;
      total_error += p[i].error;
    }
    const double relative = total_error / total + gamma(static_cast<double>((experts + 31) / 32 + 6));
    for (Bounded& b : p) b = {b.value / total, (b.error + b.value * relative) / total * 1.0001 + 0x1p-148};
  }
};

// Wrong ids: not distinct, passing over an expert that is better by more than rounding explains, or over an equal logit
// of a lower id. A row that is not sound takes the lowest ids.
std::string router_choices(const Problem& given, const Problem& done) {
  const int64_t experts = given.number("experts"), k = given.number("k"), columns = given["ids"].shape[1];
  for (int64_t r = 0; r < given.rows; ++r) {
    const float* x = given["logits"].as<float>() + r * experts;
    const int32_t* ids = done["ids"].as<int32_t>() + r * columns;
    const Probabilities probabilities(x, experts);
    std::vector<uint8_t> taken(static_cast<size_t>(experts), 0);
    for (int64_t j = 0; j < k; ++j) {
      const int32_t id = ids[j];
      const std::string at = "ids[" + std::to_string(r) + ", " + std::to_string(j) + "] is " + std::to_string(id);
      if (id < 0 || id >= experts) return at + ", of " + std::to_string(experts) + " experts";
      if (taken[static_cast<size_t>(id)]++ != 0) return at + " for the second time";
      if (!probabilities.sound && id != j) return at + " in a row without numbers";
      const Bounded got = probabilities.p[static_cast<size_t>(id)];
      for (int32_t other = 0; probabilities.sound && other < experts; ++other) {
        if (taken[static_cast<size_t>(other)] != 0) continue;
        const Bounded best = probabilities.p[static_cast<size_t>(other)];
        if (best.value - got.value > got.error + best.error || (x[other] == x[id] && other < id))
          return at + " before " + std::to_string(other);
      }
    }
  }
  return "";
}

std::vector<Expectation> router_expect(const Problem& given, const Problem& done) {
  const int64_t experts = given.number("experts"), k = given.number("k"), columns = given["ids"].shape[1];
  Expectation ids{"ids", {}, {}}, weights{"weights", {}, {}};
  for (int64_t r = 0; r < given.rows; ++r) {
    const Probabilities probabilities(given["logits"].as<float>() + r * experts, experts);
    const int32_t* chosen = done["ids"].as<int32_t>() + r * columns;
    double sum = 0, error = 0;
    const auto p = [&](int64_t j) {
      const int32_t id = chosen[j];
      return id >= 0 && id < experts ? probabilities.p[static_cast<size_t>(id)] : Bounded{};
    };
    for (int64_t j = 0; j < k; ++j) sum += p(j).value, error += p(j).error;
    const double relative = error / sum + gamma(static_cast<double>(k + 2));
    for (int64_t j = 0; j < k; ++j) {
      ids.push({static_cast<double>(chosen[j]), 0});
      if (!probabilities.sound)
        weights.push({std::nan(""), 0});
      else if (given.number("normalise") != 0)
        weights.push({p(j).value / sum, (p(j).error + p(j).value * relative) / sum * 1.0001 + 0x1p-148});
      else
        weights.push({p(j).value, p(j).error});
    }
    if (columns > k) ids.push({static_cast<double>(experts), 0});
  }
  return {ids, weights};
}

enum class RouterFault : uint8_t { None, HigherIdOnTies, NotRenormalised, Ascending };

void router_host(Problem& p, RouterFault fault) {
  const int64_t experts = p.number("experts"), k = p.number("k"), columns = p["ids"].shape[1];
  for (int64_t r = 0; r < p.rows; ++r) {
    const float* x = p["logits"].as<float>() + r * experts;
    const float highest = *std::max_element(x, x + experts);
    float lanes[32] = {};
    std::vector<float> e(static_cast<size_t>(experts));
    bool sound = true;
    for (int64_t i = 0; i < experts; ++i) {
      sound = sound && std::isfinite(x[i]);
      lanes[i % 32] += e[static_cast<size_t>(i)] = std::exp(x[i] - highest);
    }
    for (int d = 16; d > 0; d /= 2)
      for (int l = 0; l < d; ++l) lanes[l] += lanes[l + d];
    for (float& v : e) v /= lanes[0];
    std::vector<int32_t> order(static_cast<size_t>(experts));
    std::iota(order.begin(), order.end(), 0);
    if (fault == RouterFault::HigherIdOnTies) std::reverse(order.begin(), order.end());
    if (sound)
      std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
        return fault == RouterFault::Ascending ? e[static_cast<size_t>(a)] < e[static_cast<size_t>(b)]
                                               : e[static_cast<size_t>(a)] > e[static_cast<size_t>(b)];
      });
    float sum = 0;
    for (int64_t j = 0; j < k; ++j) sum += e[static_cast<size_t>(order[static_cast<size_t>(j)])];
    for (int64_t j = 0; j < k; ++j) {
      const int32_t id = order[static_cast<size_t>(j)];
      const float w = e[static_cast<size_t>(id)];
      p["ids"].as<int32_t>()[r * columns + j] = id;
      p["weights"].as<float>()[r * k + j] =
          p.number("normalise") != 0 && fault != RouterFault::NotRenormalised ? w / sum : w;
    }
    if (columns > k) p["ids"].as<int32_t>()[r * columns + k] = static_cast<int32_t>(experts);
  }
}

std::unique_ptr<Kernel> router_entry() {
  Entry e;
  e.record = {"router",
              "router",
              {{"router_kernel", 128, 64, 16 * 1024, 0, 0}},
              "1 <= k <= experts <= 1024, k at most 32, any rows",
              "a block of 128 threads a row",
              {{"logits", "F32", "[rows, experts]", 4, "read"},
               {"ids", "I32", "[rows, k], or [rows, k + 1], the last being experts", 4, "written"},
               {"weights", "F32", "[rows, k]", 4, "written"}},
              "none",
              "a row depends on its logits",
              "exponentials: a lane adds every 32nd ascending, then a butterfly; weights in slot order",
              "none",
              "a row with a logit that is NaN or inf takes the lowest ids and NaN weights"};
  const auto shape = [](int64_t experts, int64_t k, bool normalise, bool one_more) {
    return Shape{std::to_string(experts) + " experts, " + std::to_string(k) + (one_more ? " and one more" : "") +
                     (normalise ? " renormalised" : ""),
                 {{"experts", experts}, {"k", k}, {"normalise", normalise}, {"one_more", one_more}}};
  };
  e.host_shapes = {shape(32, 4, true, false), shape(100, 32, false, true)};
  e.more_device_shapes = {shape(512, 10, true, true), shape(1024, 32, true, false), shape(1, 1, true, false)};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t experts = p.number("experts");
    float* x = p.add("logits", DType::F32, Role::In, true, {rows, experts}).as<float>();
    fill(x, rows, experts, kind, {-30, 5}, Random(seed, 1), 3);
    // Ties in every row.
    for (int64_t r = 0; r < rows && experts >= 4; ++r) x[r * experts + experts - 1] = x[r * experts + experts / 2];
    p.add("ids", DType::I32, Role::Out, true, {rows, p.number("k") + p.number("one_more")});
    p.add("weights", DType::F32, Role::Out, true, {rows, p.number("k")});
    return p;
  };
  e.expect = router_expect;
  e.choices = router_choices;
  e.domain = [](const Problem& p) {
    require_range("experts", p.number("experts"), 1, 1024);
    require_range("k", p.number("k"), 1, std::min<int64_t>(32, p.number("experts")));
  };
  e.host = [](Problem& p) { router_host(p, RouterFault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->router(*backend->make_stream(), p.number("normalise") != 0, p["logits"].view(), p["ids"].view(),
                    p["weights"].view());
  };
  e.refusals = {{"1025 experts", set_number("experts", 1025)},
                {"no slots", set_number("k", 0)},
                {"33 slots", set_number("k", 33)}};
  const auto inside = [](const char* name, RouterFault fault) {
    return host_control(name, 2, [fault](Problem& p) { router_host(p, fault); });
  };
  e.controls = {inside("ties to the higher id", RouterFault::HigherIdOnTies),
                inside("weights not renormalised", RouterFault::NotRenormalised),
                inside("lowest probabilities first", RouterFault::Ascending)};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::router({d.get<float>("logits"), d.get<int32_t>("ids"), d.get<float>("weights"), p.rows, p.number("experts"),
                  p.number("k"), p.number("normalise") != 0, p.number("one_more") != 0},
                 d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

std::unique_ptr<Kernel> swiglu_entry() {
  Entry e;
  e.record = {"swiglu",
              "swiglu",
              {{"swiglu_kernel", 256, 64, 0, 0, 0}},
              "any count",
              "ceil(count / 256) blocks of 256 threads",
              {{"gate", "F32", "[count]", 4, "read"},
               {"up", "F32", "[count]", 4, "read"},
               {"out", "F32", "[count]", 4, "written"}},
              "out may be gate or up",
              "an element depends on its gate and up",
              "none: no sums",
              "none",
              "gates below -88 give 0"};
  e.host_shapes = {{"width 129", {{"width", 129}}}};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t width = p.number("width");
    fill(p.add("gate", DType::F32, Role::In, true, {rows, width}).as<float>(), rows, width, kind, {-30, 7},
         Random(seed, 1));
    fill(p.add("up", DType::F32, Role::In, true, {rows, width}).as<float>(), rows, width,
         kind == Kind::NonFinite ? Kind::Normal : kind, {}, Random(seed, 2));
    p.add("out", DType::F32, Role::Out, true, {rows, width});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    return std::vector<Expectation>{expect_elements(given["out"], [&](int64_t i) {
      const double gate = given["gate"].at(i), up = given["up"].at(i);
      Bounded b = swiglu_reference({gate, 0}, {up, 0});
      if (gate > -80) b.error = gamma(10) * std::abs(b.value) + 0x1p-149 * std::abs(up) + 0x1p-148;
      return b;
    })};
  };
  e.domain = [](const Problem& p) { require_range("count", p.rows * p.number("width"), 0, INT64_MAX); };
  e.host = [](Problem& p) {
    for (int64_t i = 0; i < p["out"].size(); ++i)
      p["out"].as<float>()[i] = swiglu_value(p["gate"].as<float>()[i], p["up"].as<float>()[i]);
  };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->swiglu(*backend->make_stream(), p["gate"].view(), p["up"].view(), p["out"].view());
  };
  e.refusals = {{"a negative count", set_number("width", -1)}};
  e.controls = {
      tamper_control("gate and up swapped", 2, [](Problem& p) { std::swap(p["gate"].storage, p["up"].storage); })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::swiglu({d.get<float>("gate"), d.get<float>("up"), d.get<float>("out"), p.rows * p.number("width")},
                 d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

void take_slots_host(Problem& p, bool parts_descending) {
  const int64_t hidden = p.number("hidden"), parts = p.number("parts");
  for (int64_t i = 0; i < p.rows; ++i) {
    int64_t part = std::min(p["ids"].as<int32_t>()[i] / p.number("per_part"), parts - 1);
    if (parts_descending) part = parts - 1 - part;
    std::copy_n(p["from"].as<float>() + (part * p.rows + i) * hidden, hidden, p["slots"].as<float>() + i * hidden);
  }
}

std::unique_ptr<Kernel> take_slots_entry() {
  Entry e;
  e.record = {"take_slots",
              "copy",
              {{"take_slots_kernel", 256, 64, 0, 0, 0}},
              "hidden a multiple of 4, one part or more, ids not negative",
              "ceil(rows * hidden / 1024) blocks of 256 threads",
              {{"ids", "I32", "[rows]", 4, "read"},
               {"from", "F32", "[parts, rows, hidden]", 16, "read"},
               {"slots", "F32", "[rows, hidden]", 16, "written"}},
              "none",
              "a row depends on its id and its row of the part that the id names",
              "none: no sums",
              "none",
              "ids past the last part's experts name the last part"};
  const auto shape = [](int64_t hidden, int64_t parts, int64_t per_part) {
    return Shape{std::to_string(parts) + " parts of " + std::to_string(per_part) + ", hidden " + std::to_string(hidden),
                 {{"hidden", hidden}, {"parts", parts}, {"per_part", per_part}}};
  };
  e.host_shapes = {shape(132, 2, 16), shape(64, 4, 8), shape(4, 1, 32)};
  e.more_device_shapes = {shape(2560, 2, 256), shape(2560, 8, 64)};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t hidden = p.number("hidden"), parts = p.number("parts"), experts = parts * p.number("per_part");
    Random random(seed, 1);
    auto* ids = p.add("ids", DType::I32, Role::In, true, {rows}).as<int32_t>();
    for (int64_t i = 0; i < rows; ++i) ids[i] = static_cast<int32_t>(random.below(experts + 1));
    fill(p.add("from", DType::F32, Role::In, false, {parts, rows, hidden}).as<float>(), parts * rows, hidden, kind, {},
         Random(seed, 2));
    p.add("slots", DType::F32, Role::Out, true, {rows, hidden});
    return p;
  };
  e.part = [](const Problem& whole, int64_t first, int64_t count) {
    Problem p{count, whole.numbers, {}};
    const int64_t hidden = whole.number("hidden"), parts = whole.number("parts");
    auto* ids = p.add("ids", DType::I32, Role::In, true, {count}).as<int32_t>();
    std::copy_n(whole["ids"].as<int32_t>() + first, count, ids);
    auto* from = p.add("from", DType::F32, Role::In, false, {parts, count, hidden}).as<float>();
    for (int64_t i = 0; i < parts; ++i)
      std::copy_n(whole["from"].as<float>() + (i * whole.rows + first) * hidden, count * hidden,
                  from + i * count * hidden);
    p.add("slots", DType::F32, Role::Out, true, {count, hidden});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    const int64_t hidden = given.number("hidden"), per_part = given.number("per_part");
    return std::vector<Expectation>{expect_elements(given["slots"], [&](int64_t i) {
      const int64_t row = i / hidden;
      const int64_t part = std::min(given["ids"].as<int32_t>()[row] / per_part, given.number("parts") - 1);
      return Bounded{given["from"].at(part * given.rows * hidden + i), 0};
    })};
  };
  e.domain = [](const Problem& p) {
    require_range("hidden", p.number("hidden"), 4, INT32_MAX, 4);
    require_range("parts", p.number("parts"), 1, INT32_MAX);
    require_range("experts of a part", p.number("per_part"), 1, INT32_MAX);
  };
  e.host = [](Problem& p) { take_slots_host(p, false); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->take_slots(*backend->make_stream(), p.number("per_part"), p["ids"].view(), p["from"].view(),
                        p["slots"].view());
  };
  e.exact_kinds = {Kind::Normal};
  e.refusals = {{"hidden of 130", set_number("hidden", 130)},
                {"no parts", set_number("parts", 0)},
                {"slots off by 4 bytes", misalign("slots", 4)}};
  e.controls = {host_control("parts in descending order", 2, [](Problem& p) { take_slots_host(p, true); }),
                tamper_control("every id of the first part", 2,
                               [](Problem& p) { std::fill_n(p["ids"].as<int32_t>(), p.rows, 0); })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::take_slots({d.get<int32_t>("ids"), d.get<float>("from"), d.get<float>("slots"), p.rows, p.number("hidden"),
                      p.number("parts"), p.number("per_part")},
                     d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

enum class CombineFault : uint8_t { None, Descending, SharedFirst, SharedSkipped };

// The shared expert's row r: an operand of its own, or the last of the row's slots.
const float* shared_row(const Problem& p, int64_t r) {
  const int64_t k = p.number("k"), hidden = p.number("hidden");
  return p.has("shared") ? p["shared"].as<float>() + r * hidden : p["slots"].as<float>() + (r * (k + 1) + k) * hidden;
}

void combine_host(Problem& p, CombineFault fault) {
  const int64_t k = p.number("k"), hidden = p.number("hidden"), columns = p["slots"].shape[1];
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t h = 0; h < hidden; ++h) {
      const float gate = sigmoid_value(p["shared_gate"].as<float>()[r]), shared = shared_row(p, r)[h];
      float sum = fault == CombineFault::SharedFirst ? std::fma(gate, shared, 0.0f) : 0.0f;
      for (int64_t i = 0; i < k; ++i) {
        const int64_t j = fault == CombineFault::Descending ? k - 1 - i : i;
        sum =
            std::fma(p["weights"].as<float>()[r * k + j], p["slots"].as<float>()[(r * columns + j) * hidden + h], sum);
      }
      if (fault == CombineFault::None || fault == CombineFault::Descending) sum = std::fma(gate, shared, sum);
      p["y"].as<float>()[r * hidden + h] = sum;
    }
}

std::unique_ptr<Kernel> combine_entry() {
  Entry e;
  e.record = {"combine",
              "combine",
              {{"combine_kernel", 128, 96, 0, 0, 0}},
              "hidden a multiple of 4, k from 1, any rows",
              "ceil(rows * hidden / 512) blocks of 128 threads",
              {{"slots", "F32", "[rows, k, hidden]", 16, "read"},
               {"weights", "F32", "[rows, k]", 4, "read"},
               {"shared", "F32", "[rows, hidden], or the last of k + 1 slots", 16, "read"},
               {"shared_gate", "F32", "[rows]", 4, "read"},
               {"y", "F32", "[rows, hidden]", 16, "written"}},
              "none",
              "a row depends on its slots, weights, shared row and gate",
              "one fma chain from 0 over slots ascending, the shared expert last",
              "none",
              "none beyond fp32"};
  const auto shape = [](int64_t hidden, int64_t k, bool one_more) {
    return Shape{
        "hidden " + std::to_string(hidden) + ", " + std::to_string(k) + (one_more ? " slots and one more" : " slots"),
        {{"hidden", hidden}, {"k", k}, {"one_more", one_more}}};
  };
  e.host_shapes = {shape(132, 4, false), shape(132, 4, true)};
  e.more_device_shapes = {shape(2560, 10, false), shape(2560, 10, true), shape(4, 1, false)};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t k = p.number("k"), hidden = p.number("hidden"), columns = k + p.number("one_more");
    const bool directed = kind == Kind::Directed;
    float* slots = p.add("slots", DType::F32, Role::In, true, {rows, columns, hidden}).as<float>();
    fill(slots, rows * columns, hidden, kind, {}, Random(seed, 1));
    Random random(seed, 2);
    float* weights = p.add("weights", DType::F32, Role::In, true, {rows, k}).as<float>();
    for (int64_t i = 0; i < rows * k; ++i) weights[i] = directed ? 1.0f : static_cast<float>(random.uniform());
    if (columns == k)
      fill(p.add("shared", DType::F32, Role::In, true, {rows, hidden}).as<float>(), rows, hidden,
           kind == Kind::NonFinite || directed ? Kind::Normal : kind, {}, random);
    fill(p.add("shared_gate", DType::F32, Role::In, true, {rows}).as<float>(), 1, rows, Kind::Normal, {}, random);
    if (directed) {
      // The same large, 1, -large in consecutive slots of every column; a gate of 0 makes sigmoid exactly 1/2.
      std::fill_n(p["shared_gate"].as<float>(), rows, 0.0f);
      const float pattern[] = {0x1p24f, 1.0f, -0x1p24f};
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t j = 0; j < columns; ++j)
          std::fill_n(slots + (r * columns + j) * hidden, hidden, pattern[(j + r) % 3]);
    } else if (kind == Kind::NonFinite) {
      // One clean row in three: the slots of a row are filled as rows of their own.
      for (int64_t r = 0; r < rows; r += 3)
        fill(slots + r * columns * hidden, columns, hidden, Kind::Normal, {}, Random(seed, 3));
    }
    p.add("y", DType::F32, Role::Out, true, {rows, hidden});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    const int64_t k = given.number("k"), hidden = given.number("hidden"), columns = given["slots"].shape[1];
    return std::vector<Expectation>{expect_elements(given["y"], [&](int64_t i) {
      const int64_t r = i / hidden;
      const double shared = shared_row(given, r)[i % hidden] / (1.0 + std::exp(-given["shared_gate"].at(r)));
      double sum = shared, magnitude = std::abs(shared);
      for (int64_t j = 0; j < k; ++j) {
        const double term = given["weights"].at(r * k + j) * given["slots"].at((r * columns + j) * hidden + i % hidden);
        sum += term;
        magnitude += std::abs(term);
      }
      // k + 1 fused additions, and the roundings of the sigmoid.
      return Bounded{sum, gamma(static_cast<double>(k + 1)) * magnitude +
                              gamma(kSigmoidRoundings + 1) * std::abs(shared) + 0x1p-140};
    })};
  };
  e.domain = [](const Problem& p) {
    require_range("hidden", p.number("hidden"), 4, INT32_MAX, 4);
    require_range("k", p.number("k"), 1, INT32_MAX);
  };
  e.host = [](Problem& p) { combine_host(p, CombineFault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->combine(*backend->make_stream(), p["slots"].view(), p["weights"].view(),
                     p.has("shared") ? p["shared"].view() : View{}, p["shared_gate"].view(), p["y"].view());
  };
  e.exact_kinds = {Kind::Directed};
  e.refusals = {{"hidden of 130", set_number("hidden", 130)},
                {"no slots", set_number("k", 0)},
                {"slots off by 4 bytes", misalign("slots", 4)},
                {"y off by 8 bytes", misalign("y", 8)}};
  const auto above_16_rows = [](const char* name, CombineFault fault) {
    return host_control(name, 3, [fault](Problem& p) { combine_host(p, p.rows > 16 ? fault : CombineFault::None); });
  };
  e.controls = {
      above_16_rows("slots in descending order above 16 rows", CombineFault::Descending),
      above_16_rows("shared expert first above 16 rows", CombineFault::SharedFirst),
      host_control("shared expert left out", 2, [](Problem& p) { combine_host(p, CombineFault::SharedSkipped); }),
      tamper_control("crossed slot table", 2, [](Problem& p) {
        float* w = p["weights"].as<float>();
        std::swap(w[0], w[p.number("k") - 1]);
      })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::combine({d.get<float>("slots"), d.get<float>("weights"), d.get<float>("shared"), d.get<float>("shared_gate"),
                   d.get<float>("y"), p.rows, p.number("k"), p.number("hidden"), p.number("one_more") != 0},
                  d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace

void add_moe(KernelList& list) {
  list.push_back(router_entry());
  list.push_back(swiglu_entry());
  list.push_back(take_slots_entry());
  list.push_back(combine_entry());
}

}  // namespace fnx::contract
