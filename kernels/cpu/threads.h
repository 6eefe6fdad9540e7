// Worker threads of the cpu backend.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>

namespace fnx::cpu {

// Runs fn(i) for i in [0, count) on all threads and waits; the caller takes part. Not reentrant.
class ThreadPool {
 public:
  explicit ThreadPool(int threads);  // throws Unsupported when the system starts no more
  ~ThreadPool();
  int threads() const;
  void run(int64_t count, const std::function<void(int64_t)>& fn);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace fnx::cpu
