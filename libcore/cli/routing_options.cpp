#include "libcore/cli/routing_options.h"

#include "libcore/base/path_text.h"

namespace fnx {

void RoutingOptions::add(CLI::App& app) {
  app.add_option("--trace-experts", trace_file, "Write which experts every row chose, for fnx-expert-profile replay")
      ->type_name("FILE");
  app.add_option("--profile-dir", profile_dir, "Add how often each expert was chosen to this folder's profile")
      ->type_name("DIR");
}

RoutingRecord::RoutingRecord(const RoutingOptions& options, const TensorSource& source, const ModelConfig& config,
                             const std::string& checkpoint, const Shard& shard)
    : options_(options) {
  ExpertIdentity identity = ExpertIdentity::of(config, checkpoint);
  if (!options.trace_file.empty() && shard.rank == 0)
    trace_ = std::make_unique<TraceRecorder>(identity, expert_copy_bytes(source, config));
  identity.rank = shard.rank, identity.world = shard.world;
  if (!options.profile_dir.empty()) profile_ = std::make_unique<ProfileRun>(options.profile_dir, identity);
}

bool RoutingRecord::reads_choices() const { return !options_.trace_file.empty() || profile_ != nullptr; }

void RoutingRecord::warm(const Weights& weights) const {
  if (!profile_ || !weights.pools || profile_->start().runs == 0) return;
  weights.pools->warm([&](int64_t bank) { return profile_->start().layer(bank); });
}

void RoutingRecord::watch(Engine& engine) {
  if (trace_ || profile_)
    engine.on_routing([this](int64_t layer, std::span<const int32_t> ids) {
      choices_ += ids.size();
      if (trace_) trace_->add(layer, ids);
      if (profile_) profile_->count(layer, ids);
    });
}

void RoutingRecord::finish(ToolRun& run) {
  if (!trace_ && !profile_) return;
  run.receipt().evidence["expert_choices"] = std::to_string(choices_);
  if (trace_) {
    trace_->save(options_.trace_file);
    run.receipt().evidence["traced_forwards"] = trace_->forwards();
  }
  if (!profile_) return;
  const int64_t earlier = profile_->start().runs;
  profile_->save();
  run.receipt().set_effective("profile", bare_name(profile_->file()), "computed");
  run.receipt().evidence["profile_earlier_runs"] = earlier;
}

}  // namespace fnx
