// Keys and values in host memory, as a user runs them: fnx-generate and fnx-capacity on the cpu backend.
#include <doctest/doctest.h>

#include <set>

#include "kernels/devices.h"
#include "tests/support/run_tool.h"

using namespace fnx;

namespace {

const std::string kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";

RunResult capacity(const std::string& model, std::vector<std::string> more) {
  more.insert(more.begin(), {tool_path("fnx-capacity"), "--model", model, "--backend", "cpu", "--sequences", "2",
                             "--rounds", "3", "--chunk-rows", "90"});
  return run_command(more);
}

Json gates_by_name(const Json& receipt) {
  Json out;
  for (const Json& g : receipt["gates"]) out[g["name"].get<std::string>()] = g["outcome"];
  return out;
}

}  // namespace

TEST_CASE("pages tool: --kv-device-tokens changes what is moved and not the answer") {
  const auto generate = [](std::vector<std::string> more) {
    more.insert(more.begin(),
                {tool_path("fnx-generate"), "--model", kTiny, "--backend", "cpu", "--ignore-eos", "--max-tokens", "8",
                 "--draft", "off", "--chunk-rows", "100", "--prompt-tokens", "330", "-q"});
    return run_command(more);
  };
  const RunResult resident = generate({}), tiered = generate({"--kv-device-tokens", "128"});
  CAPTURE(tiered.err);
  REQUIRE(resident.exit_code == 0);
  REQUIRE(tiered.exit_code == 0);
  CHECK(tiered.out == resident.out);
  const Json a = read_receipt(resident, "fnx-generate"), b = read_receipt(tiered, "fnx-generate");
  CHECK(a["result_digest"] == b["result_digest"]);
  CHECK(!a["evidence"].contains("kv_pages"));
  const Json pages = b["evidence"]["kv_pages"];
  CHECK(pages["on_device"] == 2);
  CHECK(pages["spilled"].get<int64_t>() + pages["never_on_device"].get<int64_t>() == pages["freed_in_host"]);
  CHECK(pages["staged"] > 0);
  CHECK(pages["rows_in_place"] >= 7);
  for (const char* tokens : {"0", "-1", "few"}) CHECK(generate({"--kv-device-tokens", tokens}).exit_code == 2);
}

TEST_CASE("capacity: pages in host memory give the run of resident ones, and facts are asked for") {
  const RunResult run = capacity(kTiny, {"--tokens", "400", "--points", "200", "--kv-device-tokens", "128", "--needles",
                                         "2", "--gate", "decode_ratio>0", "--gate", "recall>=0"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-capacity");
  const Json gates = gates_by_name(receipt);
  for (const char* what : {"resident/different_tokens", "resident/different_logits", "resident/different_states",
                           "decode_ratio", "recall"})
    CHECK(gates[what] == "pass");
  CHECK(receipt["result"]["needles"].size() == 4);
  std::set<std::string> expected;
  for (const Json& n : receipt["result"]["needles"]) expected.insert(n["expected"].get<std::string>());
  CHECK(expected.size() == 4);
  CHECK(receipt["evidence"]["kv_pages"]["spilled"] > 0);
  CHECK(receipt["evidence"]["peak_memory"][0]["host_bytes"] > 0);
  CHECK(receipt["effective"]["points"]["value"] == Json({200, 400}));
}

TEST_CASE("capacity: made-up ids have no facts, resident pages nothing to compare with, and a missed limit is exit 1") {
  const RunResult run = capacity("synth:tiny,layers=4,experts=8", {"--tokens", "150", "--gate", "decode_ratio>=1000"});
  CAPTURE(run.err);
  CHECK(run.exit_code == 1);
  const Json receipt = read_receipt(run, "fnx-capacity");
  CHECK(gates_by_name(receipt)["decode_ratio"] == "fail");
  CHECK(!receipt["result"].contains("needles"));
  std::set<std::string> not_run;
  for (const Json& n : receipt["not_run"]) not_run.insert(n["what"].get<std::string>());
  CHECK(not_run.count("recall") == 1);
  CHECK(not_run.count("the same with all keys and values on the device") == 1);
}

TEST_CASE("capacity: two ranks give the tokens and logits of one, and say what each of them took") {
  const auto digest = [](const char* ranks, size_t peaks) {
    const RunResult run = capacity(kTiny, {"--tokens", "200", "--points", "100", "--kv-device-tokens", "128",
                                           "--needles", "1", "--threads", "1", "--tp", ranks});
    CAPTURE(run.err);
    REQUIRE(run.exit_code == 0);
    const Json receipt = read_receipt(run, "fnx-capacity");
    CHECK(receipt["evidence"]["peak_memory"].size() == peaks);
    CHECK(gates_by_name(receipt)["resident/different_states"] == "pass");
    return receipt["result_digest"];
  };
  CHECK(digest("2", 2) == digest("1", 1));
}

TEST_CASE("capacity: contexts, points and gates that cannot be are refused") {
  CHECK(capacity(kTiny, {"--tokens", "8192"}).err.find("--needles") != std::string::npos);  // no room to ask
  CHECK(capacity(kTiny, {"--tokens", "400", "--points", "399"}).exit_code == 2);
  CHECK(capacity(kTiny, {"--tokens", "400", "--points", "500"}).exit_code == 2);
  CHECK(capacity(kTiny, {"--tokens", "400", "--needles", "500"}).exit_code == 2);
  CHECK(capacity("synth:tiny,layers=4,experts=8", {"--tokens", "150", "--gate", "recall>=1"}).exit_code == 2);
  const RunResult many = run_command({tool_path("fnx-capacity"), "--model", kTiny, "--sequences", "4097"});
  CHECK(many.exit_code == 2);
  CHECK(many.err.find("4096") != std::string::npos);
}

TEST_CASE("capacity: a plan that does not fit is refused with its numbers and the option that helps") {
  if (cuda_runtime_version() == "none") return;  // there is no backend to plan for
  const auto plan = [](std::vector<std::string> more) {
    more.insert(more.end(), {"--memory-plan", "--tokens", "8000", "--points", "4000"});
    return capacity(kTiny, more);
  };
  const RunResult tiered = plan({"--vram-limit", "144MiB", "--kv-device-tokens", "256"});
  CAPTURE(tiered.err);
  CHECK(tiered.exit_code == 0);
  CHECK(tiered.out.find("older keys and values") != std::string::npos);
  const RunResult resident = plan({"--vram-limit", "144MiB", "--kv-device-tokens", "16000"});
  CAPTURE(resident.err);
  CHECK(resident.exit_code == 4);
  for (const char* words : {"150994944", "the largest term is states and KV pages", "--kv-device-tokens"})
    CHECK(resident.err.find(words) != std::string::npos);
}
