// How many tokens to draft: from measured acceptance of every stream and measured times of rounds, plain ones included.
// A pure function of what it was told, so that a recorded run can be replayed.
//
// Drafts are made on credit. What rounds of drafts take longer than the plain rounds they stand for is paid from it, by
// the stream that they brought least; what they save is added, and so is a small share of the time of plain rounds. No
// draft is made without credit, so a run loses no more than that share, what it starts with and what one try overdraws.
// Recordings are paid by tries that fail alone: those that go on use them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <span>
#include <vector>

namespace fnx {

inline constexpr int32_t kMostDrafts = 8;
inline constexpr int32_t kAutoDrafts = 4;  // most that a policy without a wish looks at

struct DraftOptions {
  int32_t most = 0;     // tokens a round; 0: plain decoding
  bool fixed = false;   // always `most`, measured or not
  double guard = 1.05;  // rate over plain that drafts must reach
};

// Of a stream in the round to come: its number, and the tokens that it may draw behind that round's first.
struct DraftStream {
  size_t id = 0;
  int64_t left = std::numeric_limits<int64_t>::max();
};

// One decode round: of each stream the tokens that were drafted and those of them that were kept; its time with that of
// drafting for it.
struct DraftRound {
  struct Stream : DraftStream {
    int32_t drafted = 0, kept = 0;
  };
  int32_t depth = 0;  // as decided
  std::vector<Stream> streams;
  double ns = 0;
  bool recorded = false;  // something in it, for rounds to come: its time is not theirs
};

class DraftPolicy {
 public:
  explicit DraftPolicy(const DraftOptions& options) : options_(options) {}

  // Depth of the next round of these streams: one that slows none of them.
  int32_t decide(std::span<const DraftStream> streams) const;
  void observe(const DraftRound& round);
  // After a decision for none: how many more of as many streams will be the same, whatever is observed.
  int64_t plain_ahead(size_t streams) const;
  // The number may be that of another stream from now on; what is known of all streams stays.
  void forget(size_t stream) { streams_.erase(stream); }

 private:
  // Of one depth at one number of streams: the last times.
  class Times {
   public:
    void add(double ns);
    bool known() const { return count_ > 0; }
    double typical() const;

   private:
    std::array<double, 8> ns_{};
    size_t count_ = 0, next_ = 0;
  };
  static constexpr int64_t kFirstWait = 64;
  struct Width {
    std::array<Times, kMostDrafts + 1> depth;
    int64_t plain_due = 0;                     // plain rounds that are due, to time them
    int64_t since_plain = 0, next_plain = 8;   // rounds of drafts, and how many until plain is timed again
    int64_t wait = 2, next_wait = kFirstWait;  // plain rounds before drafts are tried, and after they fail
    bool drafting = false;                     // tried, and not given up
    double try_ns = 0;                         // what the last try cost in the end
  };
  // Decayed counts of each place in a chain: reached, kept.
  struct Acceptance {
    std::array<double, kMostDrafts> reached{}, kept{};
    void add(const DraftRound::Stream& round);
  };
  // Rounds of drafts of the same streams since they were plain.
  struct Try {
    std::vector<size_t> ids;
    std::vector<int64_t> tokens;      // that each of them got
    int64_t rounds = 0, untimed = 0;  // of these the last ones, at a depth whose time is not known
    double worth = 0;                 // what it saved; below 0: cost
    double lost = 0;                  // of the most that it had saved
    double recording_ns = 0;          // beside that, spent on recording
  };
  using Ids = std::span<const size_t>;
  double expected_ns(const Width& width, int32_t depth) const;    // measured, or from what was
  double tokens(size_t stream, int32_t depth, bool hoped) const;  // expected of a round, or at most
  double rate(const Width& width, Ids ids, int32_t depth, bool hoped) const;
  int32_t best(const Width& width, Ids ids, bool records) const;  // 0: none of the depths that were seen
  bool goes_on(const Width& width, int32_t depth) const;
  Width& width(size_t streams);
  void observe_plain(Width& width, const DraftRound& round, bool counts);
  void observe_drafts(Width& width, const DraftRound& round);
  void give_up(Width& width);
  void pay(double saved, double plain);

  DraftOptions options_;
  std::map<size_t, Width> widths_;
  std::map<size_t, Acceptance> streams_;
  Acceptance everyone_;                                      // what a stream is taken for at first
  double credit_ = std::numeric_limits<double>::infinity();  // ns; set by the first plain round
  double recording_ns_ = 0;                                  // what the last try that needed recordings spent on them
  int32_t last_depth_ = -1;
  Try try_;
};

}  // namespace fnx
