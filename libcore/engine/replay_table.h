// Recorded traces through every policy, pool size and start, beside the best possible.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "libcore/engine/expert_replay.h"

namespace fnx {

class ReplayTable {
 public:
  std::vector<int64_t> lines;          // empty: 1, 2, k, k + 1, an eighth, a quarter, half, all
  std::vector<int64_t> decay_touches;  // of lfu-decay; empty: the default
  std::function<bool()> stopping;

  // Traces to report on, and traces that the warm start's profile is made of, which are reported apart. `name` is what
  // errors call it. Throws Input for a trace of another model than the first, or one that was added before.
  void add_test(const RoutingTrace& trace, const std::string& name);
  void add_train(const RoutingTrace& trace, const std::string& name);
  // A warm start from an earlier profile; throws Input when it is of another model.
  void set_profile(const ExpertProfile& profile, const std::string& name);

  const ExpertIdentity& identity() const { return *identity_; }
  // One object a case: split, lines, start, policy, decay_touches; hit ratios of all requests and of one-row forwards,
  // each beside the best possible; bytes missed, in all and by a one-row forward; bytes of the warm start.
  Json run();
  const PoolCounters& counters() const { return counters_; }  // summed over all cases

 private:
  struct Split {
    std::string name;
    std::vector<LayerStream> streams;
    int64_t decode_rows = 0;
  };
  void add(Split& split, const RoutingTrace& trace, const std::string& name);
  void run_start(const Split& split, int32_t size, const ExpertProfile* profile, Json& rows);

  std::optional<ExpertIdentity> identity_;
  std::optional<ExpertProfile> profile_;
  std::vector<std::string> digests_;
  Split test_{"test", {}}, train_{"train", {}};
  PoolCounters counters_;
};

}  // namespace fnx
