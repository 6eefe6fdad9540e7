// Where the time of a round goes: its operations are recorded as they are enqueued and then timed group by group.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/ops.h"

namespace fnx {

struct OperationTime {
  std::string name;  // "linear 2560 -> 10240"
  int64_t calls = 0;
  double seconds = 0;  // all calls of a round, one after the other
};

// Passes everything on to another backend, which it borrows. Between start() and times() it remembers the operations;
// their operands and weights must live until then.
class RecordingBackend : public Backend {
 public:
  virtual void start() = 0;
  // Each group of equal operations, recorded as one graph where the backend can and replayed; the medians of `repeats`.
  // States are changed by it: the sequences are of no more use.
  virtual std::vector<OperationTime> times(Stream& stream, int repeats) = 0;
};
std::unique_ptr<RecordingBackend> make_recording_backend(Backend& backend);

}  // namespace fnx
