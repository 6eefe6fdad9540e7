// fnx-synth, and synthetic models in the tools that run one or cannot.
#include <doctest/doctest.h>

#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;
namespace fs = std::filesystem;

namespace {

RunResult synth(std::vector<std::string> more) {
  more.insert(more.begin(), tool_path("fnx-synth"));
  return run_command(more);
}

size_t entries(const fs::path& folder) {
  return static_cast<size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

}  // namespace

TEST_CASE("synth: a written pack passes inspection and generates what the synthetic model does") {
  const TempDir dir;
  const std::string spec = "synth:tiny,layers=2,experts=8";
  const RunResult made = synth({"--model", spec, "--out", (dir / "pack").string()});
  REQUIRE(made.exit_code == 0);
  const Json receipt = read_receipt(made, "fnx-synth");
  CHECK(receipt["subjects"][0]["name"] == "synth:tiny,seed=0,bits=3,layers=2,experts=8,skew=0");
  CHECK(receipt["subjects"][0]["fingerprint"]["kind"] == "synthetic");
  CHECK(receipt["evidence"]["data_bytes_written"] == receipt["result"]["bytes"]);
  CHECK(entries(dir.path()) == 1);
  CHECK(run_command({tool_path("fnx-inspect"), "--model", (dir / "pack").string()}).exit_code == 0);

  const auto generate = [&](const std::string& model) {
    return run_command({tool_path("fnx-generate"), "--model", model, "--prompt-tokens", "40", "--max-tokens", "8"});
  };
  const RunResult direct = generate(spec), folder = generate((dir / "pack").string());
  CHECK(direct.exit_code == 0);
  CHECK(direct.out == folder.out);
  const Json a = read_receipt(direct, "fnx-generate"), b = read_receipt(folder, "fnx-generate");
  CHECK(a["result_digest"] == b["result_digest"]);
  CHECK(a["subjects"][0]["fingerprint"] == receipt["subjects"][0]["fingerprint"]);
  CHECK(b["subjects"][0]["fingerprint"]["kind"] == "advisory");
  CHECK(a["not_run"][0]["what"] == "text");
}

TEST_CASE("synth: refuses what it cannot write and leaves nothing behind") {
  const TempDir dir;
  CHECK(synth({"--model", "fixtures", "--out", (dir / "a").string()}).exit_code == 2);
  CHECK(synth({"--model", "synth:tiny"}).exit_code == 2);
  CHECK(synth({"--model", "synth:tiny,bits=9", "--out", (dir / "a").string()}).exit_code == 2);
  write_file(dir / "full", "x");
  const RunResult there = synth({"--model", "synth:tiny,layers=1", "--out", (dir / "full").string()});
  CHECK(there.exit_code == 6);
  CHECK(there.out.empty());
  CHECK(there.err.find("exists and is no empty folder") != std::string::npos);
  // No disk of a test machine holds this one.
  const RunResult large =
      synth({"--model", "synth:flash-next-4.05bpw,layers=256,experts=1024", "--out", (dir / "a").string()});
  CHECK(large.exit_code == 6);
  CHECK(large.err.find("--sparse") != std::string::npos);
  CHECK(entries(dir.path()) == 1);
  const RunResult dry = synth({"--model", "synth:tiny", "--dry-run"});
  CHECK(dry.exit_code == 0);
  CHECK(dry.out.find("3866 tensors") != std::string::npos);
}

TEST_CASE("synth: tools that need files refuse a synthetic model and say how to get them") {
  for (const char* tool : {"fnx-inspect", "fnx-fingerprint", "fnx-tokenize"}) {
    CAPTURE(tool);
    const RunResult run = run_command({tool_path(tool), "--model", "synth:tiny"});
    CHECK(run.exit_code == 2);
    CHECK(run.err.find("fnx-synth --model synth:tiny --out DIR") != std::string::npos);
  }
  const RunResult text = run_command({tool_path("fnx-generate"), "--model", "synth:tiny", "--prompt", "hello"});
  CHECK(text.exit_code == 3);
  CHECK(text.err.find("--prompt-tokens") != std::string::npos);
}
