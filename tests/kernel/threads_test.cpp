#include "kernels/cpu/threads.h"

#include <doctest/doctest.h>

#include <atomic>
#include <vector>

using fnx::cpu::ThreadPool;

TEST_CASE("threads: every item of every round runs once, however late the workers wake") {
  for (const int threads : {1, 2, 5, 32}) {
    ThreadPool pool(threads);
    std::vector<std::atomic<int>> runs(64);
    int64_t wrong = 0;
    for (int round = 0; round < 25000; ++round) {
      const int64_t count = 2 + round * 7 % 62;
      for (auto& r : runs) r.store(0, std::memory_order_relaxed);
      pool.run(count, [&](int64_t i) { runs[i].fetch_add(1, std::memory_order_relaxed); });
      for (int64_t i = 0; i < static_cast<int64_t>(runs.size()); ++i) wrong += runs[i].load() != (i < count ? 1 : 0);
    }
    CHECK(wrong == 0);
  }
}
