#include "kernels/contract/contract.h"

#include <algorithm>
#include <exception>
#include <thread>

#include "kernels/contract/device.h"
#include "kernels/contract/families.h"
#include "kernels/cpu/threads.h"
#include "kernels/error.h"

namespace fnx::contract {

namespace {

const std::vector<Kind> kEveryKind(std::begin(kAllKinds), std::end(kAllKinds));
// Bits are compared where rounding is certain and where the order of additions shows.
const std::vector<Kind> kBitKinds = {Kind::Normal, Kind::Exponents, Kind::NonFinite, Kind::Directed};

// A case of a large shape takes some hundred MB, which more threads would multiply.
constexpr unsigned kMostThreads = 16;

// A failed launch leaves the device unusable for the rest of the process.
struct DeviceLost {};

// A gate that throws has failed, with the error as its detail; running out of time goes on up.
void guarded(GateResult& result, const std::function<GateResult()>& gate) {
  try {
    result = gate();
  } catch (const Error& error) {
    result = {Outcome::Fail, error.what(), 0};
    if (error.kind() == ErrorKind::Device) throw DeviceLost{};
  }
}

GateResult measure_resources(const Kernel& kernel, const Cases& cases, const Deadline& deadline,
                             std::vector<SymbolResources>& all) {
  for (const Shape& shape : cases.shapes)
    // 17 and 128: windows of the third gate.
    for (const int64_t rows : {int64_t{1}, kernel.value_rows(), std::min<int64_t>(17, kernel.bit_rows()),
                               std::min<int64_t>(128, kernel.bit_rows()), kernel.bit_rows()}) {
      deadline.check();
      for (SymbolResources& r : kernel.resources(kernel.make(shape, Kind::Normal, rows, 1))) {
        const auto same = [&](const SymbolResources& o) {
          return o.name == r.name && o.threads == r.threads && o.dynamic_shared_bytes == r.dynamic_shared_bytes;
        };
        if (std::none_of(all.begin(), all.end(), same)) all.push_back(std::move(r));
      }
    }
  return check_resources(kernel.record(), all);
}

// The host implementation and kernels/cpu, which share no code, within one bound.
GateResult compare_with_cpu(const Kernel& kernel, const Deadline& deadline) {
  GateResult result{Outcome::NotRun, "kernels/cpu has no such operation", 0};
  for (const Kind kind : {Kind::Normal, Kind::Cancelling, Kind::Extremes}) {
    deadline.check();
    const Problem given = kernel.make(kernel.shapes(Effort::Host).at(0), kind, kernel.value_rows(), 77);
    Problem cpu = given, host = given;
    if (!kernel.cpu(cpu)) return result;
    kernel.host(host);
    for (const auto& [done, name] : {std::pair{&cpu, "kernels/cpu: "}, std::pair{&host, "host: "}}) {
      ++result.checks;
      std::string what = kernel.check_choices(given, *done);
      for (const Expectation& wanted : kernel.expect_cpu(given, *done))
        if (what.empty()) what = compare(wanted, (*done)[wanted.operand]).failure;
      if (!what.empty())
        return {Outcome::Fail, std::string(kind_name(kind)) + " inputs, " + name + what, result.checks};
    }
    result = {Outcome::Pass, "", result.checks};
  }
  return result;
}

void run_kernel(const Options& options, const Kernel& kernel, const Deadline& deadline, KernelReport& report) {
  const Implementation host = kernel.host_implementation();
  const Implementation device = options.device ? kernel.device() : Implementation{};
  const Implementation& tested = options.device ? device : host;
  const int threads = static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1u, kMostThreads));
  const Cases values{kernel.shapes(options.device && !options.small ? Effort::Device : Effort::Host), kEveryKind,
                     threads};
  const Cases bits{values.shapes, kBitKinds, threads};
  const auto run = [&](int gate, const std::function<GateResult()>& body) {
    GateResult& result = report.gates[static_cast<size_t>(gate - 1)];
    if (!options.gates[static_cast<size_t>(gate - 1)]) {
      result.detail = "not asked for";
      return;
    }
    if (!tested.launch) {
      result = {Outcome::Fail, "the kernel has no device launch", 0};
      return;
    }
    result = {Outcome::NotCompleted, "the time was up", 0};
    guarded(result, body);
  };
  if (options.device)
    run(1, [&] { return measure_resources(kernel, values, deadline, report.resources); });
  else
    report.gates[0].detail = "no device";
  run(2, [&] {
    std::vector<Comparison> found;
    const GateResult result = check_values(kernel, tested, values, deadline, found);
    for (size_t i = 0; i < found.size(); ++i) {
      report.values.merge(found[i]);
      report.by_shape.emplace_back(values.shapes[i].label, found[i]);
    }
    return result;
  });
  run(3, [&] { return check_bits(kernel, tested, bits, deadline); });
  run(4, [&] { return check_refusals(kernel, tested, deadline); });
  guarded(report.against_cpu, [&] { return compare_with_cpu(kernel, deadline); });

  std::vector<std::pair<Control, const Implementation*>> plants;
  for (const Control& control : all_controls(kernel)) {
    if (!options.gates[static_cast<size_t>(control.gate - 1)]) continue;
    plants.emplace_back(control, &host);
    if (device.launch && !control.host_only) plants.emplace_back(control, &device);
  }
  for (const auto& [control, sound] : plants)
    report.controls.push_back({control.name, control.gate, sound->name, false, "the time was up"});
  std::vector<std::exception_ptr> thrown(plants.size());
  cpu::ThreadPool pool(threads);
  pool.run(static_cast<int64_t>(plants.size()), [&](int64_t i) {
    const auto at = static_cast<size_t>(i);
    ControlResult& result = report.controls[at];
    try {
      result = run_control(kernel, plants[at].first, *plants[at].second, deadline);
    } catch (const Error& error) {
      result.detail = error.what();
      if (error.kind() == ErrorKind::Device) thrown[at] = std::make_exception_ptr(DeviceLost{});
    } catch (...) {
      thrown[at] = std::current_exception();
    }
  });
  for (const std::exception_ptr& e : thrown)
    if (e) std::rethrow_exception(e);
}

}  // namespace

