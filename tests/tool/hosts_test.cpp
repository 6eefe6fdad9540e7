// Ranks on two hosts: network namespaces of this machine that a cable joins. Skipped where they cannot be made.
#include <doctest/doctest.h>

#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <future>
#include <thread>

#include "tests/support/run_tool.h"

using namespace fnx;

namespace {

bool shell(const std::string& line) { return std::system((line + " 2>/dev/null").c_str()) == 0; }

// Host 0 is 10.77.0.1, host 1 is 10.77.0.2.
class Hosts {
 public:
  Hosts() {
    made_ =
        shell("ip netns add " + name(0)) && shell("ip netns add " + name(1)) &&
        shell("ip link add " + card(0) + " netns " + name(0) + " type veth peer name " + card(1) + " netns " + name(1));
    for (int i : {0, 1})
      made_ = made_ && on(i, "ip addr add 10.77.0." + std::to_string(i + 1) + "/24 dev " + card(i)) &&
              on(i, "ip link set " + card(i) + " up") && on(i, "ip link set lo up");
    if (!made_) std::puts("skipped: no network namespaces here");
  }
  ~Hosts() {
    for (int i : {0, 1}) shell("ip netns delete " + name(i));
  }
  bool made() const { return made_; }
  bool cut_cable() const { return on(0, "ip link set " + card(0) + " down"); }

  // fnx-generate as the rank of that number, which is alone on its host.
  std::future<RunResult> start(int rank, std::vector<std::string> more, std::vector<std::string> env) const {
    std::vector<std::string> argv = {"/bin/sh",
                                     "-c",
                                     "exec ip netns exec " + name(rank) + " \"$@\"",
                                     "sh",
                                     tool_path("fnx-generate"),
                                     "--model",
                                     FNX_SOURCE_DIR "/fixtures/flashnext-tiny",
                                     "--backend",
                                     "cpu",
                                     "--threads",
                                     "1",
                                     "--tp",
                                     "2"};
    argv.insert(argv.end(), more.begin(), more.end());
    return std::async(std::launch::async,
                      [argv = std::move(argv), env = std::move(env)] { return run_command(argv, "", env); });
  }

 private:
  static std::string name(int host) { return "fnx" + std::to_string(::getpid()) + (host == 0 ? "a" : "b"); }
  static std::string card(int host) { return name(host); }
  static bool on(int host, const std::string& line) { return shell("ip netns exec " + name(host) + " " + line); }
  bool made_ = false;
};

std::vector<std::string> srun_variables(int rank) {
  return {"SLURM_PROCID=" + std::to_string(rank), "SLURM_NTASKS=2", "SLURM_LOCALID=0", "SLURM_NNODES=2",
          "MASTER_ADDR=10.77.0.1"};
}

std::vector<std::string> torchrun_variables(int rank) {
  return {"RANK=" + std::to_string(rank), "WORLD_SIZE=2", "LOCAL_RANK=0", "LOCAL_WORLD_SIZE=1",
          "MASTER_ADDR=10.77.0.1"};
}

}  // namespace

TEST_CASE("hosts: ranks that srun or torchrun starts on two hosts give the answer of one process") {
  const Hosts hosts;
  if (!hosts.made()) return;
  for (const auto variables : {srun_variables, torchrun_variables}) {
    const std::vector<std::string> prompt = {"--chat", "--thinking", "off", "--prompt", "What is the capital of Peru?"};
    std::future<RunResult> one = hosts.start(1, prompt, variables(1));
    const RunResult zero = hosts.start(0, prompt, variables(0)).get(), other = one.get();
    CAPTURE(zero.err);
    CAPTURE(other.err);
    CHECK(zero.exit_code == 0);
    CHECK(other.exit_code == 0);
    CHECK(zero.out == "The capital of Peru is Lima.\n");
    CHECK(other.out.empty());
    const Json ranks = read_receipt(zero, "fnx-generate")["evidence"]["ranks"];
    REQUIRE(ranks.size() == 2);
  }
}

TEST_CASE("hosts: ranks on two hosts end with code 5 within ten seconds when the cable between them is cut") {
  const Hosts hosts;
  if (!hosts.made()) return;
  const std::vector<std::string> endless = {"--prompt", "What", "--max-tokens", "3900", "--ignore-eos"};
  std::future<RunResult> one = hosts.start(1, endless, srun_variables(1)),
                         zero = hosts.start(0, endless, srun_variables(0));
  std::this_thread::sleep_for(std::chrono::seconds(4));
  REQUIRE(hosts.cut_cable());
  const auto cut = std::chrono::steady_clock::now();
  const RunResult first = zero.get(), second = one.get();
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - cut).count() < 10);
  CHECK(first.exit_code == 5);
  CHECK(second.exit_code == 5);
  CHECK(first.err.find("rank 1 ended without a word: it was killed or its host is gone") != std::string::npos);
  CHECK(second.err.find("rank 0 ended without a word") != std::string::npos);
}
