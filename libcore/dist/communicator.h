// What ranks that share a model say to each other. Arrays move in stream order and are copied, never added.
#pragma once

#include <memory>

#include "kernels/ops.h"
#include "libcore/dist/channel.h"

namespace fnx {

class Communicator {
 public:
  explicit Communicator(HostChannel& channel) : channel_(channel) {}
  virtual ~Communicator() = default;

  int rank() const { return channel_.rank(); }
  int world() const { return channel_.world(); }
  HostChannel& channel() { return channel_; }

  // all = the ranks' `own`, one after the other; as long on every rank. `own` may lie in its place in `all`.
  virtual void all_gather(Stream&, View own, View all) = 0;
  // data = root's data.
  virtual void broadcast(Stream&, View data, int root) = 0;
  // Ends what is under way, on any thread; later calls throw.
  virtual void abort() {}

  // On the host, in step: true when it is on every rank; the smallest; rank 0's.
  bool agree(bool mine);
  int64_t minimum(int64_t mine);
  int64_t of_rank_0(int64_t mine);
  // Throws what ended another rank.
  void check() { channel_.check(); }

 private:
  HostChannel& channel_;
};

// For backends whose arrays lie in host memory; the channel carries them.
std::unique_ptr<Communicator> make_host_communicator(HostChannel& channel);

// NCCL on the device that is current. Collective. Throws Unsupported when this build has no NCCL, Device when it fails.
std::unique_ptr<Communicator> make_nccl_communicator(HostChannel& channel);
// Of the library that is there; throws Unsupported without one, "none" when this build has none.
std::string nccl_runtime_version();

}  // namespace fnx
