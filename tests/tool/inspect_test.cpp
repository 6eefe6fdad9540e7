#include <doctest/doctest.h>
#include <fmt/format.h>

#include <chrono>
#include <fstream>
#include <functional>

#include "kernels/float16.h"
#include "libcore/format/checkpoint.h"
#include "libcore/format/tensor_names.h"
#include "tests/support/raw_norms.h"
#include "tests/support/run_tool.h"
#include "tests/support/safetensors_file.h"

namespace fs = std::filesystem;
using fnx::Json, fnx::read_receipt, fnx::run_command, fnx::RunResult, fnx::test::TempDir, fnx::test::add_one_to_norms;

namespace {

const fs::path kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";

RunResult inspect(const fs::path& model, std::vector<std::string> more = {}) {
  more.insert(more.begin(), {fnx::tool_path("fnx-inspect"), "--model", model.string()});
  return run_command(more);
}

const Json& family(const Json& result, const std::string& name) {
  for (const Json& f : result["families"])
    if (f["name"] == name) return f;
  FAIL("no family " << name);
  return result;
}

bool is_draft(const std::string& name) { return name.starts_with("mtp."); }

}  // namespace

TEST_CASE("inspect: lists families with widths, codebooks and shapes when the pack is sound") {
  const RunResult run = inspect(kTiny, {"--json"});
  CHECK(run.exit_code == 0);
  CHECK(run.err == "");
  const Json result = Json::parse(run.out);
  CHECK(result == read_receipt(run, "fnx-inspect")["result"]);
  CHECK(result["tensors"] == 3866);
  CHECK(result["problems"].empty());
  const Json& gate = family(result, "model.language_model.layers.*.mlp.experts.*.gate_proj");
  CHECK(gate["count"] == 256);
  CHECK(gate["shape"] == Json::array({128, 256}));
  CHECK(gate["form"] == "mul1");
  CHECK(gate["role"] == "experts");
  CHECK(gate["widths"] == Json::parse(R"([{"bits":2.5,"count":32},{"bits":3.0,"count":179},{"bits":4.0,"count":45}])"));
  const Json& table = family(result, "model.language_model.layers.*.ple.ple_embedding.ngram_embedding");
  CHECK(table["shape"] == Json::array({16128, 160}));
  CHECK(table["widths"][0]["bits"] == 6.0);
  uint64_t bytes = 0, tensors = 0;
  for (const Json& role : result["roles"]) {
    bytes += role["bytes"].get<uint64_t>();
    tensors += role["tensors"].get<uint64_t>();
  }
  CHECK(bytes == result["bytes"]);
  CHECK(tensors == result["tensors"]);
  CHECK_FALSE(result["files"][3]["in_index"]);
}

TEST_CASE("inspect: prints a table, csv and every tensor when asked") {
  const RunResult table = inspect(kTiny);
  CHECK(table.exit_code == 0);
  CHECK(table.out.find("layers.*.mlp.experts.*.up_proj") != std::string::npos);
  CHECK(table.out.find("2.5:32 3:179 4:45") != std::string::npos);
  CHECK(table.out.find("not centred") != std::string::npos);
  CHECK(inspect(kTiny, {"--format", "csv"}).out.starts_with("family,role,count,shape,form,bits,bytes\n"));
  const RunResult tensors = inspect(kTiny, {"--tensors", "--format", "csv"});
  CHECK(std::count(tensors.out.begin(), tensors.out.end(), '\n') == 3867);
  CHECK(tensors.out.find("lm_head.trellis,I16,\"[16, 256, 96]\",model-00003-of-00003.safetensors,") !=
        std::string::npos);
  CHECK(inspect(kTiny, {"--json", "--format", "csv"}).exit_code == 2);
}

TEST_CASE("inspect: names the group and its families when norms are stored around 1") {
  for (const bool draft : {false, true}) {
    CAPTURE(draft);
    const TempDir dir;
    fs::copy(kTiny, dir / "pack", fs::copy_options::recursive);
    add_one_to_norms(dir / "pack", [&](const std::string& name) { return is_draft(name) == draft; });
    const RunResult run = inspect(dir / "pack", {"--json"});
    CHECK(run.exit_code == 1);
    const Json problems = Json::parse(run.out)["problems"];
    REQUIRE(problems.size() == 1);
    const std::string problem = problems[0];
    CHECK(problem.starts_with(draft ? "norms of the draft head average 1.1" : "norms of the trunk average 1.1"));
    CHECK(problem.find(draft ? "mtp.layers.*.self_attn.q_norm.weight" : "layers.*.self_attn.q_norm.weight") !=
          std::string::npos);
    CHECK(problem.find("linear_attn.norm") == std::string::npos);
  }
}

TEST_CASE("inspect: lists what is missing and exits 1 when the pack is incomplete") {
  const TempDir dir;
  fs::copy(kTiny, dir / "pack", fs::copy_options::recursive);
  fs::remove(dir / "pack/model-00002-of-00003.safetensors");
  const RunResult run = inspect(dir / "pack");
  CHECK(run.exit_code == 1);
  CHECK(run.out.find("incomplete: missing model-00002-of-00003.safetensors") != std::string::npos);
  CHECK(read_receipt(run, "fnx-inspect")["run"]["outcome"] == "failed");
}

