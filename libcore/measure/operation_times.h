// Where the time of a round goes: its operations are recorded as they are enqueued and then timed group by group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace fnx {

struct OperationTime {
  std::string name;                 // "linear 2560 -> 10240"
  int64_t calls = 0, launches = 0;  // launches where the backend records them
  double seconds = 0;               // all calls of a round, one after the other
  double in_round = 0;              // what the round is longer with them than without; 0 unless asked for
};

struct RoundTimes {
  std::vector<OperationTime> operations;
  OperationTime whole;
};

// Passes everything on to another backend, which it borrows. Between start() and times() it remembers the operations;
// their operands and weights must live until then.
class RecordingBackend : public Backend {
 public:
  virtual void start() = 0;
  // The whole round and each group of equal operations, recorded as one graph where the backend can and replayed back
  // to back; the medians of `repeats`. With `in_round` also the round without each group. States are changed by it: the
  // sequences are of no more use.
  virtual RoundTimes times(Stream& stream, int repeats, bool in_round) = 0;
};
std::unique_ptr<RecordingBackend> make_recording_backend(Backend& backend);

}  // namespace fnx
