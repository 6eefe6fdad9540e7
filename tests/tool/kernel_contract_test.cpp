#include <doctest/doctest.h>

#include "kernels/contract/device.h"
#include "tests/support/run_tool.h"

using namespace fnx;

namespace {

RunResult run_contract_tool(std::vector<std::string> words, const std::vector<std::string>& env = {}) {
  words.insert(words.begin(), tool_path("fnx-kernel-contract"));
  return run_command(words, "", env);
}

std::string last_line(const std::string& text) {
  const size_t end = text.find_last_not_of('\n');
  return end == std::string::npos ? "" : text.substr(text.rfind('\n', end) + 1, end - text.rfind('\n', end));
}

}  // namespace

TEST_CASE("fnx-kernel-contract: lists records when asked") {
  const RunResult run = run_contract_tool({"--list"});
  CHECK(run.exit_code == 0);
  CHECK(run.out.find("exl3_linear ") != std::string::npos);
  CHECK(run.out.find("  sums     ") != std::string::npos);
}

TEST_CASE("fnx-kernel-contract: exits 4 after a sound host side when no device is present") {
  if (contract::device_present()) return;
  const RunResult run = run_contract_tool({"combine"});
  CHECK(run.exit_code == 4);
  CHECK(last_line(run.out).starts_with("0/1 kernels pass gates 1-4, "));
  CHECK(last_line(run.out).ends_with(" controls red, 0 limit problems"));
  const Json receipt = read_receipt(run, "fnx-kernel-contract");
  CHECK(receipt["effective"]["implementation"]["value"] == "host");
  CHECK(receipt["not_run"][0]["what"] == "gates 1 to 4 on a device");
  CHECK(receipt["result"]["kernels"][0]["gates"][0]["outcome"] == "not run");
  CHECK(receipt["result"]["kernels"][0]["gates"][1]["outcome"] == "pass");
  CHECK(receipt["result"]["kernels"][0]["controls"].size() > 10);
  CHECK(receipt["run"]["exit_code"] == 4);
}

TEST_CASE("fnx-kernel-contract: fails and says not completed when the time cap is hit") {
  const RunResult run = run_contract_tool({"exl3_linear", "--time-cap", "0.001"});
  CHECK(run.exit_code == 1);
  CHECK(run.out.find("not completed") != std::string::npos);
  const Json receipt = read_receipt(run, "fnx-kernel-contract");
  CHECK(receipt["gates"][0]["name"] == "completed");
  CHECK(receipt["gates"][0]["outcome"] == "fail");
}

TEST_CASE("fnx-kernel-contract: refuses gates and kernels that do not exist") {
  CHECK(run_contract_tool({"--gates", "5"}).exit_code == 2);
  CHECK(run_contract_tool({"no_such_kernel"}).exit_code == 2);
  CHECK(run_contract_tool({"combine", "--qualify"}).exit_code == 2);
  CHECK(run_contract_tool({"--time-cap", "-1"}).exit_code == 2);
}
