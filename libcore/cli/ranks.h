// The life of the ranks that a tool runs on (--tp): started or joined, held to the same settings, watched, merged into
// rank 0's receipt.
#pragma once

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "libcore/dist/communicator.h"
#include "libcore/dist/rank_place.h"
#include "libcore/receipt/receipt.h"

namespace fnx {

class Ranks {
 public:
  // Starts the other ranks unless a launcher did; `input` becomes their stdin. Throws Usage, naming the option, when
  // ranks were asked for different things: `settings` are the options, `build` what the program is.
  Ranks(const RankPlace& place, const std::string& input, const Json& settings, const Json& build);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  const RankPlace& place() const { return place_; }
  // Makes the communicator: NCCL on the current device, or the host's. Collective.
  void connect(bool cuda);
  Communicator& communicator() { return *communicator_; }
  HostChannel& channel() { return *channel_; }
  // True on every rank once one of them was asked to stop; the ranks talk about it at every 8th call.
  bool stop(bool mine);

  // All ranks are done: their evidence goes into rank 0's receipt, with a gate that their results are equal.
  void finish(Receipt& receipt);
  // This rank ends with an error: the others are told. What rank 0 adds to the error: how the others ended.
  std::string fail(ErrorKind kind, const std::string& why) noexcept;

 private:
  void compare(const Json& settings, const Json& build);
  void lost();
  std::string reap_all(int wait_ms, int expected = 0);

  RankPlace place_;
  std::vector<RankProcess> processes_;
  std::unique_ptr<HostChannel> channel_;
  std::unique_ptr<Communicator> communicator_;
  std::atomic<Communicator*> connected_{nullptr};  // for the watch
  std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
  int64_t stop_calls_ = 0;
  bool stopped_ = false;
};

}  // namespace fnx
