#include "tests/support/ranks.h"

#include <thread>

namespace fnx::test {

std::vector<std::optional<Error>> run_ranks(int world, const std::function<void(Communicator&)>& work) {
  std::vector<std::unique_ptr<HostChannel>> channels = make_local_channels(world);
  std::vector<std::optional<Error>> ends(world);
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r)
    threads.emplace_back([&, r] {
      const std::unique_ptr<HostChannel> channel = std::move(channels[r]);
      try {
        work(*make_host_communicator(*channel));
      } catch (const Error& e) {
        ends[r] = e;
        channel->fail(e.kind(), e.what());
      }
    });
  for (std::thread& t : threads) t.join();
  return ends;
}

}  // namespace fnx::test
