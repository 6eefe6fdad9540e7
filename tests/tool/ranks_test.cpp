// Tools on several ranks as a user runs them: the bits of one rank, faults found, ranks that are killed or disagree.
#include <doctest/doctest.h>

#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <fstream>
#include <future>
#include <map>
#include <sstream>
#include <thread>

#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";

std::vector<std::string> command(const std::string& tool, std::vector<std::string> more) {
  more.insert(more.begin(), {tool_path(tool), "--model", kTiny, "--backend", "cpu", "--threads", "1"});
  return more;
}

RunResult parity(std::vector<std::string> more) {
  more.insert(more.end(), {"--context", "20", "--chunk-rows", "8", "--rounds", "3"});
  return run_command(command("fnx-tp-parity", more));
}

// Nothing when the file's process ends meanwhile; an iterator would throw then.
std::string text_of(const fs::path& file) {
  std::ostringstream out;
  out << std::ifstream(file, std::ios::binary).rdbuf();
  return out.str();
}

// CPU seconds of a process so far.
double cpu_seconds(int pid) {
  const std::string stat = text_of("/proc/" + std::to_string(pid) + "/stat");
  std::istringstream fields(stat.substr(std::min(stat.rfind(')'), stat.size())));
  std::string word;
  double ticks = 0;
  for (int i = 0; fields >> word && i <= 13; ++i)
    if (i == 12 || i == 13) ticks += std::stod(word);
  return ticks / static_cast<double>(::sysconf(_SC_CLK_TCK));
}

