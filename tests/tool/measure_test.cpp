// fnx-prefill-sweep, fnx-graph-ab, fnx-draft-ab and fnx-reuse-check on small models of the cpu backend.
#include <doctest/doctest.h>

#include <fstream>
#include <sstream>

#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

const std::string kModel = "synth:tiny,layers=2,experts=8";

RunResult tool(const std::string& name, std::vector<std::string> more) {
  more.insert(more.begin(), {tool_path(name), "--model", kModel, "--backend", "cpu"});
  return run_command(more);
}

const Json& named(const Json& list, const std::string& name) {
  for (const Json& entry : list)
    if (entry["name"] == name) return entry;
  FAIL("nothing is named " << name);
  return list;
}

}  // namespace

TEST_CASE("prefill-sweep: all chunk sizes of a length agree, and receipt and CSV hold every run") {
  const RunResult run = tool("fnx-prefill-sweep", {"--lengths", "16-64*2", "--chunk-rows", "5,16,64", "--repeat", "2"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-prefill-sweep");
  REQUIRE(receipt["result"]["lengths"].size() == 3);
  // Chunks beyond the length are the length itself.
  CHECK(receipt["result"]["lengths"][0]["logits_hash_by_chunk"].size() == 2);
  const Json& last = receipt["result"]["lengths"][2]["logits_hash_by_chunk"];
  REQUIRE(last.size() == 3);
  CHECK(last["5"] == last["64"]);
  CHECK(last["5"] != receipt["result"]["lengths"][0]["logits_hash_by_chunk"]["5"]);
  CHECK(named(receipt["gates"], "tokens64/different_logits")["outcome"] == "pass");
  size_t cold = 0, warm = 0;
  for (const Json& series : receipt["measurements"]) {
    if (series["name"] != "tokens32/chunk16/ttft_ns") continue;
    (series["phase"] == "cold" ? cold : warm) += series["samples"].size();
  }
  CHECK(cold == 1);
  CHECK(warm == 2);
  std::ifstream csv(run.receipt_dir + "/fnx-prefill-sweep.receipt.csv");
  std::stringstream text;
  text << csv.rdbuf();
  const std::string lines = text.str();
  CHECK(std::count(lines.begin(), lines.end(), '\n') == 1 + 8 * 3);
  CHECK(lines.find("\n64,5,cold,") != std::string::npos);
  CHECK(lines.find(last["5"].get<std::string>()) != std::string::npos);
}

TEST_CASE("prefill-sweep: a receipt that has the CSV's name is refused") {
  const TempDir folder;
  const RunResult run = tool("fnx-prefill-sweep", {"--lengths", "4", "--receipt", (folder / "sweep.csv").string()});
  CHECK(run.exit_code == 2);
  CHECK(run.err.find("the CSV beside it would replace the receipt") != std::string::npos);
}

TEST_CASE("prefill-sweep: no CSV is left beside a receipt that goes to a device") {
  const TempDir folder;
  std::filesystem::create_symlink("/dev/null", folder / "receipt.json");
  const std::string receipt = (folder / "receipt.json").string();
  const RunResult run =
      tool("fnx-prefill-sweep", {"--lengths", "4", "--chunk-rows", "4", "--repeat", "1", "--receipt", receipt});
  CHECK(run.exit_code == 0);
  CHECK_FALSE(std::filesystem::exists(folder / "receipt.csv"));
}

TEST_CASE("prefill-sweep: a limit that is missed ends with exit code 1, and a dry run computes nothing") {
  const RunResult slow = tool(
      "fnx-prefill-sweep", {"--lengths", "16", "--chunk-rows", "8,16", "--repeat", "1", "--gate", "rows_per_s>=1e12"});
  CHECK(slow.exit_code == 1);
  const Json receipt = read_receipt(slow, "fnx-prefill-sweep");
  CHECK(receipt["run"]["outcome"] == "failed");
  CHECK(named(receipt["gates"], "tokens16/chunk8/rows_per_s")["outcome"] == "fail");
  const RunResult dry = tool("fnx-prefill-sweep", {"--lengths", "16", "--chunk-rows", "8,16,32", "--dry-run"});
  CHECK(dry.exit_code == 0);
  CHECK(dry.out.find("2 cells, 160 prompt rows\n") != std::string::npos);
  CHECK(read_receipt(dry, "fnx-prefill-sweep")["measurements"].empty());
  CHECK(tool("fnx-prefill-sweep", {"--lengths", "0"}).exit_code == 2);
  CHECK(tool("fnx-prefill-sweep", {"--lengths", "16", "--chunk-rows", "0"}).exit_code == 2);
  CHECK(tool("fnx-prefill-sweep", {"--gate", "speed>=1"}).exit_code == 2);
  const RunResult csv =
      tool("fnx-prefill-sweep", {"--lengths", "8", "--chunk-rows", "8", "--repeat", "1", "--format", "csv"});
  CHECK(csv.out.find("8,8,warm,") != std::string::npos);
}

TEST_CASE("graph-ab: both arms agree on the cpu backend, and graphs are said not to apply there") {
  const RunResult run =
      tool("fnx-graph-ab", {"--sequences", "1,3", "--context", "8", "--rounds", "3", "--prompt-tokens", "24",
                            "--chunk-rows", "10", "--read-gbps", "10", "--decode-gvps", "1", "--gate", "ratio>=1.8",
                            "--gate", "decode/c1/floor_fraction>=1e-9"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-graph-ab");
  REQUIRE(receipt["result"]["cells"].size() == 4);
  for (const Json& cell : receipt["result"]["cells"]) {
    CHECK(cell["comparison"] == "equal");
    CHECK(cell["off"] == cell["on"]);
  }
  CHECK(receipt["result"]["cells"][1]["cell"] == "decode/c3");
  CHECK(receipt["result"]["cells"][0]["off"] != receipt["result"]["cells"][1]["off"]);
  CHECK(named(receipt["gates"], "decode/c3/different_rounds")["outcome"] == "pass");
  const Json& ratio = named(receipt["gates"], "decode/c1/ratio");
  CHECK(ratio["outcome"] == "not_run");
  CHECK(ratio["reason"].get<std::string>().find("not applicable: the cpu backend") == 0);
  CHECK(named(receipt["gates"], "decode/c1/floor_fraction")["outcome"] == "pass");
  CHECK(named(receipt["measurements"], "decode/c3/on_ns")["samples"].size() == 4);
  CHECK(named(receipt["measurements"], "decode/c3/off_round_ns")["samples"].size() == 12);
  CHECK(named(receipt["measurements"], "prefill/c1/ratio")["samples"].size() == 4);
  CHECK(receipt["evidence"]["decode/c1"]["on"]["replays"] == 0);
  CHECK(receipt["evidence"]["decode/c1"]["ratio_interval"].size() == 2);
  CHECK(receipt["evidence"]["decode/c1"]["floor"]["trellis_values"].get<double>() > 1e6);
}

TEST_CASE(
    "graph-ab: fewer than four pairs claim nothing, a missed limit is exit code 1, and wrong options are refused") {
  const std::vector<std::string> small = {"--sequences", "1", "--cells", "decode", "--context", "4", "--rounds", "2"};
  const auto with = [&](std::vector<std::string> more) {
    more.insert(more.begin(), small.begin(), small.end());
    return tool("fnx-graph-ab", more);
  };
  const RunResult few = with({"--pairs", "2"});
  CHECK(few.exit_code == 0);
  CHECK(few.out.find("too few pairs") != std::string::npos);
  CHECK_FALSE(read_receipt(few, "fnx-graph-ab")["evidence"]["decode/c1"].contains("ratio_interval"));
  const RunResult slow = with({"--read-gbps", "1e9", "--decode-gvps", "1e9", "--gate", "floor_fraction>=0.5"});
  CHECK(slow.exit_code == 1);
  CHECK(with({"--read-gbps", "1"}).exit_code == 2);
  CHECK(with({"--gate", "decode/c2/ratio>=1"}).exit_code == 2);
  const TempDir dir;
  write_file(dir / "r.json", "{}");
  CHECK(with({"--ceilings", (dir / "r.json").string()}).exit_code == 3);
}

TEST_CASE("draft-ab: drafted and plain agree on the small checkpoint, alone and in company, greedy and seeded") {
  const RunResult run = run_command({tool_path("fnx-draft-ab"), "--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny",
                                     "--backend", "cpu", "--sequences", "1,2", "--texts", "chat", "--max-tokens", "24",
                                     "--draft", "2", "--pairs", "1", "--warmup", "0"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-draft-ab");
  REQUIRE(receipt["result"]["cells"].size() == 4);
  for (const Json& cell : receipt["result"]["cells"]) {
    CHECK(cell["comparison"] == "equal");
    CHECK(cell["plain"] == cell["drafted"]);
  }
  CHECK(receipt["result"]["cells"][0]["plain"] != receipt["result"]["cells"][1]["plain"]);
  CHECK(receipt["evidence"]["chat/c1/greedy"]["drafted_tokens"] > 10);
  CHECK(receipt["evidence"]["chat/c2/seeded"]["rounds_by_draft_depth"][0] == 0);
}

TEST_CASE("draft-ab: one pair claims no ratio, and a model without a draft head or --draft off is refused") {
  const RunResult few = run_command({tool_path("fnx-draft-ab"), "--model", "synth:tiny,layers=4,experts=8", "--backend",
                                     "cpu", "--sequences", "1", "--sampling", "greedy", "--max-tokens", "8", "--pairs",
                                     "1", "--gate", "ratio>=1"});
  CHECK(few.exit_code == 0);
  CHECK(named(read_receipt(few, "fnx-draft-ab")["gates"], "made-up/c1/greedy/ratio")["outcome"] == "not_run");
  const RunResult off = tool("fnx-draft-ab", {"--draft", "off"});
  CHECK(off.exit_code == 4);
  CHECK(off.err.find("--draft") != std::string::npos);
  CHECK(tool("fnx-draft-ab", {"--texts", "verse", "--draft", "9"}).exit_code == 2);
}

TEST_CASE("reuse-check: all phases equal runs without snapshots, and damaged files are refused") {
  const RunResult run = run_command({tool_path("fnx-reuse-check"), "--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny",
                                     "--backend", "cpu", "--history", "70", "--max-tokens", "6", "--draft", "2"});
  CAPTURE(run.err);
  REQUIRE(run.exit_code == 0);
  const Json receipt = read_receipt(run, "fnx-reuse-check");
  for (const char* phase : {"cold", "warm", "branch", "rewind"})
    CHECK(named(receipt["gates"], std::string(phase) + "/different")["outcome"] == "pass");
  CHECK(named(receipt["gates"], "file/refused")["observed"] == 3);
  CHECK(receipt["evidence"]["reused_tokens"] == 2 * (69 + 69 + 35));
  CHECK(receipt["result"]["phases"][0]["histories"] == receipt["result"]["phases"][1]["histories"]);
}

TEST_CASE("reuse-check: says which folder it lacks when there is none for its file") {
  const RunResult run = run_command({tool_path("fnx-reuse-check"), "--model", kModel, "--history", "8"}, "",
                                    {"TMPDIR=/nonexistent-folder"});
  CHECK(run.exit_code == 6);
  CHECK(run.err.starts_with("fnx-reuse-check: error: TMPDIR"));
}
