// Work on host memory that one thread would be slow at: the first touch of large arenas, and their filling.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace fnx::cuda {

// work(i) for i in [0, count), which does not throw.
template <class Work>
void on_host_threads(int64_t count, const Work& work) {
  constexpr unsigned kMost = 12;
  const unsigned threads = std::clamp(std::thread::hardware_concurrency(), 1u, kMost);
  std::atomic<int64_t> next{0};
  const auto run = [&] {
    for (int64_t i = next++; i < count; i = next++) work(i);
  };
  std::vector<std::jthread> helpers;
  for (unsigned t = 1; t < threads; ++t) helpers.emplace_back(run);
  run();
}

}  // namespace fnx::cuda
