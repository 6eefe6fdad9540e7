#include "libcore/cli/model_options.h"

#include <fmt/format.h>

#include "kernels/devices.h"
#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/qualification.h"
#include "libcore/engine/memory_plan.h"
#include "libcore/format/fingerprint.h"
#include "libcore/format/synthetic_source.h"
#include "libcore/measure/clock.h"

namespace fnx {

void ModelOptions::add(CLI::App& app, bool drafts) {
  app.add_option("--model", model, "Checkpoint folder (EXL3 qwen4_exp), or synth:NAME,... (fnx-synth --help)")
      ->required()
      ->type_name("DIR");
  app.add_option("--backend", backend, "Where the model runs")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", threads, "Threads of the cpu backend; 0: one a core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--device", device, "Number of the GPU; the cpu backend has none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--vram-limit", vram_limit, "Most device memory to use, as 16GiB; without it, what is free")
      ->type_name("BYTES");
  app.add_flag("--memory-plan", memory_plan, "Print the device memory that the run needs, and stop");
  app.add_option("--tp", tp, "Ranks that share the experts")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--graph", graph, "Replay recorded launches")
      ->check(CLI::IsMember({"off", "on"}))
      ->capture_default_str();
  app.add_option("--inject-capture-failure", inject_capture_failure, "Let the first N recordings fail, for tests")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  if (drafts) {
    draft = "auto";
    app.add_option("--draft", draft, "Tokens to draft a round: auto (as measured, never slower), off or 1 to 8")
        ->check(CLI::IsMember({"auto", "off"}) | CLI::Range(0, kMostDrafts))
        ->type_name("auto|off|N")
        ->capture_default_str();
  }
  app.add_flag("--accept-raw-norms", accept_raw_norms, "Take norms that average above 0.6 as they are stored");
}

namespace {
// What the common flags may ask for and this build does not have.
void refuse_unsupported(const ModelOptions& o) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorKind::Unsupported, why); };
  if (o.tp != 1) refuse(fmt::format("--tp {}: this build runs one rank; use --tp 1", o.tp));
}

// Why the cuda backend cannot run the model here; empty when it can.
std::string cuda_problem(int device) {
  if (cuda_runtime_version() == "none") return "no cuda backend in this build";
  const std::vector<GpuInfo> gpus = list_gpus();
  if (gpus.empty()) return "no GPU that this build can drive";
  if (device >= static_cast<int>(gpus.size()))
    return fmt::format("no GPU {} among {}, see --list-devices", device, gpus.size());
  return qualification_problem(gpus[device].architecture);
}

std::unique_ptr<Backend> choose_backend(const ModelOptions& o, Receipt& receipt) {
  const std::string problem = o.backend == "cpu" ? "" : cuda_problem(o.device);
  if (o.backend == "cuda" && !problem.empty())
    throw Error(ErrorKind::Unsupported, fmt::format("--backend cuda: {}; or use --backend cpu", problem));
  const bool cuda = o.backend != "cpu" && problem.empty();
  receipt.set_effective("backend", cuda ? "cuda" : "cpu",
                        o.backend != "auto" ? "flag" : "default: " + (cuda ? "a qualified GPU" : problem));
  if (!cuda) {
    if (o.graph == "on")
      throw Error(ErrorKind::Unsupported, "--graph on: the cpu backend records no launches; use --graph off");
    return make_cpu_backend({o.threads, 0});
  }
  receipt.set_effective("device", o.device, o.device == 0 ? "default" : "flag");
  return make_cuda_backend({o.device, o.vram_limit.empty() ? 0 : parse_size(o.vram_limit)});
}

// The tensors, the config and the receipt's subject.
void open_source(const std::string& model, OpenedModel& m, Receipt& receipt) {
  if (is_synthetic(model)) {
    auto source = std::make_unique<SyntheticSource>(SyntheticSpec::parse(model));
    m.config = ModelConfig::parse(source->config_json());
    m.synthetic_stops = source->stop_ids();
    receipt.add_subject("checkpoint", source->spec().text(), source->bytes(), source->fingerprint());
    receipt.add_not_run("text", "the weights are made up: speed and bits mean something, words do not");
    m.source = std::move(source);
    return;
  }
  auto checkpoint = std::make_unique<Checkpoint>(model);
  m.folder = checkpoint->folder();
  m.config = ModelConfig::load(m.folder / "config.json");
  uint64_t bytes = 0;
  for (const SourceFile& f : checkpoint->files()) bytes += f.bytes;
  // Cheap, and enough to tell revisions apart; fnx-fingerprint reads every byte.
  receipt.add_subject("checkpoint", bare_name(model), bytes,
                      fingerprint(*checkpoint, FingerprintKind::Advisory).subject());
  m.source = std::move(checkpoint);
}
}  // namespace

OpenedModel OpenedModel::open(const ModelOptions& options, ToolRun& run) {
  OpenedModel m;
  refuse_unsupported(options);
  open_source(options.model, m, run.receipt());
  m.digest = run.receipt().subjects.back()["fingerprint"]["digest"];
  m.backend = choose_backend(options, run.receipt());
  return m;
}

DraftOptions OpenedModel::drafts(const ModelOptions& options, const std::string& why_not, ToolRun& run) const {
  const std::string problem = config.mtp_layers == 0 ? "this checkpoint has no draft head" : why_not;
  DraftOptions d;
  const bool number = options.draft != "auto" && options.draft != "off";
  if (number) d.most = std::stoi(options.draft), d.fixed = true;
  if (options.draft == "auto" && problem.empty()) d.most = kAutoDrafts;
  if (number && d.most > 0 && !problem.empty())
    throw Error(ErrorKind::Unsupported, fmt::format("--draft {}: {}; use --draft off", options.draft, problem));
  run.receipt().set_effective("draft", d.most == 0 ? Json("off") : Json(d.most),
                              options.draft != "auto" ? "flag"
                              : problem.empty()       ? "default: at most, as measured"
                                                      : "default: " + problem);
  return d;
}

bool OpenedModel::plan(const ModelOptions& options, const EngineOptions& engine, ToolRun& run) const {
  if (backend->name() != "cuda" && !options.memory_plan) return false;
  LoadOptions load;
  load.draft_head = engine.state.draft_head;
  uint64_t limit = options.vram_limit.empty() ? 0 : parse_size(options.vram_limit);
  const std::vector<GpuInfo> gpus = list_gpus();
  if (limit == 0 && options.device < static_cast<int>(gpus.size())) limit = gpus[options.device].memory_bytes;
  const MemoryPlan plan = plan_memory(*source, config, load, engine, limit);
  run.receipt().set_effective("memory_plan",
                              Json{{"weights_bytes", plan.weights},
                                   {"states_bytes", plan.states},
                                   {"scratch_bytes", plan.scratch},
                                   {"workspaces_bytes", plan.workspaces},
                                   {"limit_bytes", plan.limit}},
                              "computed");
  if (options.memory_plan) run.print(plan_text(plan));
  require_fit(plan);
  return options.memory_plan;
}

Weights OpenedModel::load(const ModelOptions& options, bool draft_head, ToolRun& run) {
  const double began = now_ns();
  LoadOptions load;
  load.draft_head = draft_head;
  load.accept_raw_norms = options.accept_raw_norms;
  Weights w = Weights::load(*source, config, *backend, load, [&](int64_t done, int64_t total) {
    run.progress("loading layers", done, total);
    if (run.stopping()) throw Error(ErrorKind::Internal, "interrupted while loading");
  });
  run.receipt().add_series("load_ns", "ns", "cold", {now_ns() - began});
  return w;
}

}  // namespace fnx