// The process whose command line holds `mark` and whose environment holds `variable`; kills it once it has used that
// much CPU time. The time when that was.
std::chrono::steady_clock::time_point kill_rank(const std::string& mark, const std::string& variable, double after_s) {
  for (int waited = 0; waited < 12000; ++waited) {
    for (const auto& entry : fs::directory_iterator("/proc")) {
      const std::string name = entry.path().filename().string();
      if (name.find_first_not_of("0123456789") != std::string::npos) continue;
      if (text_of(entry.path() / "cmdline").find(mark) == std::string::npos) continue;
      if (text_of(entry.path() / "environ").find(variable) == std::string::npos) continue;
      const int pid = std::stoi(name);
      if (cpu_seconds(pid) < after_s) continue;
      ::kill(pid, SIGKILL);
      return std::chrono::steady_clock::now();
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  throw std::runtime_error("no process of that rank");
}

std::vector<std::string> torchrun_variables(int rank, int port) {
  return {"RANK=" + std::to_string(rank), "WORLD_SIZE=2", "LOCAL_RANK=" + std::to_string(rank), "MASTER_ADDR=127.0.0.1",
          "MASTER_PORT=" + std::to_string(port)};
}

int some_port() { return 20000 + static_cast<int>(::getpid() % 20000); }

}  // namespace

TEST_CASE("ranks: fnx-tp-parity finds two and four ranks equal to one, and each side to itself") {
  for (const char* world : {"2", "4"}) {
    const RunResult run = parity({"--tp", world, "--slots", "--sequences", "1,3"});
    CAPTURE(run.err);
    CHECK(run.exit_code == 0);
    CHECK(run.out.find("different") == std::string::npos);
    const Json receipt = read_receipt(run, "fnx-tp-parity");
    REQUIRE(receipt["result"]["cells"].size() == 4);
    for (const Json& cell : receipt["result"]["cells"]) {
      REQUIRE(cell["comparisons"].size() == 4);
      for (const Json& c : cell["comparisons"]) CHECK(c["outcome"] == "equal");
      for (const Json& r : cell["runs"]) {
        CHECK(r["logits_hash"] == cell["runs"][0]["logits_hash"]);
        CHECK(r["slots_hash"] == cell["runs"][0]["slots_hash"]);
      }
    }
    const Json& ranks = receipt["evidence"]["ranks"];
    REQUIRE(ranks.size() == std::stoul(world));
    int64_t next = 0;
    for (const Json& r : ranks) {
      const Json& shard = r["effective"]["shard"]["value"];
      CHECK(shard["first_expert"] == next);
      next += shard["experts"].get<int64_t>();
      CHECK(shard["shared_expert"] == (r["rank"] == ranks.size() - 1));
    }
    CHECK(next == 32);
  }
}

TEST_CASE("ranks: fnx-tp-parity finds ranks that offload their experts equal to one rank that offloads none") {
  for (const char* planner : {"host", "device", "ahead"}) {
    CAPTURE(planner);
    const RunResult run =
        parity({"--expert-lines", "3", "--planner", planner, "--check-lines", "--slots", "--sequences", "2"});
    CAPTURE(run.err);
    CHECK(run.exit_code == 0);
    CHECK(run.out.find("different") == std::string::npos);
    const Json receipt = read_receipt(run, "fnx-tp-parity");
    for (const Json& cell : receipt["result"]["cells"]) {
      CHECK(cell["runs"].size() == 8);
      CHECK(cell["comparisons"].size() == 10);
      for (const Json& c : cell["comparisons"]) CHECK(c["outcome"] == "equal");
    }
    for (const Json& rank : receipt["evidence"]["ranks"])
      for (const char* side : {"tp1-offloaded", "tp2-offloaded"}) {
        const Json& pools = rank["evidence"]["expert_pools"][side];
        CHECK(pools["planner"] == planner);
        CHECK(pools["lines"] == 3);
        CHECK(pools["misses"] > 0);
        CHECK(pools["touches"] == pools["hits"].get<uint64_t>() + pools["misses"].get<uint64_t>());
      }
  }
}

TEST_CASE("ranks: fnx-tp-parity times one rank while the others wait, all together, and each by itself when asked") {
  const RunResult run = parity({"--expert-lines", "3", "--pairs", "4", "--sequences", "1", "--gate",
                                "offloaded/round/ratio>=1e9", "--gate", "independent_ratio>=1e-9"});
  CAPTURE(run.err);
  CHECK(run.exit_code == 1);
  const Json receipt = read_receipt(run, "fnx-tp-parity");
  for (const Json& rank : receipt["evidence"]["ranks"]) {
    const int alone = rank["rank"] == 0 ? 5 : 0;  // four, and one before them
    const Json& runs = rank["evidence"]["timed_runs"];
    CHECK(runs["greedy/c1"] == Json{{"tp1", alone}, {"tp2", 5}, {"tp1-independent", 5}});
    CHECK(runs["greedy/c1/offloaded"] ==
          Json{{"tp1-offloaded", alone}, {"tp2-offloaded", 5}, {"tp1-offloaded-independent", 5}});
  }
  std::map<std::string, std::vector<double>> samples;
  for (const Json& series : receipt["measurements"])
    if (series["phase"] == "warm") samples[series["name"]] = series["samples"].get<std::vector<double>>();
  for (const char* side : {"tp1", "tp2", "tp1-independent"})
    CHECK(samples["greedy/c1/prompts/" + std::string(side) + "_ns"].size() == 4);
  for (size_t i = 0; i < 4; ++i) {
    const double all = samples["greedy/c1/round/tp2_ns"][i];
    CHECK(samples["greedy/c1/round/ratio"][i] == doctest::Approx(samples["greedy/c1/round/tp1_ns"][i] / all));
    CHECK(samples["greedy/c1/round/independent_ratio"][i] ==
          doctest::Approx(samples["greedy/c1/round/tp1-independent_ns"][i] / all));
  }
  std::map<std::string, std::string> gates;
  for (const Json& gate : receipt["gates"]) gates[gate["name"]] = gate["outcome"];
  CHECK(gates["greedy/c1/offloaded/round/ratio"] == "fail");
  CHECK(gates["greedy/c1/offloaded/prompts/independent_ratio"] == "pass");
  CHECK_FALSE(gates.contains("greedy/c1/round/ratio"));
}

TEST_CASE(
    "ranks: fnx-tp-parity claims no ratio when pairs are few, or bits differ, and refuses a limit without pairs") {
  const auto outcome = [](const RunResult& run) {
    const Json receipt = read_receipt(run, "fnx-tp-parity");
    for (const Json& gate : receipt["gates"])
      if (gate["name"] == "greedy/c1/round/ratio") return gate["outcome"].get<std::string>();
    return std::string("none");
  };
  const std::vector<std::string> one = {"--sequences", "1", "--modes", "greedy", "--gate", "round/ratio>=1e-9"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.end(), one.begin(), one.end());
    return parity(more);
  };
  const RunResult few = with({"--pairs", "3"});
  CHECK(few.exit_code == 0);
  CHECK(few.out.find("too few pairs") != std::string::npos);
  CHECK(outcome(few) == "not_run");
  const RunResult planted = with({"--pairs", "4", "--plant", "add"});
  CHECK(planted.exit_code == 1);
  CHECK(outcome(planted) == "not_run");
  CHECK(with({}).exit_code == 2);
}

