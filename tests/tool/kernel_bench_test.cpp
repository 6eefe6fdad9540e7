#include <doctest/doctest.h>

#include "tests/support/run_tool.h"

using fnx::read_receipt, fnx::run_command, fnx::tool_path;

TEST_CASE("fnx-kernel-bench: exits 4 with the reason in the receipt when there is no such device") {
  const fnx::RunResult run = run_command({tool_path("fnx-kernel-bench"), "--device", "4096"});
  CHECK(run.exit_code == 4);
  CHECK(run.out.empty());
  const fnx::Json receipt = read_receipt(run, "fnx-kernel-bench");
  CHECK(receipt["run"]["exit_code"] == 4);
  CHECK(receipt["run"]["error"].get<std::string>().find("cuda") != std::string::npos);
}

TEST_CASE("fnx-kernel-bench: exits 2 naming the entry when a list is wrong") {
  const auto code = [](std::vector<std::string> options, const std::string& named) {
    options.insert(options.begin(), tool_path("fnx-kernel-bench"));
    const fnx::RunResult run = run_command(options);
    CHECK(run.err.find(named) != std::string::npos);
    return run.exit_code;
  };
  CHECK(code({"--matrices", "2560x100"}, "2560x100") == 2);
  CHECK(code({"--bits", "4,9"}, "9") == 2);
  CHECK(code({"--bits", "2.5", "--codebook", "mcg"}, "2.5") == 2);
  CHECK(code({"--rows", "0"}, "--rows") == 2);
  CHECK(code({"operation/hc_mixer"}, "operation/hc_mixer") == 2);
  CHECK(code({"operation/hc_mix", "--rows", "64"}, "operation/hc_mix") == 2);
}
