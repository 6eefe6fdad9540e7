#include "kernels/contract/contract.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <regex>
#include <set>

#include "kernels/contract/entry_tools.h"
#include "kernels/contract/exl3_math.h"
#include "kernels/contract/lanes.h"
#include "kernels/error.h"
#include "kernels/float16.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::contract;

namespace {

// y = a + b by rows of 8: small enough that every fault of the machinery shows.
class Sum : public Kernel {
 public:
  double bound = 1;  // ulps allowed
  Sum() {
    record_ = {"sum",
               "add",
               {{"sum_kernel", 256, 32, 0, 0, 0}},
               "any rows",
               "rows blocks",
               {{"a", "F32", "[rows, 8]", 16, "read"},
                {"b", "F32", "[rows, 8]", 16, "read"},
                {"y", "F32", "[rows, 8]", 16, "written"}},
               "none",
               "itself",
               "one addition",
               "none",
               "none"};
  }
  const Record& record() const override { return record_; }
  std::vector<Shape> shapes(Effort) const override { return {{"rows of 8", {{"width", 8}}}}; }
  Problem make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) const override {
    Problem p{rows, shape.numbers, {}};
    fill(p.add("a", DType::F32, Role::In, true, {rows, 8}).as<float>(), rows, 8, kind, {}, Random(seed, 1));
    fill(p.add("b", DType::F32, Role::In, true, {rows, 8}).as<float>(), rows, 8, Kind::Normal, {}, Random(seed, 2));
    p.add("y", DType::F32, Role::Out, true, {rows, 8});
    return p;
  }
  std::vector<Expectation> expect(const Problem& given, const Problem&) const override {
    Expectation y{"y", {}, {}};
    for (int64_t i = 0; i < given["y"].size(); ++i) {
      const double value = given["a"].at(i) + given["b"].at(i);
      y.push({value, bound * kUnit * std::abs(value)});
    }
    return {y};
  }
  void require(const Problem& p) const override {
    require_range("width", p.number("width"), 8, 8);
    require_alignment(p, record_);
  }
  void host(Problem& p) const override {
    for (int64_t i = 0; i < p["y"].size(); ++i) p["y"].as<float>()[i] = p["a"].as<float>()[i] + p["b"].as<float>()[i];
  }
  std::vector<Refusal> refusals() const override {
    return {{"a width of 9", set_number("width", 9)}, {"a off by 4 bytes", misalign("a", 4)}};
  }
  std::vector<Control> controls() const override { return extra; }
  std::vector<Control> extra;
  Record record_;
};

KernelList list_of(std::unique_ptr<Kernel> kernel) {
  KernelList list;
  list.push_back(std::move(kernel));
  return list;
}

}  // namespace

TEST_CASE("contract: a sound kernel passes with every control red") {
  const KernelList list = list_of(std::make_unique<Sum>());
  const Options options;
  const Report report = run_contract(options, list);
  CHECK(report.completed);
  REQUIRE(report.kernels.size() == 1);
  for (int gate = 2; gate <= 4; ++gate) {
    CAPTURE(report.kernels[0].gates[gate - 1].detail);
    CHECK(report.kernels[0].gates[gate - 1].outcome == Outcome::Pass);
  }
  CHECK(report.kernels[0].gates[0].outcome == Outcome::NotRun);
  CHECK(report.controls_run() >= 15);
  for (const ControlResult& c : report.kernels[0].controls) {
    CAPTURE(c.name);
    CHECK(c.red);
  }
  CHECK(report.sound(options));
  CHECK(report.kernels[0].values.worst_fraction > 0.5);
  CHECK(report.kernels[0].values.worst_fraction <= 1);
  REQUIRE(report.kernels[0].by_shape.size() == 1);
  CHECK(report.kernels[0].by_shape[0].first == "rows of 8");
  CHECK(report.kernels[0].by_shape[0].second.values == report.kernels[0].values.values);
}

TEST_CASE("contract: threads do not change what is reported when cases fail") {
  Sum kernel;
  kernel.bound = 0.25;
  std::vector<Comparison> found;
  Cases cases{kernel.shapes(Effort::Host), {std::begin(kAllKinds), std::end(kAllKinds)}, 1};
  const GateResult alone = check_values(kernel, kernel.host_implementation(), cases, {}, found);
  CHECK(alone.outcome == Outcome::Fail);
  cases.threads = 4;
  for (int i = 0; i < 50; ++i) {
    const GateResult together = check_values(kernel, kernel.host_implementation(), cases, {}, found);
    REQUIRE(together.outcome == Outcome::Fail);
    REQUIRE(together.detail == alone.detail);
  }
}

