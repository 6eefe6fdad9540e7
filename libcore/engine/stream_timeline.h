// When experts were copied and when they were computed, in forwards that stream them.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/ops.h"

namespace fnx {

struct TimelineSummary {
  double window_ns = 0;      // from the first copy or computation to the end of the last, over forwards
  double copying_ns = 0;     // of it, while an expert was copied
  double computing_ns = 0;   // of it, while experts were computed
  double overlapped_ns = 0;  // of it, while both
  uint64_t forwards = 0, copied_bytes = 0;
};

class StreamTimeline {
 public:
  explicit StreamTimeline(Backend& backend) : backend_(backend) {}

  // Forwards beyond the first few are not noted.
  void begin_forward();
  // The work that is enqueued on the stream between begin() and end().
  void begin(Stream& stream);
  void end(Stream& stream, bool copy, uint64_t bytes);
  // Waits for what was noted.
  TimelineSummary summary() const;

 private:
  struct Interval {
    std::unique_ptr<Event> from, to;
    bool copy = false;
    uint64_t bytes = 0;
  };
  Backend& backend_;
  std::vector<std::vector<Interval>> forwards_;
  std::unique_ptr<Event> began_;
  bool noting_ = false;
};

}  // namespace fnx
