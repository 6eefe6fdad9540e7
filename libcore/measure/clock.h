// The clock of every measured time.
#pragma once

#include <chrono>

namespace fnx {

// Nanoseconds of the steady clock; only differences mean something.
inline double now_ns() {
  return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace fnx