TEST_CASE("contract: a bound that no fault can break fails the run") {
  auto kernel = std::make_unique<Sum>();
  kernel->bound = 1e30;
  const KernelList list = list_of(std::move(kernel));
  const Report report = run_contract({}, list);
  CHECK(report.kernels[0].gates[1].outcome == Outcome::Pass);
  CHECK(report.controls_red() < report.controls_run());
  CHECK_FALSE(report.sound({}));
}

TEST_CASE("contract: a control that stays green fails the run") {
  auto kernel = std::make_unique<Sum>();
  kernel->extra.push_back(spoil_control("no fault at all", 2, [](const Problem&, Problem&) {}));
  const KernelList list = list_of(std::move(kernel));
  const Report report = run_contract({}, list);
  CHECK(report.controls_red() + 1 == report.controls_run());
  CHECK_FALSE(report.sound({}));
}

TEST_CASE("contract: a time cap that is hit reports not completed") {
  const KernelList list = list_of(std::make_unique<Sum>());
  Options options;
  options.seconds = 1e-9;
  const Report report = run_contract(options, list);
  CHECK_FALSE(report.completed);
  CHECK(report.kernels_passed(options) == 0);
  CHECK(std::any_of(report.kernels[0].gates.begin(), report.kernels[0].gates.end(),
                    [](const GateResult& g) { return g.outcome == Outcome::NotCompleted; }));
}

TEST_CASE("contract: a record that lacks a field is a limit problem") {
  auto kernel = std::make_unique<Sum>();
  kernel->record_.sum_order.clear();
  kernel->record_.symbols[0].dynamic_shared_bytes = 100 * 1024;
  const KernelList list = list_of(std::move(kernel));
  const Report report = run_contract({}, list);
  REQUIRE(report.limit_problems.size() == 2);
  CHECK(report.limit_problems[0] == "sum: its record lacks sum_order");
  CHECK_FALSE(report.sound({}));
}

TEST_CASE("contract: gate 1 compares what was launched with the record") {
  const Record record = Sum().record();
  CHECK(check_resources(record, {{"_ZN3fnx10sum_kernelE", 32, 1024, 256, 0, 0, 0}}).outcome == Outcome::Pass);
  CHECK(check_resources(record, {{"_ZN3fnx10sum_kernelE", 33, 1024, 256, 0, 0, 0}}).outcome == Outcome::Fail);
  CHECK(check_resources(record, {{"_ZN3fnx10sum_kernelE", 32, 128, 256, 0, 0, 0}}).outcome == Outcome::Fail);
  CHECK(check_resources(record, {{"_ZN3fnx10sum_kernelE", 32, 1024, 256, 0, 0, 8}}).outcome == Outcome::Fail);
  CHECK(check_resources(record, {{"_ZN3fnx12other_kernelE", 32, 1024, 256, 0, 0, 0}}).outcome == Outcome::Fail);
  CHECK(check_resources(record, {}).outcome == Outcome::Fail);
}

TEST_CASE("contract: a comparison fails on poison, wrong classes and values outside the bound") {
  Problem p;
  Operand& y = p.add("y", DType::F32, Role::Out, true, {2, 2});
  const float inf = std::numeric_limits<float>::infinity(), nan = std::numeric_limits<float>::quiet_NaN();
  const auto set = [&](std::initializer_list<float> values) { std::copy(values.begin(), values.end(), y.as<float>()); };
  const Expectation wanted{"y", {1, 2, inf, nan}, {0.5, 0, 0, 0}};
  CHECK(compare(wanted, y).failure == "y[0, 0] was not written");
  set({1.25f, 2, inf, nan});
  CHECK(compare(wanted, y).failure.empty());
  CHECK(compare(wanted, y).worst_fraction == 0.5);
  CHECK(compare(wanted, y).unbounded == 2);
  set({1.75f, 2, inf, nan});
  CHECK(compare(wanted, y).failure.starts_with("y[0, 0] is 1.75"));
  set({1, 2, -inf, nan});
  CHECK(compare(wanted, y).failure.starts_with("y[1, 0] is -inf"));
  set({1, nan, inf, nan});
  CHECK(compare(wanted, y).failure.starts_with("y[0, 1] is nan"));
  set({1, 2, inf, 0});
  CHECK(compare(wanted, y).failure.starts_with("y[1, 1] is 0"));
}

TEST_CASE("contract: rounding to fp16 in fp64 agrees with the conversion of fp32 numbers") {
  Random random(3, 4);
  for (int i = 0; i < 100000; ++i) {
    const auto x = static_cast<float>(std::ldexp(random.uniform() - 0.5, static_cast<int>(random.below(44)) - 26));
    const Bounded r = round_to_f16({x, 0});
    REQUIRE(r.value == f16_to_f32(f32_to_f16(x)));
    REQUIRE(r.error == 0);
  }
  // Halfway between two neighbours: the other one lies within the error.
  const double halfway = 1.0 + 0x1p-11;
  CHECK(round_to_f16({halfway, 0}).value == 1.0);
  CHECK(round_to_f16({halfway, 1e-9}).error == 0x1p-10);
  CHECK(round_to_f16({1.0, 1e-9}).error == 0);
}

