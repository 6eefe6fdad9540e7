// The options that every tool with a model shares, through every such tool: one that is offered acts, or is refused.
#include <doctest/doctest.h>

#include <functional>
#include <map>

#include "kernels/devices.h"
#include "tests/support/golden.h"
#include "tests/support/raw_norms.h"
#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct Tool {
  std::string name;
  std::vector<std::string> work, endless;  // little, and more than a second's
  bool graph = true, both = false, ranks = false;
};

const std::vector<Tool> kTools = {
    {"fnx-generate",
     {"--token-ids", "1,2,3", "--max-tokens", "6", "--ignore-eos"},
     {"--token-ids", "1,2,3", "--max-tokens", "8000", "--ignore-eos"},
     true,
     false,
     true},
    {"fnx-graph-ab",
     {"--sequences", "1", "--cells", "decode", "--context", "4", "--rounds", "5", "--pairs", "1", "--warmup", "0"},
     {"--sequences", "1", "--rounds", "8000"},
     false,
     true,
     true},
    {"fnx-pool-ab",
     {"--prompt-tokens", "6", "--rounds", "5", "--train-rounds", "2", "--pairs", "1", "--expert-lines", "3"},
     {"--expert-lines", "3", "--rounds", "4000", "--pairs", "1000"}},
    {"fnx-draft-ab",
     {"--sequences", "1", "--sampling", "greedy", "--max-tokens", "8", "--pairs", "1", "--warmup", "0"},
     {"--pairs", "1000"}},
    {"fnx-reuse-check", {"--history", "40", "--max-tokens", "5"}, {"--history", "8000"}},
    {"fnx-capacity",
     {"--sequences", "1", "--tokens", "40", "--rounds", "3"},
     {"--tokens", "8000", "--chunk-rows", "64"},
     true,
     false,
     true},
    {"fnx-prefill-sweep",
     {"--lengths", "8", "--chunk-rows", "4", "--repeat", "1"},
     {"--lengths", "8000", "--repeat", "1000"},
     false},
    {"fnx-tp-parity",
     {"--context", "6", "--rounds", "5", "--sequences", "1", "--modes", "greedy"},
     {"--rounds", "4000", "--pairs", "1000"},
     true,
     false,
     true},
    {"fnx-round-profile",
     {"--context", "6", "--rounds", "5", "--repeat", "1"},
     {"--context", "6000", "--chunk-rows", "64", "--rounds", "1000"},
     false,
     true}};

const std::string kModel = "synth:tiny,layers=2,experts=8";

RunResult run(const Tool& tool, std::vector<std::string> more, const std::string& model = kModel,
              const std::string& backend = "cpu") {
  std::vector<std::string> words = {tool_path(tool.name), "--model", model, "--backend", backend, "-q"};
  words.insert(words.end(), tool.work.begin(), tool.work.end());
  words.insert(words.end(), more.begin(), more.end());
  return run_command(words);
}

// Every object of a receipt that has the key.
void each_with(const Json& j, const std::string& key, const std::function<void(const Json&)>& f) {
  if (j.is_object() && j.contains(key)) f(j);
  if (j.is_structured())
    for (const Json& part : j) each_with(part, key, f);
}

}  // namespace

TEST_CASE("model options: lines, planner and checks act when given to any tool") {
  for (const Tool& tool : kTools) {
    CAPTURE(tool.name);
    std::vector<std::string> more{"--planner", "device", "--check-lines"};
    if (tool.name != "fnx-pool-ab") more.insert(more.end(), {"--expert-lines", "3"});
    const RunResult done = run(tool, more);
    CAPTURE(done.err);
    CHECK(done.exit_code == 0);
    const Json receipt = read_receipt(done, tool.name);
    CHECK(receipt["effective"]["expert_lines"]["value"] == 3);
    CHECK(receipt["effective"]["planner"] == Json{{"value", "device"}, {"source", "flag"}});
    int pools = 0;
    each_with(receipt["evidence"], "checked_lines", [&](const Json& p) {
      ++pools;
      CHECK(p["lines"] == 3);
      CHECK(p["planner"] == "device");
      CHECK(p["checked_lines"] == true);
      CHECK(p["touches"] > 0);
    });
    CHECK(pools >= 1);
  }
}