TEST_CASE("ranks: a planted fault in the exchange of offloaded experts makes fnx-tp-parity exit 1") {
  const RunResult run =
      parity({"--expert-lines", "3", "--plant", "order", "--slots", "--sequences", "1", "--modes", "greedy"});
  CHECK(run.exit_code == 1);
  CHECK(run.out.find("tp1 first = tp2-offloaded first                 different: expert output") != std::string::npos);
}

TEST_CASE("ranks: fnx-tp-parity exits 1 and names the first wrong number for every planted fault") {
  for (const auto& [plant, what] :
       {std::pair{"add", "expert output"}, {"order", "expert output"}, {"shard-plan", "logit"}}) {
    CAPTURE(plant);
    const RunResult run = parity({"--plant", plant, "--slots", "--sequences", "2", "--modes", "greedy"});
    CHECK(run.exit_code == 1);
    const Json receipt = read_receipt(run, "fnx-tp-parity");
    bool found = false;
    for (const Json& c : receipt["result"]["cells"][0]["comparisons"]) {
      const bool across = c["a"].get<std::string>().starts_with("tp1") && c["b"].get<std::string>().starts_with("tp2");
      if (!across) continue;
      CHECK(c["outcome"] == "different");
      if (c["outcome"] != "different") continue;
      CHECK(c["first_difference"]["what"] == what);
      CHECK(c["first_difference"]["a"] != c["first_difference"]["b"]);
      found = true;
    }
    CHECK(found);
  }
}

TEST_CASE("ranks: the sums of planted parts differ in the logits without expert outputs compared") {
  for (const char* plant : {"add", "order"}) {
    const RunResult run = parity({"--plant", plant, "--sequences", "1", "--modes", "greedy"});
    CHECK(run.exit_code == 1);
    CHECK(run.out.find("logit at forward") != std::string::npos);
  }
}

TEST_CASE("ranks: fnx-generate gives one rank's answers, for prompts on stdin and draft logits too") {
  const std::string prompts = "{\"id\":1,\"prompt\":\"The capital of\"}\n{\"id\":2,\"tokens\":[5,6,7]}\n";
  const TempDir folder;
  std::string outs[2], logits[2];
  for (const int world : {1, 2}) {
    const fs::path file = folder / ("logits" + std::to_string(world));
    const RunResult run = run_command(
        command("fnx-generate", {"--jsonl", "-", "--max-tokens", "6", "--tp", std::to_string(world), "--logits",
                                 file.string(), "--mtp-logits", "--temperature", "0.7", "--seed", "3"}),
        prompts);
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    outs[world - 1] = run.out;
    logits[world - 1] = text_of(file);
  }
  CHECK(!outs[0].empty());
  CHECK(outs[0] == outs[1]);
  CHECK(logits[0] == logits[1]);
}

TEST_CASE("ranks: fnx-generate gives one rank's answers when prompts go on from snapshots") {
  std::string prompts;
  for (int last = 1; last <= 3; ++last) {
    prompts += "{\"id\":" + std::to_string(last) + ",\"tokens\":[";
    for (int i = 0; i < 40; ++i) prompts += std::to_string(5 + i) + ",";
    prompts += std::to_string(last) + "]}\n";
  }
  std::string outs[2];
  for (const int world : {1, 2}) {
    const RunResult run = run_command(command("fnx-generate", {"--jsonl", "-", "--max-tokens", "6", "--reuse",
                                                               "--parallel", "1", "--tp", std::to_string(world)}),
                                      prompts);
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    CHECK(read_receipt(run, "fnx-generate")["evidence"]["reused_requests"].get<int>() >= 1);
    outs[world - 1] = run.out;
  }
  CHECK(!outs[0].empty());
  CHECK(outs[0] == outs[1]);
}