TEST_CASE("contract: a window has its rows' inputs and poisoned outputs of its own") {
  const Sum kernel;
  const Problem whole = kernel.make(kernel.shapes(Effort::Host)[0], Kind::Normal, 9, 1);
  const Problem part = window(whole, 3, 2);
  CHECK(part.rows == 2);
  CHECK(part["a"].at(0) == whole["a"].at(24));
  CHECK(std::isnan(part["y"].at(0)));
  CHECK(damaged_guard(part).empty());
  Problem moved = displaced(whole, 16);
  CHECK(moved["a"].at(5) == whole["a"].at(5));
  moved["b"].storage.back() = std::byte{0};
  CHECK(damaged_guard(moved) == "b");
}

TEST_CASE("contract: directed rows of an EXL3 layer show the order of the splits") {
  const int64_t in = 640, out = 128;
  Random random(5, 6);
  std::vector<uint16_t> trellis(in / 16 * out / 16 * exl3::tile_words(8)), suh(in), svh(out);
  fill_trellis(trellis.data(), in, out, 8, random, true);
  fill_scales(suh.data(), in, random, true);
  fill_scales(svh.data(), out, random, true);
  const Exl3Matrix m{in, out, 4, exl3::Codebook::Mul1, 8, trellis.data(), suh.data(), svh.data(), nullptr};
  std::vector<float> x(32 * in), y(out), other(out);
  fill_directed(x.data(), 32, in, suh.data(), random);
  const std::vector<float> decoded = decode(m);
  int differ = 0;
  for (int r = 0; r < 32; ++r) {
    linear_row(m, decoded, x.data() + r * in, y.data());
    linear_row(m, decoded, x.data() + r * in, other.data(), Exl3Fault::ReversedSplits);
    differ += y != other ? 1 : 0;
  }
  CHECK(differ > 4);
}

TEST_CASE("contract: lanes name slots that their states have, for every number of rows and trials") {
  for (int64_t rows = 1; rows <= kMostRowsAlone + 2; ++rows)
    for (int64_t trials = 0; trials <= 3; ++trials) {
      Problem problem{rows, {{"trials", trials}}, {}};
      add_lanes(problem, rows);
      CAPTURE(rows);
      CAPTURE(trials);
      int64_t found = 0;
      for (const Lane& lane : lanes_of(problem)) {
        CHECK(lane.slot >= 0);
        CHECK(lane.slot < lane_slots(rows));
        found += lane.rows;
      }
      CHECK(found == rows);
    }
}

TEST_CASE("contract: every launch function of kernels/cuda has a record, or is part of one that has") {
  const std::regex launch(R"(void ([a-z0-9_]+)\([^;]*stream\);)");
  std::set<std::string> declared, recorded, known(launch_functions().begin(), launch_functions().end());
  for (const auto& entry : std::filesystem::directory_iterator(FNX_SOURCE_DIR "/kernels/cuda")) {
    if (entry.path().extension() != ".h") continue;
    const std::string text = test::read_file(entry.path());
    for (std::sregex_iterator m(text.begin(), text.end(), launch), end; m != end; ++m) declared.insert((*m)[1]);
  }
  for (const auto& kernel : registry()) recorded.insert(kernel->record().id);
  for (const auto& [part, whole] : launch_parts()) {
    CHECK(recorded.contains(whole));
    known.insert(part);
  }
  CHECK(recorded == std::set<std::string>(launch_functions().begin(), launch_functions().end()));
  CHECK(declared == known);
}

TEST_CASE("contract: every registered record is complete") {
  for (const auto& kernel : registry()) {
    CAPTURE(kernel->record().id);
    CHECK(missing_fields(kernel->record()).empty());
    CHECK_FALSE(kernel->refusals().empty());
    CHECK_FALSE(kernel->shapes(Effort::Host).empty());
  }
}

TEST_CASE("contract: every kernel's host side passes and every planted fault is seen") {
  Options options;
  const Report report = run_contract(options);
  CHECK(report.completed);
  for (const KernelReport& k : report.kernels) {
    CAPTURE(k.kernel->record().id);
    for (int gate = 2; gate <= 4; ++gate) {
      CAPTURE(k.gates[gate - 1].detail);
      CHECK(k.gates[gate - 1].outcome == Outcome::Pass);
    }
    CAPTURE(k.against_cpu.detail);
    CHECK(k.against_cpu.outcome != Outcome::Fail);
    for (const ControlResult& c : k.controls) {
      CAPTURE(c.name);
      CHECK(c.red);
    }
  }
}
