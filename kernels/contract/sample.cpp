// Greedy and seeded sampling: the drawn id's interval of the distribution must hold the row's uniform number.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/cuda/sample.h"
#include "kernels/ops.h"
#include "kernels/random.h"

namespace fnx::contract {

namespace {

// Masses are integers of 2^-44 of the largest weight and weights come from fp32 exponentials of fp32 differences: a
// draw may differ from the fp64 sums' only this close to a boundary, relative to the total.
constexpr double kBoundary = 0x1p-20;

std::vector<SampleParams> params_of(const Problem& p) {
  std::vector<SampleParams> rows(static_cast<size_t>(p.rows));
  const auto* bytes = p["params"].data();
  for (size_t r = 0; r < rows.size(); ++r)
    std::memcpy(&rows[r], bytes + r * sizeof(cuda::SampleRow), sizeof(SampleParams));
  return rows;
}
static_assert(sizeof(SampleParams) == sizeof(cuda::SampleRow));

// Ids by logit, ties to the lower id, NaN last.
std::vector<int32_t> ranking(const float* logits, int64_t valid) {
  std::vector<int32_t> order(static_cast<size_t>(valid));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    const bool nan_a = std::isnan(logits[a]), nan_b = std::isnan(logits[b]);
    return nan_a != nan_b ? nan_b : !nan_a && logits[a] > logits[b];
  });
  return order;
}

// Weights of the ranked candidates that the filters leave. `slack` moves the filters' limits, to find what rounding may
// keep or drop.
struct Candidates {
  std::vector<double> weight;
  double total = 0;

  Candidates(const float* logits, const std::vector<int32_t>& order, const SampleParams& p, double slack) {
    const auto all = static_cast<int64_t>(order.size());
    int64_t kept = p.top_k > 0 ? std::min<int64_t>(p.top_k, all) : all;
    double mass = 0, sum = 0;
    for (int64_t i = 0; i < kept; ++i) {
      weight.push_back(std::exp((double{logits[order[static_cast<size_t>(i)]]} - logits[order[0]]) / p.temperature));
      sum += weight.back();
    }
    if (p.top_p < 1) {
      int64_t n = 0;
      for (; n < kept && (n == 0 || mass < (p.top_p + slack) * sum); ++n) mass += weight[static_cast<size_t>(n)];
      kept = n;
    }
    while (p.min_p > 0 && kept > 1 && weight[static_cast<size_t>(kept - 1)] < (p.min_p - slack) * weight[0]) --kept;
    weight.resize(static_cast<size_t>(kept));
    total = std::accumulate(weight.begin(), weight.end(), 0.0);
  }
};

std::string row_choice(const float* logits, int64_t valid, const SampleParams& p, int32_t id) {
  const std::vector<int32_t> order = ranking(logits, valid);
  const std::string is = "is " + std::to_string(id);
  const auto place = std::find(order.begin(), order.end(), id) - order.begin();
  if (place == static_cast<int64_t>(order.size())) return is + ", of " + std::to_string(valid) + " ids";
  if (p.temperature <= 0 || !std::isfinite(logits[order[0]]))
    return place == 0 ? "" : is + ", its reference " + std::to_string(order[0]);
  const double u = uniform(p.seed, p.stream, static_cast<uint64_t>(p.position));
  for (const double slack : {0.0, kBoundary, -kBoundary}) {
    const Candidates c(logits, order, p, slack);
    if (place >= static_cast<int64_t>(c.weight.size())) continue;
    double before = 0;
    for (int64_t i = 0; i < place; ++i) before += c.weight[static_cast<size_t>(i)];
    const double after = before + c.weight[static_cast<size_t>(place)];
    if (u >= before / c.total - kBoundary && u <= after / c.total + kBoundary) return "";
  }
  return is + ", whose part of the distribution does not hold " + std::to_string(u);
}

std::string sample_choices(const Problem& given, const Problem& done) {
  const int64_t vocabulary = given.number("vocabulary"), valid = given.number("valid");
  const std::vector<SampleParams> params = params_of(given);
  for (int64_t r = 0; r < given.rows; ++r) {
    const std::string what = row_choice(given["logits"].as<float>() + r * vocabulary, valid,
                                        params[static_cast<size_t>(r)], done["ids"].as<int32_t>()[r]);
    if (!what.empty()) return "ids[" + std::to_string(r) + "] " + what;
  }
  return "";
}

Problem sample_make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
  Problem p{rows, shape.numbers, {}};
  const int64_t vocabulary = p.number("vocabulary"), valid = p.number("valid");
  float* x = p.add("logits", DType::F32, Role::In, true, {rows, vocabulary}).as<float>();
  fill(x, rows, vocabulary, kind == Kind::NonFinite ? Kind::Normal : kind, {-30, 4}, Random(seed, 1), 7);
  Random random(seed, 2);
  Operand& params = p.add("params", DType::U8, Role::In, true, {rows, static_cast<int64_t>(sizeof(cuda::SampleRow))});
  for (int64_t r = 0; r < rows; ++r) {
    // The highest logit twice, and higher ones beyond the valid ids.
    x[r * vocabulary + valid / 2] = x[r * vocabulary + valid - 1] = 17.0f;
    for (int64_t i = valid; i < vocabulary; ++i) x[r * vocabulary + i] = 90.0f;
    if (kind == Kind::NonFinite && r % 3 == 1) x[r * vocabulary + 3] = std::nanf("");
    SampleParams row;
    const bool greedy = p.number("greedy") != 0;
    row.temperature = greedy || r % 7 == 6 ? 0.0f : 0.5f + 2.0f * static_cast<float>(random.uniform());
    row.top_k = r % 3 == 1 ? 20 : 0;
    row.top_p = r % 4 == 2 ? 0.9f : 1.0f;
    row.min_p = r % 5 == 3 ? 0.01f : 0.0f;
    row.seed = seed, row.stream = static_cast<uint64_t>(r % 3), row.position = 100 + r;
    std::memcpy(params.data() + static_cast<size_t>(r) * sizeof(row), &row, sizeof row);
  }
  p.add("ids", DType::I32, Role::Out, true, {rows});
  return p;
}

