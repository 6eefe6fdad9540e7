// Independent pieces of work on several threads of their own.
#pragma once

#include <cstddef>
#include <functional>

namespace fnx {

// One a hardware thread, at most 16: for work that memory bounds.
int default_threads();

// Runs work(i) for i in 0 .. count - 1, on `threads` threads with the caller's; an exception stops the others, and the
// one of the lowest i that throws is thrown here, whatever the threads' order.
void in_parallel(int threads, size_t count, const std::function<void(size_t)>& work);

}  // namespace fnx