TEST_CASE("ranks: fnx-generate on ranks that start warm from profiles of their own gives one rank's answer") {
  const TempDir folder;
  std::string prompt = "5";
  for (int i = 0; i < 79; ++i) prompt += "," + std::to_string(i);
  const auto generate = [&](std::vector<std::string> more) {
    more.insert(more.end(), {"--token-ids", prompt, "--max-tokens", "6", "--ignore-eos", "--draft", "off"});
    const RunResult run = run_command(command("fnx-generate", more));
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    return run;
  };
  const RunResult one = generate({});
  for (const bool warm : {false, true}) {
    const RunResult two =
        generate({"--tp", "2", "--expert-lines", "4", "--check-lines", "--profile-dir", (folder / "p").string()});
    CHECK(two.out == one.out);
    const Json ranks = read_receipt(two, "fnx-generate")["evidence"]["ranks"];
    REQUIRE(ranks.size() == 2);
    for (const Json& rank : ranks) {
      const Json& pools = rank["evidence"]["expert_pools"];
      CHECK(pools["streamed"]["forwards"] == 1);
      CHECK(pools["misses"] > 0);
      CHECK(pools["warm_start"]["copies"] == (warm ? 2 : 1) * 8 * 4);  // after the prompt too
      CHECK(rank["effective"]["profile"]["value"].get<std::string>().find(
                "rank" + std::to_string(rank["rank"].get<int>()) + "of2") != std::string::npos);
    }
    CHECK(ranks[0]["evidence"]["expert_pools"]["touches"] != ranks[1]["evidence"]["expert_pools"]["touches"]);
  }
}

TEST_CASE("ranks: more lines than a rank has experts are refused by number") {
  const RunResult run =
      run_command(command("fnx-generate", {"--expert-lines", "17", "--tp", "2", "--prompt", "a", "--max-tokens", "2"}));
  CHECK(run.exit_code == 2);
  CHECK(run.err.find("give auto or 1 to 16, the experts of a layer on a rank") != std::string::npos);
}

TEST_CASE("ranks: fnx-generate drafts on two ranks and gives the plain answer of one") {
  const auto generate = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--prompt", "The capital of", "--max-tokens", "24", "--ignore-eos"});
    const RunResult run = run_command(command("fnx-generate", more));
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    return run;
  };
  const RunResult plain = generate({"--draft", "off"});
  for (const char* draft : {"auto", "3"}) {
    const RunResult run = generate({"--draft", draft, "--tp", "2", "--expert-lines", "5"});
    CHECK(run.out == plain.out);
    const Json ranks = read_receipt(run, "fnx-generate")["evidence"]["ranks"];
    REQUIRE(ranks.size() == 2);
    CHECK(ranks[0]["evidence"]["drafted_tokens"] > 0);
    for (const char* count : {"drafted_tokens", "kept_drafts", "rounds_by_draft_depth"})
      CHECK(ranks[0]["evidence"][count] == ranks[1]["evidence"][count]);
  }
}

TEST_CASE("ranks: rank 0 ends with code 5 within ten seconds when rank 1 is killed at load, in a prompt, in decoding") {
  std::string prompt = "5";
  for (int i = 0; i < 3000; ++i) prompt += "," + std::to_string(i % 4000);
  for (const auto& [name, ids, after_s] :
       {std::tuple{"load", std::string("5,6"), 0.0}, {"prompt", prompt, 2.0}, {"decoding", std::string("5,6"), 2.0}}) {
    CAPTURE(name);
    const TempDir folder;
    const fs::path receipt = folder / "mark.json";
    std::future<RunResult> run = std::async(std::launch::async, [&, ids = ids] {
      return run_command(
          command("fnx-generate", {"--tp", "2", "--token-ids", ids, "--max-tokens", "4000", "--ignore-eos",
                                   "--chunk-rows", "64", "--receipt", receipt.string()}));
    });
    const auto killed = kill_rank(receipt.string(), "FNX_RANK=1/", after_s);
    const RunResult ended = run.get();
    CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - killed).count() < 10);
    CHECK(ended.exit_code == 5);
    const Json document = read_json(receipt);
    CHECK(document["run"]["exit_code"] == 5);
    CHECK(document["run"]["error"].get<std::string>().find("rank 1") != std::string::npos);
    CHECK(document["run"]["error"].get<std::string>().find("killed by signal 9") != std::string::npos);
  }
}

