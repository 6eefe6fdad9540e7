#include "libcore/cli/plan_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>

#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/cli/rows.h"
#include "libcore/engine/floor.h"
#include "libcore/engine/pool_plan.h"
#include "libcore/format/checkpoint.h"
#include "libcore/format/synthetic_source.h"

namespace fnx {

void PlanOptions::add(CLI::App& app) {
  auto* flag = app.add_flag("--plan", plan, "What lies where with the experts offloaded, and whether it fits");
  app.add_option("--vram", vram, "Memory of the device")->needs(flag)->type_name("SIZE");
  app.add_option("--ram", ram, "Memory of the host that may be pinned")->needs(flag)->type_name("SIZE");
  app.add_option("--reserve", reserve, "Device memory for activations, recorded rounds and the driver")
      ->needs(flag)
      ->type_name("SIZE");
  app.add_option("--context", context, "Tokens of a sequence")->needs(flag)->check(CLI::Range(1, 1 << 24));
  app.add_option("--parallel", parallel, "Sequences that run at once")
      ->needs(flag)
      ->check(CLI::Range(1, kMostSequences));
  app.add_option("--kv-device-tokens", kv_device_tokens,
                 "Tokens of all sequences whose keys and values stay on the device; 0: all")
      ->needs(flag)
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 40));
  app.add_option("--hit-ratio", hit_ratio, "Share of a token's experts that have a line")
      ->needs(flag)
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--link-gbps", link_gbps, "Gigabytes (10^9) a second from host to device")
      ->needs(flag)
      ->check(CLI::Range(1e-3, 1e6));
  app.add_option("--read-gbps", read_gbps, "Gigabytes (10^9) a second that the device reads; 0: leave its reads out")
      ->needs(flag)
      ->check(CLI::Range(0.0, 1e6));
}

void run_plan(const PlanOptions& o, const std::string& model, const std::string& format, ToolRun& run) {
  std::unique_ptr<TensorSource> source;
  ModelConfig config;
  if (is_synthetic(model)) {
    auto synthetic = std::make_unique<SyntheticSource>(SyntheticSpec::parse(model));
    config = ModelConfig::parse(synthetic->config_json());
    source = std::move(synthetic);
  } else {
    auto checkpoint = std::make_unique<Checkpoint>(model);
    config = ModelConfig::load(checkpoint->folder() / "config.json");
    source = std::move(checkpoint);
  }
  require_context(config, o.context, "--context");
  PlanInput in;
  const auto size = [](const char* option, const std::string& text) {
    const uint64_t bytes = parse_size(text);
    if (bytes >> 60 != 0) throw Error(ErrorKind::Usage, fmt::format("{} {}: give less than 1024 PiB", option, text));
    return bytes;
  };
  in.vram_bytes = size("--vram", o.vram), in.ram_bytes = size("--ram", o.ram);
  in.reserve_bytes = size("--reserve", o.reserve);
  in.state.slots = o.parallel, in.state.tokens = o.parallel * o.context, in.state.max_tokens = o.context;
  in.state.kv_dtype = DType::BF16, in.state.draft_head = config.mtp_layers > 0;
  in.state.device_tokens = o.kv_device_tokens;
  in.hit_ratio = o.hit_ratio, in.link_bytes_per_s = o.link_gbps * 1e9;
  const PoolPlan plan = plan_pools(*source, config, in);

  Receipt& receipt = run.receipt();
  receipt.add_subject("checkpoint", is_synthetic(model) ? model : bare_name(model), source->file_bytes());
  Json& result = receipt.result;
  result["fits"] = plan.problem.empty();
  result["expert_lines"] = plan.lines;
  result["experts"] = config.experts;
  result["line_bytes_over_layers"] = plan.line_bytes;
  result["device_bytes"] = plan.device_bytes;
  result["host_bytes"] = plan.host_bytes;
  result["mapped_bytes"] = plan.mapped_bytes;
  result["mapped_fits_beside"] = plan.host_bytes + plan.mapped_bytes <= in.ram_bytes;
  result["token_expert_bytes"] = plan.token_expert_bytes;
  result["token_miss_bytes"] = plan.token_miss_bytes;
  double floor = plan.token_link_ns;  // copies run beside the reads
  Json& evidence = receipt.evidence;  // times stay out of the result
  evidence["token_link_ms"] = plan.token_link_ns / 1e6;
  if (o.read_gbps > 0) {
    const double read =
        floor_ns(decode_cost(*source, config, 1, o.context), {o.read_gbps, std::numeric_limits<double>::infinity()});
    evidence["token_read_ms"] = read / 1e6;
    floor = std::max(floor, read);
  } else {
    receipt.add_not_run("reads of the device", "asked for by --read-gbps");
  }
  evidence["most_tokens_per_s"] = floor > 0 ? Json(1e9 / floor) : Json();
  for (const PlanTerm& t : plan.terms)
    result["rows"].push_back(Json{{"term", t.name}, {"place", place_name(t.place)}, {"bytes", t.bytes}});
  result["rows"].push_back(Json{{"term", fmt::format("{} expert lines a layer", plan.lines)},
                                {"place", "device"},
                                {"bytes", static_cast<uint64_t>(plan.lines) * plan.line_bytes}});
  if (!plan.problem.empty()) result["problem"] = plan.problem;
  Json shown = result;
  shown.update(evidence);
  run.print(result_text(shown, format));
  receipt.add_gate("fits", plan.problem.empty() ? 1 : 0, "==", 1, "plan");
}

}  // namespace fnx
