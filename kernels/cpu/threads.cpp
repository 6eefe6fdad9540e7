#include "kernels/cpu/threads.h"

#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "kernels/error.h"

namespace fnx::cpu {

namespace {
inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}
}  // namespace

struct ThreadPool::Impl {
  std::mutex mutex;
  std::condition_variable wake;
  std::atomic<uint64_t> round{0};
  std::atomic<int64_t> next{0}, finished{0};
  int64_t count = 0;
  const std::function<void(int64_t)>* fn = nullptr;
  std::atomic<int> inside{0};
  bool open = false;  // whether a worker that wakes now may still join the round
  bool stop = false;
  std::vector<std::thread> workers;

  void work() {
    for (;;) {
      const int64_t i = next.fetch_add(1);
      if (i >= count) return;
      (*fn)(i);
      finished.fetch_add(1);
    }
  }

  void loop() {
    uint64_t seen = 0;
    for (;;) {
      // Decode rounds are chains of short operations: look for work for a while before sleeping.
      for (int spin = 0; spin < 4000 && round.load() == seen; ++spin) relax();
      {
        std::unique_lock lock(mutex);
        wake.wait(lock, [&] { return stop || round.load() != seen; });
        if (stop) return;
        seen = round.load();
        if (!open) continue;
        inside.fetch_add(1);
      }
      work();
      inside.fetch_sub(1);
    }
  }

  void end() {
    {
      std::lock_guard lock(mutex);
      stop = true;
      round.fetch_add(1);
    }
    wake.notify_all();
    for (auto& t : workers) t.join();
  }
};

ThreadPool::ThreadPool(int threads) : impl_(std::make_unique<Impl>()) {
  try {
    for (int i = 1; i < threads; ++i) impl_->workers.emplace_back([this] { impl_->loop(); });
  } catch (const std::system_error& e) {
    impl_->end();
    throw Error(ErrorKind::Unsupported,
                std::to_string(threads) + " threads cannot be started: " + e.code().message() + "; lower --threads");
  }
}

ThreadPool::~ThreadPool() { impl_->end(); }

int ThreadPool::threads() const { return static_cast<int>(impl_->workers.size()) + 1; }

void ThreadPool::run(int64_t count, const std::function<void(int64_t)>& fn) {
  if (count <= 1 || impl_->workers.empty()) {
    for (int64_t i = 0; i < count; ++i) fn(i);
    return;
  }
  {
    std::lock_guard lock(impl_->mutex);
    impl_->count = count;
    impl_->fn = &fn;
    impl_->next.store(0);
    impl_->finished.store(0);
    impl_->open = true;
    impl_->round.fetch_add(1);
  }
  impl_->wake.notify_all();
  impl_->work();
  while (impl_->finished.load() != count) std::this_thread::yield();
  // A worker that woke late would take an item by this round's counter and run it as one of the next round's.
  {
    std::lock_guard lock(impl_->mutex);
    impl_->open = false;
  }
  while (impl_->inside.load() != 0) std::this_thread::yield();
}

}  // namespace fnx::cpu