TEST_CASE("ranks: rank 1 ends with code 5 within ten seconds when rank 0 of a launcher is killed") {
  const TempDir folder;
  const auto start = [&](int rank) {
    return std::async(std::launch::async, [&, rank] {
      return run_command(command("fnx-generate", {"--tp", "2", "--token-ids", "5,6", "--max-tokens", "4000",
                                                  "--ignore-eos", "--receipt", (folder / "mark.json").string()}),
                         "", torchrun_variables(rank, some_port()));
    });
  };
  std::future<RunResult> zero = start(0), one = start(1);
  const auto killed = kill_rank((folder / "mark.json").string(), "LOCAL_RANK=0", 2.0);
  const RunResult ended = one.get();
  CHECK(std::chrono::duration<double>(std::chrono::steady_clock::now() - killed).count() < 10);
  CHECK(ended.exit_code == 5);
  CHECK(ended.err.find("rank 0 ended without a word") != std::string::npos);
  CHECK(zero.get().exit_code == -SIGKILL);
  CHECK(read_json(folder / "mark.json")["run"]["outcome"] == "incomplete");
}

TEST_CASE("ranks: a launcher's ranks refuse different options at the start and name the option, and run when equal") {
  for (const bool equal : {false, true}) {
    const auto start = [&](int rank) {
      return std::async(std::launch::async, [&, rank] {
        return run_command(command("fnx-generate", {"--tp", "2", "--prompt", "The capital of", "--max-tokens", "4",
                                                    "--seed", equal ? "1" : std::to_string(rank)}),
                           "", torchrun_variables(rank, some_port() + 2));
      });
    };
    std::future<RunResult> zero = start(0), one = start(1);
    const RunResult a = zero.get(), b = one.get();
    CHECK(a.exit_code == (equal ? 0 : 2));
    CHECK(b.exit_code == (equal ? 0 : 2));
    CHECK(b.out == "");
    if (equal) CHECK(a.out != "");
    if (!equal) CHECK(a.err.find("--seed is \"0\" on rank 0 and \"1\" on rank 1") != std::string::npos);
  }
}

TEST_CASE("ranks: another number of processes than --tp and variables that name no host are refused") {
  const std::vector<std::string> argv = command("fnx-generate", {"--tp", "4", "--prompt", "a"});
  const RunResult other = run_command(argv, "", torchrun_variables(0, some_port()));
  CHECK(other.exit_code == 2);
  CHECK(other.err.find("--tp 4: torchrun started 2 processes") != std::string::npos);
  const RunResult nowhere = run_command(argv, "", {"SLURM_PROCID=0", "SLURM_NTASKS=4", "SLURM_NNODES=2"});
  CHECK(nowhere.exit_code == 2);
  CHECK(nowhere.err.find("MASTER_ADDR") != std::string::npos);
}

TEST_CASE("ranks: a host that does not start them all refuses, with a receipt") {
  const std::string line = "ulimit -n 8; exec \"$0\" --model " + kTiny + " --backend cpu --prompt a --tp 8";
  const RunResult run = run_command({"/bin/sh", "-c", line, tool_path("fnx-generate")});
  CHECK(run.exit_code == 4);
  CHECK(run.err.starts_with("fnx-generate: error: starting ranks"));
  CHECK(run.err.ends_with("lower --tp\n"));
  CHECK(std::count(run.err.begin(), run.err.end(), '\n') == 1);
  CHECK(read_receipt(run, "fnx-generate")["run"]["exit_code"] == 4);
}

TEST_CASE("tp-parity: more sequences than a round may have are refused before they are made up") {
  const RunResult run = parity({"--sequences", "4097"});
  CHECK(run.exit_code == 2);
  CHECK(run.err.find("--sequences 4097: give 1 to 4096") != std::string::npos);
}