const KernelList& registry() {
  static const KernelList list = [] {
    KernelList all;
    add_exl3_linear(all);
    add_exl3_experts(all);
    add_exl3_parts(all);
    add_moe(all);
    add_expert_pool(all);
    add_dense(all);
    add_plain(all);
    add_gdn(all);
    all.push_back(qsa_write_entry());
    all.push_back(qsa_select_entry());
    all.push_back(qsa_attend_entry());
    add_sample(all);
    add_ple(all);
    return all;
  }();
  return list;
}

const std::vector<std::string>& launch_functions() {
  static const std::vector<std::string> names = {
      "exl3_linear",  "exl3_linear_many", "exl3_rotate",       "exl3_decode",  "exl3_experts",  "exl3_experts_many",
      "router",       "swiglu",           "combine",           "embed",        "add",           "move_rows",
      "grouped_norm", "plain_linear",     "plain_linear_pair", "hc_mix",       "hc_inject",     "gdn",
      "qsa_write",    "qsa_select",       "qsa_attend",        "ngram_decode", "ple_mix",       "sample",
      "exl3_linears", "take_slots",       "plan_experts",      "fill_planned", "fill_foreseen", "settle_planned"};
  return names;
}

const std::vector<std::pair<std::string, std::string>>& launch_parts() {
  static const std::vector<std::pair<std::string, std::string>> parts = {{"exl3_linear_few", "exl3_linear"},
                                                                         {"exl3_experts_few", "exl3_experts"},
                                                                         {"gdn_conv", "gdn"},
                                                                         {"gdn_recurrence", "gdn"},
                                                                         {"gdn_norm", "gdn"},
                                                                         {"hc_down", "hc_mix"},
                                                                         {"hc_up", "hc_mix"},
                                                                         {"hc_down_row", "hc_mix"},
                                                                         {"hc_up_row", "hc_mix"},
                                                                         {"hc_up_tile", "hc_mix"},
                                                                         {"qsa_scores", "qsa_select"}};
  return parts;
}

bool selected(const Options& options, const std::string& id) {
  return options.filters.empty() || std::any_of(options.filters.begin(), options.filters.end(),
                                                [&](const std::string& f) { return id.find(f) != std::string::npos; });
}

bool KernelReport::passed(const Options& options) const {
  for (size_t g = 0; g < gates.size(); ++g)
    if (options.gates[g] && gates[g].outcome != Outcome::Pass && (options.device || g != 0)) return false;
  return against_cpu.outcome == Outcome::Pass || against_cpu.outcome == Outcome::NotRun;
}

size_t Report::kernels_passed(const Options& options) const {
  return static_cast<size_t>(
      std::count_if(kernels.begin(), kernels.end(), [&](const KernelReport& k) { return k.passed(options); }));
}

size_t Report::controls_run() const {
  size_t n = 0;
  for (const KernelReport& k : kernels) n += k.controls.size();
  return n;
}

size_t Report::controls_red() const {
  size_t n = 0;
  for (const KernelReport& k : kernels)
    n += static_cast<size_t>(
        std::count_if(k.controls.begin(), k.controls.end(), [](const ControlResult& c) { return c.red; }));
  return n;
}

bool Report::sound(const Options& options) const {
  return completed && !kernels.empty() && kernels_passed(options) == kernels.size() &&
         controls_red() == controls_run() && limit_problems.empty();
}

Report run_contract(const Options& options, const KernelList& kernels) {
  Report report;
  const Deadline deadline(options.seconds, options.stopping);
  for (const auto& kernel : kernels)
    if (selected(options, kernel->record().id)) {
      report.kernels.emplace_back();
      report.kernels.back().kernel = kernel.get();
      for (GateResult& gate : report.kernels.back().gates) gate = {Outcome::NotCompleted, "the time was up", 0};
      for (const std::string& field : missing_fields(kernel->record()))
        report.limit_problems.push_back(kernel->record().id + ": its record lacks " + field);
    }
  if (&kernels == &registry())
    for (const std::string& name : launch_functions())
      if (selected(options, name) &&
          std::none_of(kernels.begin(), kernels.end(), [&](const auto& k) { return k->record().id == name; }))
        report.limit_problems.push_back(name + ": no record");
  try {
    for (size_t i = 0; i < report.kernels.size(); ++i) {
      KernelReport& k = report.kernels[i];
      if (options.progress) options.progress(k.kernel->record().id, i, report.kernels.size());
      const auto start = std::chrono::steady_clock::now();
      for (GateResult& gate : k.gates) gate = {};
      run_kernel(options, *k.kernel, deadline, k);
      k.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
      for (const SymbolResources& r : k.resources)
        if (r.static_shared_bytes + r.dynamic_shared_bytes > kSharedLimit)
          report.limit_problems.push_back(k.kernel->record().id + ": " + r.name +
                                          " takes over 99 KiB of shared memory");
    }
    if (options.progress) options.progress("", report.kernels.size(), report.kernels.size());
  } catch (const TimeUp&) {
    report.completed = false;
  } catch (const DeviceLost&) {
    report.completed = false;
  }
  return report;
}

}  // namespace fnx::contract