enum class Fault : uint8_t { None, HigherIdOnTies, IgnoresPosition, AllIds };

void sample_host(Problem& p, Fault fault) {
  const int64_t vocabulary = p.number("vocabulary");
  const int64_t valid = fault == Fault::AllIds ? vocabulary : p.number("valid");
  const std::vector<SampleParams> params = params_of(p);
  for (int64_t r = 0; r < p.rows; ++r) {
    SampleParams row = params[static_cast<size_t>(r)];
    if (fault == Fault::IgnoresPosition) row.position = 0;
    const float* x = p["logits"].as<float>() + r * vocabulary;
    const std::vector<int32_t> order = ranking(x, valid);
    int32_t& id = p["ids"].as<int32_t>()[r];
    id = order[0];
    if (row.temperature <= 0) {
      if (fault == Fault::HigherIdOnTies && x[order[1]] == x[order[0]]) id = order[1];
      continue;
    }
    const Candidates c(x, order, row, 0);
    double left = uniform(row.seed, row.stream, static_cast<uint64_t>(row.position)) * c.total;
    size_t i = 0;
    while (i + 1 < c.weight.size() && (left -= c.weight[i]) >= 0) ++i;
    id = order[i];
  }
}

}  // namespace

void add_sample(KernelList& list) {
  Entry e;
  e.record = {"sample",
              "sample",
              {{"best_kernel", 256, 64, 64, 0, 0},
               {"greedy_kernel", 128, 64, 64, 0, 0},
               {"mass_kernel", 256, 64, 48 * 1024, 0, 0},
               {"draw_kernel", 1024, 64, 48 * 1024, 0, 32}},
              "1 <= valid <= vocabulary < 2^31, fewer than 65536 rows",
              "chunks of the valid ids by rows, then a block a row when greedy or a cluster of 8 blocks a row",
              {{"logits", "F32", "[rows, vocabulary]", 4, "read"},
               {"params", "SampleRow", "[rows]", 8, "read"},
               {"ids", "I32", "[rows]", 4, "written"}},
              "none",
              "a row depends on its logits and its (seed, stream, position)",
              "none: masses are integers of 2^-44 of the largest",
              "weights to multiples of 2^-44",
              "a row whose highest logit is not finite takes its highest-ranked id"};
  const auto shape = [](int64_t valid, int64_t vocabulary, bool greedy) {
    return Shape{std::to_string(valid) + " of " + std::to_string(vocabulary) + (greedy ? " greedy" : ""),
                 {{"valid", valid}, {"vocabulary", vocabulary}, {"greedy", greedy}}};
  };
  e.host_shapes = {shape(300, 320, false), shape(300, 320, true)};
  e.more_device_shapes = {shape(70000, 70400, false), shape(70000, 70400, true)};
  e.value_rows = 24;
  e.bit_rows = 130;
  e.make = sample_make;
  e.expect = [](const Problem&, const Problem& done) {
    // What was drawn is judged as a choice; here only that something was.
    return std::vector<Expectation>{expect_elements(done["ids"], [&](int64_t i) {
      return Bounded{done["ids"].at(i), 0};
    })};
  };
  e.choices = sample_choices;
  e.domain = [](const Problem& p) {
    require_range("rows", p.rows, 0, 65535);
    require_range("valid", p.number("valid"), 1, p.number("vocabulary"));
  };
  e.host = [](Problem& p) { sample_host(p, Fault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    const std::vector<SampleParams> params = params_of(p);
    backend->sample(*backend->make_stream(), p.number("valid"), false, params_view(params), p["logits"].view(),
                    p["ids"].view());
  };
  e.refusals = {{"no valid ids", set_number("valid", 0)}, {"more valid ids than 320", set_number("valid", 321)}};
  const auto inside = [](const char* name, Fault fault) {
    return host_control(name, 2, [fault](Problem& p) { sample_host(p, fault); });
  };
  e.controls = {inside("ties to the higher id", Fault::HigherIdOnTies),
                inside("position left out", Fault::IgnoresPosition),
                inside("ids beyond the valid ones", Fault::AllIds)};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::SampleLaunch s;
    s.logits = d.get<float>("logits"), s.rows = d.get<cuda::SampleRow>("params"), s.ids = d.get<int32_t>("ids");
    s.count = p.rows, s.valid = p.number("valid"), s.vocabulary = p.number("vocabulary");
    s.greedy = p.number("greedy") != 0;
    const auto words = [&](const char* name, int64_t count) { return d.scratch_of<uint64_t>(name, count); };
    s.masses = s.greedy ? nullptr : words("masses", p.rows * s.valid);
    s.bins = s.greedy ? nullptr : words("bins", p.rows * 2 * 2048);
    s.best = words("best", p.rows * cuda::sample_chunks(std::max<int64_t>(s.valid, 1)));
    cuda::sample(s, d.stream());
  };
#endif
  list.push_back(make_kernel(std::move(e)));
}

}  // namespace fnx::contract
