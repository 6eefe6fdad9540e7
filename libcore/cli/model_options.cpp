#include "libcore/cli/model_options.h"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>

#include "kernels/error.h"
#include "libcore/format/fingerprint.h"

namespace fnx {

void ModelOptions::add(CLI::App& app) {
  app.add_option("--model", model, "Checkpoint folder (EXL3 qwen4_exp)")->required()->type_name("DIR");
  app.add_option("--backend", backend, "Where the model runs")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", threads, "Threads of the cpu backend; 0: one a core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--device", device, "Number of the GPU; the cpu backend has none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--tp", tp, "Ranks that share the experts")->check(CLI::PositiveNumber)->capture_default_str();
  app.add_option("--graph", graph, "Replay recorded launches")
      ->check(CLI::IsMember({"off", "on"}))
      ->capture_default_str();
  app.add_option("--draft", draft, "Tokens to draft a round: auto, off or a number")->capture_default_str();
  app.add_flag("--accept-raw-norms", accept_raw_norms, "Take norms that average above 0.6 as they are stored");
}

namespace {
// What the common flags may ask for and this build does not have.
void refuse_unsupported(const ModelOptions& o) {
  const auto refuse = [](const std::string& why) { throw Error(ErrorKind::Unsupported, why); };
  if (o.backend == "cuda") refuse("--backend cuda: this build has no cuda backend; use --backend cpu");
  if (o.tp != 1) refuse(fmt::format("--tp {}: this build runs one rank; use --tp 1", o.tp));
  if (o.graph == "on") refuse("--graph on: the cpu backend records no launches; use --graph off");
  if (o.draft == "auto" || o.draft == "off" || o.draft == "0") return;
  if (o.draft.find_first_not_of("0123456789") == std::string::npos && !o.draft.empty())
    refuse(fmt::format("--draft {}: this build does not draft; use --draft off", o.draft));
  throw Error(ErrorKind::Usage, fmt::format("--draft {}: give auto, off or a number", o.draft));
}
}  // namespace

OpenedModel OpenedModel::open(const ModelOptions& options, ToolRun& run) {
  OpenedModel m;
  refuse_unsupported(options);
  m.checkpoint = std::make_unique<Checkpoint>(options.model);
  m.config = ModelConfig::load(m.checkpoint->folder() / "config.json");
  uint64_t bytes = 0;
  for (const SourceFile& f : m.checkpoint->files()) bytes += f.bytes;
  const std::filesystem::path folder = std::filesystem::path(options.model).lexically_normal();
  // Cheap, and enough to tell revisions apart; fnx-fingerprint reads every byte.
  run.receipt().add_subject("checkpoint", (folder.has_filename() ? folder : folder.parent_path()).filename().string(),
                            bytes, fingerprint(*m.checkpoint, FingerprintKind::Advisory).subject());
  m.digest = run.receipt().subjects.back()["fingerprint"]["digest"];
  m.backend = make_cpu_backend({options.threads, 0});
  run.receipt().set_effective("backend", std::string(m.backend->name()),
                              options.backend == "auto" ? "default: no cuda backend in this build" : "flag");
  run.receipt().set_effective("draft", "off", options.draft == "auto" ? "default: this build does not draft" : "flag");
  return m;
}

Weights OpenedModel::load(const ModelOptions& options, bool draft_head, ToolRun& run) {
  const auto began = std::chrono::steady_clock::now();
  LoadOptions load;
  load.draft_head = draft_head;
  load.accept_raw_norms = options.accept_raw_norms;
  Weights w = Weights::load(*checkpoint, config, *backend, load, [&](int64_t done, int64_t total) {
    run.progress("loading layers", done, total);
    if (run.stopping()) throw Error(ErrorKind::Internal, "interrupted while loading");
  });
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - began;
  run.receipt().add_series("load_ns", "ns", "cold", {took.count()});
  return w;
}

}  // namespace fnx
