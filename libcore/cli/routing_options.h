// What a run of the model leaves behind of its routing: a trace, and counts in a profile.
#pragma once

#include <memory>
#include <string>

#include "libcore/cli/tool.h"
#include "libcore/engine/engine.h"
#include "libcore/engine/expert_profile.h"
#include "libcore/engine/expert_trace.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

struct RoutingOptions {
  std::string trace_file, profile_dir;

  void add(CLI::App& app);
};

class RoutingRecord {
 public:
  // Loads the profile, so that one that does not match ends the run before it starts. `checkpoint` is the digest of its
  // fingerprint; the tool has seen that the trace's file can be written. Every rank has a profile of its own; they see
  // the same routing, and rank 0 traces it.
  RoutingRecord(const RoutingOptions& options, const TensorSource& source, const ModelConfig& config,
                const std::string& checkpoint, const Shard& shard = {});

  // Whether some rank's engine is asked for its routing: then rounds are launched one by one, on all of them alike.
  bool reads_choices() const;
  // Fills the pools of offloaded experts with those that earlier runs chose most.
  void warm(const Weights& weights) const;
  // Asks the engine for its routing when one of the options is given. The record outlives the engine's forwards.
  void watch(Engine& engine);
  // Writes what was asked for, and the evidence.
  void finish(ToolRun& run);

 private:
  RoutingOptions options_;
  std::unique_ptr<TraceRecorder> trace_;
  std::unique_ptr<ProfileRun> profile_;
  uint64_t choices_ = 0;
};

}  // namespace fnx
