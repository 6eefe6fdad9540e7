// Experts in host memory, as a user runs them.
#include <doctest/doctest.h>

#include <fmt/format.h>

#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

const std::string kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";

RunResult generate(std::vector<std::string> more) {
  more.insert(more.begin(), {tool_path("fnx-generate"), "--model", kTiny, "--backend", "cpu", "--ignore-eos",
                             "--max-tokens", "12", "--draft", "off", "--prompt", "In the beginning God created", "-q"});
  return run_command(more);
}

uint64_t bytes_by_cause(const Json& pools) {
  uint64_t bytes = 0;
  for (const char* cause : {"demand", "initial_prefetch", "cross_layer_prefetch", "warm_start"})
    bytes += pools[cause]["bytes"].get<uint64_t>();
  return bytes;
}

}  // namespace

TEST_CASE("offload tool: --expert-lines and a profile change what is copied and not the answer") {
  const TempDir dir;
  const RunResult resident = generate({});
  REQUIRE(resident.exit_code == 0);
  const std::string digest = read_receipt(resident, "fnx-generate")["result_digest"];
  for (const bool warm : {false, true}) {
    const RunResult run = generate({"--expert-lines", "6", "--check-lines", "--profile-dir", (dir / "p").string()});
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    CHECK(run.out == resident.out);
    const Json receipt = read_receipt(run, "fnx-generate");
    CHECK(receipt["result_digest"] == digest);
    const Json pools = receipt["evidence"]["expert_pools"];
    CHECK(pools["lines"] == 6);
    CHECK(pools["touches"] == pools["hits"].get<uint64_t>() + pools["misses"].get<uint64_t>());
    CHECK(pools["copied_bytes"] == bytes_by_cause(pools));
    CHECK(pools["warm_start"]["copies"] == (warm ? 8 * 6 : 0));
    CHECK(receipt["evidence"]["profile_earlier_runs"] == (warm ? 1 : 0));
  }
}

TEST_CASE("offload tool: lines that a layer cannot have are refused by number") {
  for (const char* lines : {"0", "33", "-1", "many"}) {
    const RunResult run = generate({"--expert-lines", lines});
    CAPTURE(run.err);
    CHECK(run.exit_code == 2);
    CHECK(run.out == "");
  }
}

TEST_CASE("pool-ab: warm and cold pools give equal tokens, and warm ones miss less") {
  const RunResult run = run_command({tool_path("fnx-pool-ab"), "--model", kTiny, "--backend", "cpu", "--expert-lines",
                                     "12", "--rounds", "6", "--prompt-tokens", "12", "--train-rounds", "24", "-q"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-pool-ab");
  const Json& e = receipt["evidence"];
  CHECK(e["warm"]["misses"] < e["cold"]["misses"]);
  // Lines of all layers, before each of four timed runs and the one whose logits are hashed.
  CHECK(e["expert_pools"]["warm_start"]["copies"] == (4 + 1) * 8 * 12);
  CHECK(e["expert_pools"]["copied_bytes"] == bytes_by_cause(e["expert_pools"]));
}

TEST_CASE("pool-ab: says what of a round waited for the link, came ahead and came in vain") {
  const RunResult run =
      run_command({tool_path("fnx-pool-ab"), "--model", kTiny, "--backend", "cpu", "--expert-lines", "12", "--rounds",
                   "6", "--prompt-tokens", "12", "--train-rounds", "6", "--compare", "ahead"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-pool-ab");
  const Json& e = receipt["evidence"];
  for (const char* arm : {"device", "ahead"}) {
    CAPTURE(arm);
    const double late = e[arm]["round_late_bytes"], ahead = e[arm]["round_foreseen_bytes"];
    CHECK(late + ahead == doctest::Approx(e[arm]["round_link_bytes"].get<double>()));
    CHECK(e[arm]["round_late_link_ns"] < e[arm]["round_link_ns"].get<double>() * 1.0001);
    CHECK(run.out.find(std::string(arm) + ": ") != std::string::npos);
  }
  CHECK(e["device"]["round_foreseen_bytes"] == 0);
  CHECK(e["device"]["round_vain_bytes"] == 0);
  CHECK(e["ahead"]["round_foreseen_bytes"] > 0);
  CHECK(e["ahead"]["round_vain_bytes"] > 0);
}

TEST_CASE("pool-ab: a model whose experts all fit is refused, for there is nothing to compare") {
  const RunResult run = run_command({tool_path("fnx-pool-ab"), "--model", kTiny, "--backend", "cpu"});
  CHECK(run.exit_code == 4);
  CHECK(run.err.find("--expert-lines") != std::string::npos);
}