TEST_CASE("inspect: reports layers whose tensors contradict each other and missing table shards") {
  using fnx::DType, fnx::test::FileTensor;
  const TempDir dir;
  const auto zeros = [](const std::string& name, const char* dtype, std::vector<int64_t> shape, size_t bytes) {
    return FileTensor{name, dtype, std::move(shape), std::string(bytes, '\0')};
  };
  const std::string layer = "model.language_model.layers.0.mlp.experts.0.up_proj.";
  const std::string table = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding.shard_";
  fnx::test::write_safetensors(
      dir / "model.safetensors",
      {zeros(layer + "trellis", "I16", {8, 8, 40}, 8 * 8 * 40 * 2), zeros(layer + "suh", "F16", {128}, 256),
       zeros(layer + "svh", "F16", {128}, 256),
       fnx::test::tensor(layer + "mcg", DType::I32, {}, std::vector<uint32_t>{0xCBAC1FED}),
       zeros("lm_head.suh", "F16", {128}, 256), zeros("lm_head.odd", "X7", {4}, 4),
       zeros(table + "0.trellis", "I16", {2, 61}, 244), zeros(table + "2.trellis", "I16", {2, 61}, 244)});
  const RunResult run = inspect(dir.path(), {"--json"});
  CHECK(run.exit_code == 1);
  const std::string problems = Json::parse(run.out)["problems"].dump();
  CHECK(problems.find("40 words a tile are 2.5 bits, which codebook mcg does not have") != std::string::npos);
  CHECK(problems.find("lm_head.suh stands without lm_head.trellis") != std::string::npos);
  CHECK(problems.find("shard_1.trellis is missing") != std::string::npos);
  CHECK(family(Json::parse(run.out), "lm_head.odd")["form"] == "X7");
}

TEST_CASE("inspect: exits 3 with a clear line when a folder holds no language tensors") {
  const TempDir dir;
  fnx::test::write_safetensors(dir / "vision.safetensors",
                               {{"model.visual.blocks.0.norm1.weight", "F32", {1}, std::string(4, '\0')}});
  fnx::test::write_file(dir / "config.json", "{}");
  const RunResult run = inspect(dir.path());
  CHECK(run.exit_code == 3);
  CHECK(run.err.find("holds no language tensors: 1 tensors, 1 of them vision") != std::string::npos);
  CHECK(run.out == "");
  CHECK(inspect(dir / "absent").exit_code == 3);
  CHECK(run_command({fnx::tool_path("fnx-inspect")}).exit_code == 2);
}

TEST_CASE("inspect: reads the published layout within 1 GiB, in time that grows as its tensors do") {
  const TempDir dir;
  const auto record_of = [&](const std::string& model, int tensors) {
    const std::string pack = (dir / model.substr(6)).string();
    REQUIRE(run_command({fnx::tool_path("fnx-synth"), "--model", model, "--sparse", "--out", pack}).exit_code == 0);
    const RunResult run = inspect(pack, {"--json"});
    CHECK(run.exit_code == 0);
    CHECK(Json::parse(run.out)["tensors"] == tensors);
    return read_receipt(run, "fnx-inspect")["run"];
  };
  const Json quarter = record_of("synth:flash-next-4.05bpw,layers=12", 80448);
  const Json whole = record_of("synth:flash-next-4.05bpw", 303126);
#ifndef __SANITIZE_ADDRESS__
  CHECK(whole["peak_rss_bytes"].get<uint64_t>() < uint64_t{1} << 30);
#endif
  // Seconds are a machine's (scripts/bench_cpu.sh holds them to a limit); 4 times the tensors squared would be 16.
  CHECK(whole["user_s"].get<double>() < 10 * quarter["user_s"].get<double>());
}

TEST_CASE("inspect: --plan says what fits where, and fails a gate when nothing does") {
  const auto plan = [](std::vector<std::string> more) {
    more.insert(more.begin(), {fnx::tool_path("fnx-inspect"), "--plan"});
    return run_command(more);
  };
  const std::vector<std::string> published = {
      "--model", "synth:flash-next-3.05bpw", "--vram", "16GiB", "--ram", "64GiB", "--read-gbps", "448"};
  const RunResult fits = plan(published);
  CHECK(fits.exit_code == 0);
  const Json receipt = read_receipt(fits, "fnx-inspect");
  const Json& result = receipt["result"];
  CHECK(result["fits"] == true);
  CHECK(result["device_bytes"].get<uint64_t>() <= uint64_t{16} << 30);
  uint64_t device = 0;
  for (const Json& row : result["rows"])
    if (row["place"] == "device") device += row["bytes"].get<uint64_t>();
  CHECK(result["device_bytes"] == device);
  CHECK(receipt["evidence"]["token_link_ms"].get<double>() == doctest::Approx(48 * 1843200 / 25e6));
  CHECK(fits.out.find(fmt::format("{} expert lines a layer", result["expert_lines"].get<int64_t>())) !=
        std::string::npos);

  const double read_ms = receipt["evidence"]["token_read_ms"];
  CHECK(read_ms > 48 * 10 * 1843200 / 448e6);  // the experts alone
  CHECK(receipt["evidence"]["most_tokens_per_s"].get<double>() == doctest::Approx(1e3 / read_ms));

  const RunResult small = plan({"--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny", "--vram", "1MiB"});
  CHECK(small.exit_code == 1);
  CHECK(small.out.find("hold no expert line") != std::string::npos);
  CHECK(plan({"--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny", "--vram", "16 potatoes"}).exit_code == 2);
  for (const char* option : {"--vram", "--ram", "--reserve"})
    CHECK(plan({"--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny", option, "18446744073709551615"}).exit_code == 2);
  CHECK(plan({"--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny", "--kv-device-tokens", "9223372036854775807"})
            .exit_code == 2);
  CHECK(run_command(
            {fnx::tool_path("fnx-inspect"), "--model", FNX_SOURCE_DIR "/fixtures/flashnext-tiny", "--vram", "1GiB"})
            .exit_code == 2);
}
