// The options that name a model and where it runs, the same in every tool that runs one.
#pragma once

#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "libcore/cli/tool.h"
#include "libcore/engine/draft_policy.h"
#include "libcore/engine/engine.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

struct ModelOptions {
  std::string model;
  std::string backend = "auto";
  int threads = 0, device = 0, tp = 1;
  std::string vram_limit, graph = "off";
  std::string draft = "off";  // auto, off or a number
  int64_t inject_capture_failure = 0;
  bool accept_raw_norms = false, memory_plan = false;

  // `drafts`: also --draft, for a tool that drafts.
  void add(CLI::App& app, bool drafts = false);
};

// A model whose config was read; weights are not loaded yet.
struct OpenedModel {
  std::unique_ptr<TensorSource> source;
  std::filesystem::path folder;          // of the checkpoint; empty for a synthetic model, which has no files
  std::vector<int32_t> synthetic_stops;  // generation stops of a synthetic model
  ModelConfig config;
  std::string digest;  // of the fingerprint that the receipt names
  std::unique_ptr<Backend> backend;

  // Generation stops; throws Input when the folder's configs are broken.
  std::vector<int32_t> stop_ids() const { return folder.empty() ? synthetic_stops : load_stop_ids(folder); }
  // Throws Input or Unsupported; records the checkpoint and the backend in the receipt.
  static OpenedModel open(const ModelOptions& options, ToolRun& run);
  // What --draft asks of this model; `why_not` is a reason to decode plainly unless a number was given. Throws
  // Unsupported when there is no draft head, or such a reason.
  DraftOptions drafts(const ModelOptions& options, const std::string& why_not, ToolRun& run) const;
  // On a GPU: what the run will need, into the receipt and refused when it does not fit. True when the user asked for
  // no more than that; it was printed then.
  bool plan(const ModelOptions& options, const EngineOptions& engine, ToolRun& run) const;
  // Loads with a progress bar; the time goes into the receipt.
  Weights load(const ModelOptions& options, bool draft_head, ToolRun& run);
};

}  // namespace fnx
