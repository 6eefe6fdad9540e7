#include "libcore/dist/communicator.h"

#include <algorithm>
#include <cstring>

namespace fnx {

namespace {

std::string_view bytes_of(const View& v) {
  return {reinterpret_cast<const char*>(v.data), static_cast<size_t>(v.bytes())};
}

class HostCommunicator final : public Communicator {
 public:
  using Communicator::Communicator;

  void all_gather(Stream& stream, View own, View all) override {
    stream.synchronize();
    const std::vector<std::string> parts = channel().exchange(bytes_of(own));
    std::byte* to = all.data;
    for (const std::string& p : parts) {
      if (static_cast<int64_t>(p.size() * parts.size()) != all.bytes())
        throw Error(ErrorKind::Internal,
                    "ranks gather " + std::to_string(p.size()) + " bytes each into " + std::to_string(all.bytes()));
      std::memcpy(to, p.data(), p.size());
      to += p.size();
    }
  }
  void broadcast(Stream& stream, View data, int root) override {
    stream.synchronize();
    const auto parts = channel().exchange(rank() == root ? bytes_of(data) : std::string_view());
    if (static_cast<int64_t>(parts[root].size()) != data.bytes())
      throw Error(ErrorKind::Internal, "rank " + std::to_string(root) + " sent " + std::to_string(parts[root].size()) +
                                           " bytes where " + std::to_string(data.bytes()) + " are expected");
    std::memcpy(data.data, parts[root].data(), parts[root].size());
  }
};

}  // namespace

bool Communicator::agree(bool mine) {
  const auto all = channel_.exchange(mine ? "1" : "0");
  return std::all_of(all.begin(), all.end(), [](const std::string& s) { return s == "1"; });
}

int64_t Communicator::minimum(int64_t mine) {
  for (const std::string& s : channel_.exchange(std::to_string(mine))) mine = std::min<int64_t>(mine, std::stoll(s));
  return mine;
}

int64_t Communicator::of_rank_0(int64_t mine) { return std::stoll(channel_.exchange(std::to_string(mine))[0]); }

std::unique_ptr<Communicator> make_host_communicator(HostChannel& channel) {
  return std::make_unique<HostCommunicator>(channel);
}

}  // namespace fnx
