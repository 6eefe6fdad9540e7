// The four gates of a kernel. Each runs every case it is given and stops at the first failure.
#pragma once

#include <chrono>
#include <optional>

#include "kernels/contract/kernel.h"

namespace fnx::contract {

enum class Outcome : uint8_t { Pass, Fail, NotRun, NotCompleted };
const char* outcome_name(Outcome outcome);

struct GateResult {
  Outcome outcome = Outcome::NotRun;
  std::string detail;  // the failure, or why the gate was not run
  uint64_t checks = 0;
};

// Ends the work when the time is up or somebody asks for it.
struct TimeUp {};
class Deadline {
 public:
  Deadline() = default;
  Deadline(double seconds, std::function<bool()> stopping);
  // Throws TimeUp.
  void check() const;

 private:
  std::optional<std::chrono::steady_clock::time_point> end_;
  std::function<bool()> stopping_;
};

// Which shapes and kinds a gate runs, every pair a case of its own, on how many host threads.
struct Cases {
  std::vector<Shape> shapes;
  std::vector<Kind> kinds;
  int threads = 1;
};

// Gate 1: registers, shared and local memory and threads within the record, on this device.
GateResult check_resources(const Record& record, const std::vector<SymbolResources>& measured);
// Gate 2: every output within its FP64 bound, nothing else written. Fills one comparison a shape.
GateResult check_values(const Kernel& kernel, const Implementation& implementation, const Cases& cases,
                        const Deadline& deadline, std::vector<Comparison>& by_shape);
// Gate 3: bits do not depend on the window, the launch, the layout or a graph's replay; on a device, with normal
// inputs, nor on the number of rows, every one from 1 up.
GateResult check_bits(const Kernel& kernel, const Implementation& implementation, const Cases& cases,
                      const Deadline& deadline);
// Gate 4: launches outside the domain throw and write nothing.
GateResult check_refusals(const Kernel& kernel, const Implementation& implementation, const Deadline& deadline);

// Most shared memory of a block and registers of a block that every supported architecture has.
inline constexpr int64_t kSharedLimit = 99 * 1024;
inline constexpr int64_t kRegisterLimit = 65536;

}  // namespace fnx::contract
