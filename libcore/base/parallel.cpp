#include "libcore/base/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace fnx {

int default_threads() { return std::clamp(static_cast<int>(std::thread::hardware_concurrency()), 1, 16); }

void in_parallel(int threads, size_t count, const std::function<void(size_t)>& work) {
  std::atomic<size_t> next{0};
  std::exception_ptr failure;
  size_t failed = count;
  std::mutex mutex;
  const auto loop = [&] {
    size_t i = 0;
    try {
      while ((i = next++) < count) work(i);
    } catch (...) {
      // Lower ones were begun before and come to their end.
      const std::lock_guard lock(mutex);
      if (i < failed) failed = i, failure = std::current_exception();
      next = count;
    }
  };
  std::vector<std::thread> pool;
  try {
    for (size_t t = 1; t < std::min(static_cast<size_t>(threads), count); ++t) pool.emplace_back(loop);
  } catch (const std::system_error&) {
    // no more are to be had: those that run do all pieces
  }
  loop();
  for (std::thread& t : pool) t.join();
  if (failure) std::rethrow_exception(failure);
}

}  // namespace fnx