TEST_CASE("model options: the memory plan is printed and nothing is loaded when any tool is asked for it") {
  for (const Tool& tool : kTools) {
    CAPTURE(tool.name);
    const RunResult done = run(tool, {"--memory-plan"});
    CAPTURE(done.err);
    const Json receipt = read_receipt(done, tool.name);
    CHECK(receipt["measurements"].empty());
    const bool none = cuda_runtime_version() == "none";  // then there is no backend to plan for
    CHECK(done.exit_code == (none ? 4 : 0));
    CHECK(receipt["effective"].contains("memory_plan") == !none);
    CHECK((done.out.find("weights") != std::string::npos) == !none);
  }
}

TEST_CASE("model options: norms around 1 are refused by every tool, and taken when accepted") {
  const TempDir dir;
  const std::string model = (dir / "raw").string();
  REQUIRE(run_command({tool_path("fnx-synth"), "--model", kModel, "--out", model}).exit_code == 0);
  add_one_to_norms(model, [](const std::string&) { return true; });
  for (const Tool& tool : kTools) {
    CAPTURE(tool.name);
    const RunResult refused = run(tool, {}, model);
    CHECK(refused.exit_code == 3);
    CHECK(refused.err.find("--accept-raw-norms") != std::string::npos);
    CHECK(run(tool, {"--accept-raw-norms"}, model).exit_code == 0);
  }
}

TEST_CASE("model options: what a tool or the cpu backend cannot do is refused when it is asked for") {
  for (const Tool& tool : kTools) {
    CAPTURE(tool.name);
    CHECK(run(tool, {"--vram-limit", "much"}).exit_code == 2);
    CHECK(run(tool, {"--planner", "best"}).exit_code == 2);
    CHECK(run(tool, {"--graph", "on"}).exit_code == (tool.graph ? 4 : 2));
    CHECK(run(tool, {"--inject-capture-failure", "1"}).exit_code == (tool.graph || tool.both ? 4 : 2));
    if (!tool.ranks) CHECK(run(tool, {"--tp", "2"}).exit_code == 4);
    if (tool.name != "fnx-pool-ab") CHECK(run(tool, {"--expert-lines", "9"}).exit_code == 2);
  }
}

TEST_CASE("model options: a sequence of one token more than the model's context is refused by every tool, with both") {
  struct Length {
    std::string option;
    int64_t most;  // of that option, with what the tool adds to it, in a context of 8192
    std::vector<std::string> more;
  };
  const std::map<std::string, Length> lengths = {
      {"fnx-generate", {"--prompt-tokens", 8191, {}}},
      {"fnx-graph-ab", {"--context", 8192 - 32, {}}},
      {"fnx-pool-ab", {"--prompt-tokens", 8192 - 128, {"--expert-lines", "3"}}},
      {"fnx-draft-ab", {"--max-tokens", 8192 - 64, {}}},
      {"fnx-reuse-check", {"--history", 8192 - 31, {}}},
      {"fnx-capacity", {"--tokens", 8192, {}}},
      {"fnx-prefill-sweep", {"--lengths", 8192, {}}},
      {"fnx-tp-parity", {"--context", 8192 - 16, {}}},
      {"fnx-round-profile", {"--context", 8192 - 30, {}}},
      {"fnx-inspect", {"--context", 8192, {"--plan"}}}};
  for (const Tool& tool : kTools) REQUIRE(lengths.count(tool.name) == 1);
  for (const auto& [name, length] : lengths) {
    CAPTURE(name);
    const auto with = [&](int64_t value) {
      std::vector<std::string> words = {tool_path(name), "--model", kModel, length.option, std::to_string(value)};
      words.insert(words.end(), length.more.begin(), length.more.end());
      if (name != "fnx-inspect") words.insert(words.end(), {"--backend", "cpu", "--memory-plan"});
      return run_command(words);
    };
    const RunResult most = with(length.most), over = with(length.most + 1);
    CAPTURE(most.err);
    CAPTURE(over.err);
    const bool plans = name == "fnx-inspect" || cuda_runtime_version() != "none";
    CHECK(most.exit_code == (plans ? 0 : 4));
    CHECK(over.exit_code == 3);
    CHECK(over.err.find("8193 tokens, the model's context holds 8192; reduce ") != std::string::npos);
  }
}

