// The device lines of offloaded experts: what ExpertPlanner plans is copied, served and counted here.
//
// A forward of few rows uses a pool a bank. A forward whose rows choose most experts of every bank anyway streams them:
// all lines together are frames that batches of experts pass through, each copied once a forward and applied to all of
// its rows, and those of the banks to come are copied while this one computes.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/ops.h"
#include "libcore/engine/expert_planner.h"
#include "libcore/engine/stream_timeline.h"

namespace fnx {

struct ExpertPoolsOptions {
  int64_t lines = 0;  // a layer; 0: every expert stays on the device
  PoolPolicy policy = PoolPolicy::LfuDecay;
  bool check_lines = false;  // for debugging: every line is asked whose it is before it is used, which is slow
};

// Copies of experts by cause, as ExpertPools issued them.
struct PoolCopies {
  std::array<uint64_t, kFillKinds> copies{}, bytes{};
  uint64_t total_bytes = 0;  // as the backend counted them
};

// Of forwards that streamed.
struct StreamCounters {
  uint64_t forwards = 0, batches = 0, needed = 0;  // needed: experts that rows chose, over banks and forwards
  uint64_t ahead = 0, demand = 0;                  // copies before and after the bank's routing was known
};

// One pool a bank. Engines over the same weights share them, one running at a time.
class ExpertPools {
 public:
  // Makes the lines, each as long as the longest expert. Throws Usage for a number of lines that a bank cannot have,
  // Unsupported when they do not fit. Banks outlive it.
  ExpertPools(Backend& backend, std::vector<ExpertBank*> banks, const ExpertPoolsOptions& options);

  // Starts a forward whose rows make about `choices` of each bank's pooled experts, through banks 0 .. banks - 1 in
  // order.
  void begin(int64_t choices, int64_t banks);
  // Brings the pooled experts of `ids`, the router's choice of all rows, to lines and calls `compute` once or more,
  // each time with other experts of the bank served: every one of them once. Experts that are not pooled are served
  // with the first. `compute` enqueues on `stream`.
  void run(Stream& stream, int64_t bank, std::span<const int32_t> ids, const std::function<void()>& compute);
  // Fills empty pools with the experts of the largest counts: `counts` of a bank, [experts], as many as routers choose
  // of. Once, before the first forward.
  void warm(const std::function<std::span<const uint64_t>(int64_t bank)>& counts);

  // Empties the pools and forgets every key, as if no forward had been; counters go on. warm() may follow.
  void reset();
  // Of each expert of a bank, [experts]: the counts that warm() was given and the choices of rows since.
  std::span<const uint64_t> heat(int64_t bank) const { return pools_[bank].heat; }

  const ExpertPoolsOptions& options() const { return options_; }
  int64_t banks() const { return static_cast<int64_t>(pools_.size()); }
  uint64_t device_bytes() const { return lines_.bytes(); }
  uint64_t host_bytes() const;  // of the banks
  const PoolCounters& counters(int64_t bank) const { return pools_[bank].planner.counters(); }
  // Sums over the banks, checked: throws Internal unless causes sum to what was copied and the planner's counts agree.
  PoolCounters counters() const;
  PoolCopies copies() const;
  const StreamCounters& streamed() const { return streamed_; }
  TimelineSummary timeline() const { return timeline_.summary(); }

 private:
  struct Pool {
    ExpertBank* bank = nullptr;
    ExpertPlanner planner;
    int64_t first_line = 0;
    std::vector<int64_t> shown;           // of each expert that is held: the line it is served from, or -1
    std::vector<int32_t> shows;           // of each line of the pool: the expert that is served from it, or -1
    std::vector<ServedExpert> changes;    // of the bank's table, for the next computation
    std::vector<uint64_t> heat;           // of each expert of the bank: choices of the profile and of this run
    std::unique_ptr<Event> read, filled;  // the last computation from these lines; the last fills

    // Here and in the planner experts are numbered as they are held: the pooled ones, then the others.
    int32_t held() const { return static_cast<int32_t>(bank->pooled + std::ssize(bank->others)); }
    int32_t id(int32_t e) const {
      return e < bank->pooled ? static_cast<int32_t>(bank->first) + e : bank->others[e - bank->pooled];
    }
    // The pooled ones of `ids`, in order.
    std::vector<int32_t> requested(std::span<const int32_t> ids) const;
  };
  // Serves an expert from line `to` of all, or no longer: -1.
  void change(Pool& pool, int32_t expert, int64_t to);
  // Serves an expert from line `at` of the pool from the next computation on, or no longer: -1.
  void show(Pool& pool, int32_t expert, int32_t at);
  void copy(Pool& pool, std::span<const Placement> fills, FillKind kind);
  void pass(Stream& stream, Pool& pool, std::span<const int32_t> request, std::span<const Placement> serves, bool first,
            const std::function<void()>& compute);
  void refill();
  View line(int64_t i) const;

  // A run of lines that one batch of experts takes at a time.
  struct Frame {
    int64_t first_line = 0;
    std::unique_ptr<Event> read, filled;
  };
  struct Batch {
    int64_t bank = 0;
    size_t frame = 0;
    std::vector<int32_t> experts;
  };
  void enter_streaming();
  void leave_streaming(bool warm);
  Batch issue(Stream& copies, FillKind kind, int64_t bank, std::span<const int32_t> experts);
  void copy_ahead();
  void stream_bank(Stream& stream, int64_t bank, std::span<const int32_t> request,
                   const std::function<void()>& compute);
  void stream_batch(Stream& stream, Pool& pool, const Batch& batch, std::span<const int32_t> request, bool& first,
                    const std::function<void()>& compute);
  int64_t pool_lines() const { return static_cast<int64_t>(pools_.size()) * options_.lines; }

  Backend& backend_;
  ExpertPoolsOptions options_;
  std::unique_ptr<Stream> copies_stream_;
  Buffer lines_;
  int64_t line_bytes_ = 0;
  std::vector<Pool> pools_;
  PoolCopies copies_, stream_copies_;

  bool streaming_ = false;
  std::unique_ptr<Stream> ahead_stream_;
  int64_t frame_lines_ = 0;
  std::vector<Frame> frames_;
  std::deque<size_t> free_frames_;
  std::deque<Batch> ahead_;                   // copied or being copied, in order of banks
  int64_t ahead_bank_ = 0, ahead_banks_ = 0;  // the bank that comes next, and their number
  std::vector<int32_t> candidates_;           // of that bank, not issued yet
  bool candidates_known_ = false;
  std::vector<int32_t> place_;  // scratch: of each expert its line, or -1
  StreamCounters streamed_;
  StreamTimeline timeline_;
};

}  // namespace fnx
