// How many tokens to draft: from measured acceptance of every stream and measured times of rounds, plain ones included.
// A pure function of what it was told, so that a recorded run can be replayed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
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

// One decode round: of each stream the tokens that were drafted and those of them that were kept; its time with that of
// drafting for it.
struct DraftRound {
  struct Stream {
    size_t id = 0;
    int32_t drafted = 0, kept = 0;
  };
  int32_t depth = 0;  // as decided
  std::vector<Stream> streams;
  double ns = 0;
};

class DraftPolicy {
 public:
  explicit DraftPolicy(const DraftOptions& options) : options_(options) {}

  // Depth of the next round of these streams.
  int32_t decide(std::span<const size_t> streams) const;
  void observe(const DraftRound& round);
  // The number may be that of another stream from now on; what is known of all streams stays.
  void forget(size_t stream) { streams_.erase(stream); }

 private:
  static constexpr size_t kSamples = 8;
  // Of one depth at one number of streams: the last times.
  struct Times {
    std::vector<double> ns;
    int64_t seen = 0;
    double typical() const;
  };
  struct Width {
    std::array<Times, kMostDrafts + 1> depth;
    int32_t last_depth = 0;
    int64_t plain_due = 0;                    // plain rounds that are due, to time them
    int64_t since_plain = 0, next_plain = 8;  // rounds of drafts, and how many until plain is timed again
    int64_t wait = 2, next_wait = 8;          // plain rounds before drafts are tried, and after they fail
    int64_t probing = 0;                      // rounds of drafts that are due whatever they bring
    double expected_ns(int32_t d) const;      // measured, or from the depths below
  };
  // Decayed counts of each place in a chain: reached, kept.
  struct Acceptance {
    std::array<double, kMostDrafts> reached{}, kept{};
    void add(const DraftRound::Stream& round);
  };
  Width width(size_t streams) const;
  double tokens(size_t stream, int32_t depth) const;  // expected of a round
  int32_t best(const Width& width, std::span<const size_t> streams, double* gain) const;

  DraftOptions options_;
  std::map<size_t, Width> widths_;
  std::map<size_t, Acceptance> streams_;
  Acceptance everyone_;  // what a stream is taken for at first
};

}  // namespace fnx
