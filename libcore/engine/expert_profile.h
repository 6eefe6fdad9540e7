// How often each routed expert was chosen, over the runs of one checkpoint on one rank: what pools start from.
//
// A sealed file (libcore/format/sealed_file.h), magic "fnxprof\n", version 1, mode 0600. Its header is an
// ExpertIdentity, "decay_percent" and "runs"; its body the counts, u64 [all layers, experts]: times that a row chose
// the expert.
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <vector>

#include "libcore/engine/expert_identity.h"

namespace fnx {

inline constexpr int64_t kProfileDecayPercent = 10;  // that a run takes off the runs before it

struct ExpertProfile {
  ExpertIdentity identity;
  int64_t decay_percent = kProfileDecayPercent;
  int64_t runs = 0;              // that the counts come from
  std::vector<uint64_t> counts;  // [all layers, experts]
  std::string digest;            // of the file it was loaded from; empty for one that was not

  explicit ExpertProfile(const ExpertIdentity& identity);

  // Throws Input naming the file when it is absent, foreign, of another version, cut short or damaged.
  static ExpertProfile load(const std::filesystem::path& file);
  // Replaces the file whole or not at all; throws Output.
  void save(const std::filesystem::path& file) const;

  std::span<uint64_t> layer(int64_t l) { return std::span(counts).subspan(l * identity.experts, identity.experts); }
  std::span<const uint64_t> layer(int64_t l) const {
    return std::span(counts).subspan(l * identity.experts, identity.experts);
  }
  uint64_t total(int64_t l) const;

  // One row or more of `layer`: each id counts once. Throws Internal for an id that is no expert.
  void count(int64_t l, std::span<const int32_t> ids);
  // counts -= percent of them, rounded so that less is left.
  void decay(int64_t l, int64_t percent);
  // Adds counts and runs. Throws Input naming what differs when the two are of different identity or decay.
  void merge(const ExpertProfile& other);
};

// The profile of a folder during one run: loaded and checked at the start, added to once at the end.
class ProfileRun {
 public:
  // Makes the folder when it is absent. Throws Input naming the file when one is there that does not match `identity`
  // or the decay of this build, or cannot be read; such a file is never written to.
  ProfileRun(const std::filesystem::path& folder, const ExpertIdentity& identity);

  // "<first 16 digits of the checkpoint>-rank0of1.fnxprofile", one file a model and rank.
  const std::filesystem::path& file() const { return file_; }
  // The counts of earlier runs; what a warm start takes.
  const ExpertProfile& start() const { return start_; }
  const ExpertProfile& added() const { return added_; }

  void count(int64_t layer, std::span<const int32_t> ids) { added_.count(layer, ids); }
  // The earlier counts, decayed once in the layers that this run used, plus this run's own. When another run has
  // replaced the file since it was loaded, its counts stand in place of the earlier ones, and it has decayed them. Does
  // nothing for a run that counted nothing; throws Internal when called twice.
  void save();

 private:
  std::filesystem::path file_;
  ExpertProfile start_, added_;
  bool saved_ = false;
};

}  // namespace fnx