TEST_CASE("model options: every tool ends with code 130 and its receipt soon after an interrupt") {
  for (const Tool& tool : kTools) {
    CAPTURE(tool.name);
    // Killed if it is still there after 15 seconds.
    std::vector<std::string> words = {
        "/usr/bin/timeout",   "--foreground", "--preserve-status", "-s",        "INT", "-k", "15", "1.5",
        tool_path(tool.name), "--model",      "synth:tiny",        "--backend", "cpu", "-q"};
    words.insert(words.end(), tool.endless.begin(), tool.endless.end());
    const RunResult done = run_command(words);
    CHECK(done.exit_code == 130);
    const Json receipt = read_receipt(done, tool.name);
    CHECK(receipt["run"]["outcome"] == "interrupted");
    CHECK(receipt["run"]["exit_code"] == 130);
  }
}

TEST_CASE("model options: a receipt says whether rounds are recorded when the tool chooses, and which arms when not") {
  for (const Tool& tool : kTools) {
    CAPTURE(tool.name);
    const RunResult done = run(tool, {});
    CAPTURE(done.err);
    CHECK(done.exit_code == 0);
    const Json effective = read_receipt(done, tool.name)["effective"];
    CHECK(effective.contains("graph") == tool.graph);
    if (tool.graph) CHECK(effective["graph"]["value"] == "off");
    if (tool.both) CHECK(effective["arms"]["value"].size() == 2);
  }
}

TEST_CASE("model options: recordings fail as injected in every tool that records, on a GPU") {
  if (no_gpu()) return;
  for (const Tool& tool : kTools) {
    if (!(tool.graph || tool.both) || tool.name == "fnx-tp-parity") continue;  // that one needs two
    CAPTURE(tool.name);
    const RunResult done = run(tool, {"--inject-capture-failure", "1"}, kModel, "cuda");
    CAPTURE(done.err);
    int64_t failed = 0;
    each_with(read_receipt(done, tool.name)["evidence"], "failed",
              [&](const Json& graphs) { failed += graphs["failed"].get<int64_t>(); });
    CHECK(failed >= 1);
  }
}

TEST_CASE("model options: rounds planned on the host are not recorded, and the receipt says so, on a GPU") {
  if (no_gpu()) return;
  for (const Tool& tool : kTools) {
    if (!(tool.graph || tool.both) || tool.name == "fnx-tp-parity") continue;  // that one needs two
    CAPTURE(tool.name);
    std::vector<std::string> more{"--planner", "host"};
    if (tool.name != "fnx-pool-ab") more.insert(more.end(), {"--expert-lines", "3"});
    const Json receipt = read_receipt(run(tool, more, kModel, "cuda"), tool.name);
    CHECK(receipt["effective"].contains("graph") == tool.graph);
    if (tool.graph) CHECK(receipt["effective"]["graph"]["value"] == "off");
    CHECK((receipt["not_run"].dump().find("recorded rounds") != std::string::npos) == tool.both);
  }
}

TEST_CASE("pool-ab: a planner beside a comparison of planners is refused") {
  for (const char* compare : {"planner", "ahead"}) {
    const RunResult done = run(kTools[2], {"--planner", "host", "--compare", compare});
    CHECK(done.exit_code == 2);
    CHECK(done.err.find("leave it out") != std::string::npos);
  }
}
