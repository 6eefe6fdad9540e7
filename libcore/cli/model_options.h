// The options that name a model and where it runs, the same in every tool that runs one.
#pragma once

#include <memory>
#include <string>

#include "kernels/ops.h"
#include "libcore/cli/tool.h"
#include "libcore/engine/weights.h"
#include "libcore/format/checkpoint.h"

namespace fnx {

struct ModelOptions {
  std::string model;
  std::string backend = "auto";
  int threads = 0, device = 0, tp = 1;
  std::string graph = "off", draft = "auto";
  bool accept_raw_norms = false;

  void add(CLI::App& app);
};

// A checkpoint whose config was read; weights are not loaded yet.
struct OpenedModel {
  std::unique_ptr<Checkpoint> checkpoint;
  ModelConfig config;
  std::string digest;  // of the fingerprint that the receipt names
  std::unique_ptr<Backend> backend;

  // Throws Input or Unsupported; records the checkpoint and the backend in the receipt.
  static OpenedModel open(const ModelOptions& options, ToolRun& run);
  // Loads with a progress bar; the time goes into the receipt.
  Weights load(const ModelOptions& options, bool draft_head, ToolRun& run);
};

}  // namespace fnx
