// Host messages between ranks: a star of stream sockets around rank 0, in one process, on one host or over several.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "kernels/error.h"

namespace fnx {

// One thread exchanges; a watch may run beside it. Closed by its end, which the other ranks notice.
class HostChannel {
 public:
  // `sockets` are owned from here on. Rank 0: those of ranks 1, 2, ...; another rank: the one to rank 0.
  HostChannel(int rank, int world, std::vector<int> sockets);
  ~HostChannel();
  HostChannel(const HostChannel&) = delete;
  HostChannel& operator=(const HostChannel&) = delete;

  int rank() const { return rank_; }
  int world() const { return world_; }
  // Every rank's bytes, in rank order; waits for all of them. Throws what ended another rank: its own error with the
  // rank named, or Device when it ended without a word.
  std::vector<std::string> exchange(std::string_view own);
  // Tells the others why this rank ends.
  void fail(ErrorKind kind, const std::string& why) noexcept;

  // Notices a rank that ends while this one is busy: `lost` is called once, on another thread.
  void watch(std::function<void()> lost);
  // No rank is missed from here on: each may end when it likes.
  void end_watch();
  // Throws as exchange() does, once a rank has ended.
  void check();
  std::optional<Error> failure();

 private:
  void send_message(int socket, char kind, std::string_view bytes, int peer);
  std::string receive(int socket, int peer);
  // Keeps the first failure and throws it.
  [[noreturn]] void ended(const Error& error);
  void watch_loop(const std::function<void()>& lost);
  int peer_of(size_t socket) const { return rank_ == 0 ? static_cast<int>(socket) + 1 : 0; }

  int rank_, world_;
  std::vector<int> sockets_;
  std::mutex reading_, failing_;
  std::optional<Error> failure_;
  std::atomic<bool> stop_{false};
  std::thread watcher_;
};

// The channels of ranks that are threads of this process.
std::vector<std::unique_ptr<HostChannel>> make_local_channels(int world);

}  // namespace fnx
