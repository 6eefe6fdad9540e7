// The device lines of offloaded experts: what ExpertPlanner plans is copied, served and counted here.
//
// A forward of few rows uses a pool a bank. A forward whose rows choose most experts of every bank anyway streams them:
// all lines together are frames that batches of experts pass through, each copied once a forward and applied to all of
// its rows, and those of the banks to come are copied while this one computes.
//
// Decode rounds may be planned on the device: then the pools' state lives there from the first such round until a
// forward or a question needs it here again, and nothing in a round waits for the host, so that rounds can be recorded.
#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "kernels/expert_planner.h"
#include "kernels/ops.h"
#include "libcore/engine/stream_timeline.h"

namespace fnx {

// Of decode rounds; other forwards are planned on the host. Ahead: on the device, and while a layer computes, experts
// that the next one will probably choose are copied to a stage.
enum class Planner : uint8_t { Host, Device, Ahead };
inline constexpr std::array kPlanners = {Planner::Host, Planner::Device, Planner::Ahead};
constexpr std::string_view planner_name(Planner p) {
  return p == Planner::Host ? "host" : p == Planner::Device ? "device" : "ahead";
}

struct ExpertPoolsOptions {
  int64_t lines = 0;  // a layer; 0: every expert stays on the device
  PoolPolicy policy = PoolPolicy::LfuDecay;
  bool check_lines = false;  // for debugging: every line is asked whose it is before it is used, which is slow
  Planner planner = Planner::Host;
};

// Copies of experts by cause, as ExpertPools issued them.
struct PoolCopies {
  std::array<uint64_t, kFillKinds> copies{}, bytes{};
  uint64_t total_bytes = 0;  // as the backend counted them
  // Of plans on the device: experts read from host memory once or more in a forward, whose requests exceed a pool.
  uint64_t in_place = 0, in_place_bytes = 0;
  uint64_t taken_bytes = 0;  // of what was copied ahead to the stage, what a plan then wanted
};

// Of decode rounds with their drafts, or of all other forwards.
struct PhaseCounters {
  uint64_t forwards = 0, misses = 0;
  uint64_t bytes = 0;  // that these need: copies, and experts that were read in place, once
  // Of rounds that are planned ahead: of these, what was copied before its plan asked for it; beside these, what was
  // copied and no plan asked for.
  uint64_t foreseen_bytes = 0, vain_bytes = 0;
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
  // order; `round`: a decode round, or (no banks in order) the drafts behind one.
  void begin(Stream& stream, int64_t choices, int64_t banks, bool round);
  // Where this forward is planned: with run_planned() or with run().
  bool on_device() const { return on_ != nullptr; }
  // Whether what run_planned() enqueues may be recorded.
  bool records() const { return on_device() && !options_.check_lines; }
  bool looks_ahead() const { return on_device() && options_.planner == Planner::Ahead; }
  // The same as run(), all of it enqueued. ids I32 [R, k or more] of the device: the first k of a row are its choice.
  // `next`: what is foreseen of the bank after this one, as soon as `known`, which compute() waits for; or nothing.
  void run_planned(Stream& stream, int64_t bank, int64_t k, const View& ids, const Foreseen& next, Event* known,
                   const std::function<void()>& compute);
  // Ends what this stream has to do with the state, before the stream goes.
  void release(Stream& stream);
  // Of the rounds to come; not Host needs pools that were not made with it, Ahead engines that were made when it was
  // asked for.
  void set_planner(Planner planner);
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
  std::span<const uint64_t> heat(int64_t bank) { return come_home(), pools_[bank].heat; }

  const ExpertPoolsOptions& options() const { return options_; }
  int64_t banks() const { return static_cast<int64_t>(pools_.size()); }
  int64_t line_bytes() const { return line_bytes_; }
  uint64_t device_bytes() const { return lines_.bytes() + states_.bytes(); }
  uint64_t host_bytes() const;  // of the banks
  // These wait for the device when the state is there.
  const ExpertPlanner& planner(int64_t bank) { return come_home(), pools_[bank].planner; }
  // Sums over the banks, checked: throws Internal unless causes sum to what was copied and the planner's counts agree.
  PoolCounters counters();
  PoolCopies copies();
  const PhaseCounters& rounds() { return come_home(), rounds_; }
  const PhaseCounters& prompts() { return come_home(), prompts_; }
  const StreamCounters& streamed() const { return streamed_; }
  TimelineSummary timeline() const { return timeline_.summary(); }
  // As the last fill of whole pools from a profile reached it, 0 when there was none; waits for it.
  double link_bytes_per_s() const;

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
  View line(int64_t i) const { return lines(i, 1); }
  View lines(int64_t first, int64_t count) const;

  void go_to_device(Stream& stream);
  void come_home();  // nothing where the state is here
  View state(const Buffer& of, int64_t bank) const;
  Stream& ahead_of(int64_t bank) { return bank % 2 == 1 ? *ahead_stream_ : *other_ahead_stream_; }

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
  std::unique_ptr<Stream> ahead_stream_, other_ahead_stream_;  // the other: of every second bank planned ahead
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

  Stream* on_ = nullptr;  // whose work the state on the device is part of; null: the state is here
  int64_t state_bytes_ = 0;
  Buffer states_, staged_;      // PoolState of each bank, on the device and on its way
  uint64_t device_copied_ = 0;  // bytes, as the device counted them
  uint64_t not_copied_ = 0;     // misses that their own plan drove out again
  Foreseen foreseen_;           // of the bank that is planned next
  std::unique_ptr<Event> stage_filled_, computed_, settled_;
  bool settling_ = false;  // the bank planned last, beside `stream`
  PhaseCounters rounds_, prompts_;
  std::unique_ptr<Event> refill_began_, refilled_;
  uint64_t refill_bytes_ = 0;
  PhaseCounters* phase_ = &prompts_;  // of the forward that runs
};

}  // namespace fnx
