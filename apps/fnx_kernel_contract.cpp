// Runs the kernel contract and reports what passed.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cmath>

#include "kernels/contract/contract.h"
#include "kernels/contract/device.h"
#include "kernels/error.h"
#include "libcore/cli/build_info.h"
#include "libcore/cli/qualification.h"
#include "libcore/cli/tool.h"

using namespace fnx;
using contract::Outcome;

namespace {

struct Options {
  std::vector<std::string> filters;
  std::string gates = "1,2,3,4";
  double time_cap = 0;
  bool list = false, qualify = false, small = false;
};

contract::Options contract_options(const Options& options) {
  contract::Options out;
  out.filters = options.filters;
  out.gates = {};
  for (const int64_t gate : parse_list(options.gates)) {
    if (gate < 1 || gate > 4)
      throw Error(ErrorKind::Usage, fmt::format("--gates holds {}; there are gates 1 to 4", gate));
    out.gates[static_cast<size_t>(gate - 1)] = true;
  }
  out.seconds = options.time_cap;
  out.small = options.small;
  out.device = contract::device_present();
  return out;
}

std::string list_text(const contract::Options& options) {
  std::string out;
  for (const auto& kernel : contract::registry()) {
    const contract::Record& r = kernel->record();
    if (!contract::selected(options, r.id)) continue;
    out += fmt::format("{:<18} {}\n", r.id, r.domain);
    for (const contract::SymbolRecord& s : r.symbols)
      out += fmt::format("  symbol   {}: {} threads, {} registers, {} + {} bytes of shared memory, {} local\n", s.name,
                         s.threads, s.registers, s.static_shared_bytes, s.dynamic_shared_bytes, s.local_bytes);
    for (const contract::OperandRecord& o : r.operands)
      out +=
          fmt::format("  operand  {} {} {}, {} bytes aligned, {}\n", o.name, o.dtypes, o.shape, o.alignment, o.access);
    out += fmt::format("  launch   {}\n  sums     {}\n  rounding {}\n  rows     {}\n  aliases  {}\n  limits   {}\n",
                       r.launch, r.sum_order, r.rounding, r.rows, r.aliases, r.limits);
  }
  for (const std::string& name : contract::launch_functions()) {
    bool recorded = false;
    for (const auto& kernel : contract::registry()) recorded = recorded || kernel->record().id == name;
    if (!recorded && contract::selected(options, name)) out += fmt::format("{:<18} no record\n", name);
  }
  return out;
}

Json number_or_null(double x) { return std::isfinite(x) ? Json(x) : Json(); }

Json comparison(const contract::Comparison& c) {
  return {{"values_checked", c.values},
          {"values_unbounded", c.unbounded},
          {"worst_bound_ratio", number_or_null(c.worst_fraction)},
          {"worst_at", c.worst_at},
          {"relative_norm_ratio", number_or_null(c.relative_norm())}};
}

Json kernel_result(const contract::KernelReport& k) {
  Json out{{"id", k.kernel->record().id}};
  out["gates"] = Json::array();
  for (size_t g = 0; g < k.gates.size(); ++g)
    out["gates"].push_back(Json{{"gate", g + 1},
                                {"outcome", contract::outcome_name(k.gates[g].outcome)},
                                {"checks", k.gates[g].checks},
                                {"detail", k.gates[g].detail}});
  out["against_cpu"] =
      Json{{"outcome", contract::outcome_name(k.against_cpu.outcome)}, {"detail", k.against_cpu.detail}};
  out.update(comparison(k.values));
  out["shapes"] = Json::array();
  for (const auto& [label, values] : k.by_shape) {
    Json shape{{"shape", label}};
    shape.update(comparison(values));
    out["shapes"].push_back(std::move(shape));
  }
  out["resources"] = Json::array();
  for (const contract::SymbolResources& r : k.resources)
    out["resources"].push_back(Json{{"symbol", r.name},
                                    {"threads", r.threads},
                                    {"registers", r.registers},
                                    {"static_shared_bytes", r.static_shared_bytes},
                                    {"dynamic_shared_bytes", r.dynamic_shared_bytes},
                                    {"local_bytes", r.local_bytes}});
  out["controls"] = Json::array();
  for (const contract::ControlResult& c : k.controls)
    out["controls"].push_back(
        Json{{"name", c.name}, {"gate", c.gate}, {"on", c.where}, {"red", c.red}, {"detail", c.detail}});
  return out;
}

std::string kernel_line(const contract::KernelReport& k) {
  size_t red = 0;
  for (const contract::ControlResult& c : k.controls) red += c.red ? 1 : 0;
  std::string out = fmt::format("{:<18}", k.kernel->record().id);
  for (const contract::GateResult& g : k.gates) out += fmt::format(" {:<13}", contract::outcome_name(g.outcome));
  out += fmt::format(" {:>9} {:>7.4f} {:>9.1e} {:>3}/{:<3} {:>6.1f}\n", k.values.values, k.values.worst_fraction,
                     k.values.relative_norm(), red, k.controls.size(), k.seconds);
  for (size_t g = 0; g < k.gates.size(); ++g)
    if (k.gates[g].outcome == Outcome::Fail) out += fmt::format("  gate {}: {}\n", g + 1, k.gates[g].detail);
  if (k.against_cpu.outcome == Outcome::Fail) out += "  kernels/cpu: " + k.against_cpu.detail + "\n";
  for (const contract::ControlResult& c : k.controls)
    if (!c.red) out += fmt::format("  control \"{}\" stayed green under gate {} ({})\n", c.name, c.gate, c.where);
  return out;
}

void record(const contract::Options& options, const contract::Report& report, Receipt& receipt) {
  const auto kernels = static_cast<double>(report.kernels.size());
  receipt.result["kernels"] = Json::array();
  std::vector<double> seconds;
  uint64_t values = 0;
  for (const contract::KernelReport& k : report.kernels) {
    receipt.result["kernels"].push_back(kernel_result(k));
    seconds.push_back(k.seconds);
    values += k.values.values;
  }
  receipt.result["limit_problems"] = report.limit_problems;
  receipt.evidence = {
      {"kernels", report.kernels.size()}, {"controls", report.controls_run()}, {"values_checked", values}};
  receipt.set_effective("implementation", options.device ? "device" : "host", options.device ? "device" : "no device");
  receipt.set_effective("kernel_library_digest", kernel_library_digest(), "build");
  receipt.add_series("kernel", "s", "cold", seconds);
  receipt.add_gate("completed", report.completed ? 1 : 0, "==", 1, "runs");
  receipt.add_gate("kernels_passed", static_cast<double>(report.kernels_passed(options)), "==", kernels, "kernels");
  receipt.add_gate("controls_red", static_cast<double>(report.controls_red()),
                   "==", static_cast<double>(report.controls_run()), "controls");
  receipt.add_gate("limit_problems", static_cast<double>(report.limit_problems.size()), "==", 0, "problems");
  for (size_t g = 0; g < options.gates.size(); ++g)
    if (!options.gates[g]) receipt.add_not_run(fmt::format("gate {}", g + 1), "not asked for");
  if (!options.device)
    receipt.add_not_run("gates 1 to 4 on a device",
                        "no GPU that this build can drive; the host implementations were run");
}

std::string gate_names(const contract::Options& options) {
  std::vector<int> asked;
  for (size_t g = 0; g < options.gates.size(); ++g)
    if (options.gates[g]) asked.push_back(static_cast<int>(g + 1));
  return asked.size() == 4 ? "1-4" : fmt::format("{}", fmt::join(asked, ","));
}

void run(const Options& options, ToolRun& tool) {
  contract::Options how = contract_options(options);
  how.stopping = [&] { return tool.stopping(); };
  how.progress = [&](const std::string& kernel, size_t done, size_t total) { tool.progress(kernel, done, total); };
  const std::string listed = list_text(how);
  if (listed.empty())
    throw Error(ErrorKind::Usage,
                fmt::format("no kernel's id holds {}; see --list", fmt::join(options.filters, " or ")));
  if (options.list) return tool.print(listed);
  const bool whole = options.filters.empty() && gate_names(how) == "1-4" && !options.small;
  if (options.qualify && !whole) throw Error(ErrorKind::Usage, "--qualify needs every kernel, gate and shape");

  const contract::Report report = contract::run_contract(how);
  tool.print(fmt::format("{:<18} {:<13} {:<13} {:<13} {:<13} {:>9} {:>7} {:>9} {:>7} {:>6}\n", "kernel", "resources",
                         "values", "bits", "refusals", "checked", "worst", "norm", "red", "s"));
  for (const contract::KernelReport& k : report.kernels) tool.print(kernel_line(k));
  for (const std::string& problem : report.limit_problems) tool.print("limit problem: " + problem + "\n");
  record(how, report, tool.receipt());

  const std::string summary =
      fmt::format("{}/{} kernels pass gates {}, {}/{} controls red, {} limit problems",
                  how.device ? report.kernels_passed(how) : 0, report.kernels.size(), gate_names(how),
                  report.controls_red(), report.controls_run(), report.limit_problems.size());
  if (!report.completed) tool.print("not completed: the time cap or a signal ended the run\n");
  if (!how.device) {
    const bool sound = report.sound(how);
    tool.print(fmt::format("host side {}; gates 1 to 4 were not run on a device\n", sound ? "sound" : "not sound"));
    tool.print(summary + "\n");
    if (sound) throw Error(ErrorKind::Unsupported, "no GPU that this build can drive: the device gates were not run");
    return;
  }
  if (options.qualify && report.sound(how))
    tool.receipt().set_effective("qualification", write_qualification(contract::device_architecture(), summary),
                                 "--qualify");
  tool.print(summary + "\n");
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{
      "fnx-kernel-contract",
      "Checks every CUDA kernel on this device: resources, values, bits, refusals.",
      {"fnx-kernel-contract", "fnx-kernel-contract exl3 --gates 2,3 --time-cap 60", "fnx-kernel-contract --qualify"}};
  return run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("filter", options.filters, "Parts of kernel ids; all kernels without one")->type_name("FILTER");
        app.add_flag("--list", options.list, "Print the records and stop");
        app.add_option("--gates", options.gates, "1 resources, 2 values, 3 bits, 4 refusals")->type_name("LIST");
        app.add_option("--time-cap", options.time_cap, "Seconds after which the run counts as not completed; 0: none")
            ->check(CLI::NonNegativeNumber);
        app.add_flag("--small", options.small, "Small shapes only, as under a memory or race checker");
        app.add_flag("--qualify", options.qualify,
                     "When all passes, record that this architecture may run these kernels");
      },
      [&](ToolRun& tool) { run(options, tool); });
}
