// The options that name a model and where it runs, the same in every tool that runs one.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "libcore/cli/tool.h"
#include "libcore/engine/draft_policy.h"
#include "libcore/engine/engine.h"
#include "libcore/engine/memory_plan.h"
#include "libcore/format/tensor_source.h"
#include "libcore/text/tokenizer.h"

namespace fnx {

struct ModelOptions {
  std::string model;
  std::string backend = "auto";
  int threads = 0, device = 0, tp = 1;
  std::string vram_limit, graph = "off", expert_lines = "auto";
  std::string planner = "auto";
  std::string draft = "off";             // auto, off or a number
  std::string kv_device_tokens = "all";  // all, auto or a number
  int64_t inject_capture_failure = 0;
  bool accept_raw_norms = false, memory_plan = false, check_lines = false;
  bool ranks = false;         // set by tools that can run on several
  bool offers_graph = false;  // set by add_graphs()
  uint64_t models = 1;        // that the tool has loaded at once, each within the limit

  // `drafts`: also --draft, for a tool that drafts.
  void add(CLI::App& app, bool drafts = false);
  // Also --kv-device-tokens, for a tool that reports pages.
  void add_pages(CLI::App& app);
  // Also --graph, for a tool that decodes; not when it runs with and without graphs anyway (`both`).
  void add_graphs(CLI::App& app, bool both = false);
};

// A model whose config was read; weights are not loaded yet.
struct OpenedModel {
  std::unique_ptr<TensorSource> source;
  std::filesystem::path folder;          // of the checkpoint; empty for a synthetic model, which has no files
  std::vector<int32_t> synthetic_stops;  // generation stops of a synthetic model
  ModelConfig config;
  std::string digest;  // of the fingerprint that the receipt names
  std::unique_ptr<Backend> backend;
  int device = 0;                         // number of this rank's GPU, where the backend runs on one
  bool graphs = false;                    // of --graph, for EngineOptions
  int64_t inject_capture_failures = 0;    // the same of --inject-capture-failure
  Planner planner = Planner::Host;        // of --planner
  bool planner_asked = false;             // for, by name
  Ranks* ranks = nullptr;                 // of --tp, connected; the run's
  uint64_t exchange_bytes = 0;            // of device memory, measured when they connected
  int64_t expert_lines = 0;               // a layer, as plan() chose; 0: every expert on the device
  std::optional<MemoryPlan> memory_plan;  // of plan(), where it made one

  // For EngineOptions and LoadOptions.
  Communicator* communicator() const;
  Shard shard() const;
  // Generation stops; throws Input when the folder's configs are broken.
  std::vector<int32_t> stop_ids() const { return folder.empty() ? synthetic_stops : load_stop_ids(folder); }
  // None when the folder has none.
  std::optional<Tokenizer> tokenizer() const;
  // Throws Usage, Input or Unsupported; records the checkpoint and the backend in the receipt.
  static OpenedModel open(const ModelOptions& options, ToolRun& run);
  // What --draft asks of this model; `why_not` is a reason to decode plainly unless a number was given. Throws
  // Unsupported when there is no draft head, or such a reason.
  DraftOptions drafts(const ModelOptions& options, const std::string& why_not, ToolRun& run) const;
  // What weights of this shard will need and, where the lines are automatic, how many of them every rank has room for.
  // Collective.
  MemoryPlan plan_weights(const ModelOptions& options, EngineOptions engine, const Shard& shard) const;
  // Chooses the expert lines and, in `engine`, the tokens whose keys and values stay on the device. On a GPU: what the
  // run will need, into the receipt and refused when it does not fit. True when the user asked for no more than that;
  // it was printed then.
  bool plan(const ModelOptions& options, EngineOptions& engine, ToolRun& run);
  // What every engine of this model shares: its ranks, graphs and how keys and values are stored.
  EngineOptions engine_options(const StateOptions& state, int64_t max_rows) const;
  // What every load of this model shares: this rank's shard, the lines that plan() chose, and what the flags say.
  LoadOptions load_options(const ModelOptions& options) const;
  // Loads with a progress bar; the time, the shard and the planner that is used go into the receipt.
  Weights load(const ModelOptions& options, bool draft_head, ToolRun& run);
  // The same with other options, for weights beside the run's own.
  Weights load(const LoadOptions& options, ToolRun& run);
};

// The least that holds what each of several engines needs, for plan(); at least one.
EngineOptions largest_of(const std::vector<EngineOptions>& engines);

// What became of recorded rounds, as evidence.
Json graphs_json(const GraphCounters& counters);
// What the pools of offloaded experts did, into the receipt's evidence, or into a part of it; fails the run when their
// counts do not add up.
void report_pools(const Weights& weights, ToolRun& run, const std::string& part = "");
// The same of pages in host memory.
void report_pages(const StatePool& state, ToolRun& run);

}  // namespace fnx
