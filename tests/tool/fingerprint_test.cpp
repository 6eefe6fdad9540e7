#include <doctest/doctest.h>

#include <fstream>

#include "libcore/format/checkpoint.h"
#include "tests/support/run_tool.h"
#include "tests/support/safetensors_file.h"

namespace fs = std::filesystem;
using fnx::Json, fnx::read_json, fnx::read_receipt, fnx::run_command, fnx::RunResult, fnx::test::TempDir;

namespace {

const fs::path kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";
const std::string kTool = "fnx-fingerprint";

// A copy of the small checkpoint with a cache of its own.
struct Workplace {
  TempDir dir;
  fs::path pack = dir / "pack";
  std::vector<std::string> env = {"XDG_CACHE_HOME=" + (dir / "cache").string()};

  Workplace() { fs::copy(kTiny, pack, fs::copy_options::recursive); }

  RunResult run(std::vector<std::string> more = {}) const {
    more.insert(more.begin(), {fnx::tool_path(kTool), "--model", pack.string()});
    return run_command(more, "", env);
  }
  std::string digest(std::vector<std::string> more = {}) const {
    return read_receipt(run(more), kTool)["result"]["digest"];
  }
  fs::path saved(std::vector<std::string> more = {}) const {
    const fs::path file = dir / "earlier.json";
    more.insert(more.end(), {"--receipt", file.string()});
    REQUIRE(run(more).exit_code == 0);
    return file;
  }
  void flip_byte(const std::string& tensor) const {
    const fnx::Checkpoint checkpoint(pack);
    const fnx::TensorInfo& t = checkpoint.require(tensor);
    std::fstream file(pack / checkpoint.files()[t.file].name, std::ios::in | std::ios::out | std::ios::binary);
    const auto at = static_cast<std::streamoff>(t.offset + t.bytes - 1);
    file.seekg(at);
    const char old = static_cast<char>(file.get());
    file.seekp(at);
    file.put(static_cast<char>(old ^ 1));
  }
};

}  // namespace

TEST_CASE("fingerprint: hashes tensors by name and bytes when files are laid out otherwise") {
  using fnx::DType;
  const TempDir dir;
  const auto a = fnx::test::tensor("lm_head.weight", DType::F32, {2}, std::vector<float>{1, 2});
  const auto b = fnx::test::tensor("mtp.x.weight", DType::F32, {1}, std::vector<float>{3});
  for (const char* folder : {"one", "two", "other"}) {
    fs::create_directory(dir / folder);
    fnx::test::write_file(dir.path() / folder / "config.json", "{}");
  }
  fnx::test::write_safetensors(dir / "one/model.safetensors", {a, b});
  fnx::test::write_safetensors(dir / "two/model.safetensors", {b});
  fnx::test::write_safetensors(dir / "two/side.safetensors", {a});
  fnx::test::write_safetensors(dir / "other/model.safetensors",
                               {fnx::test::tensor("lm_head.weight", DType::F32, {1, 2}, std::vector<float>{1, 2}), b});
  const auto digest = [&](const char* folder) {
    return read_receipt(run_command({fnx::tool_path(kTool), "--model", (dir / folder).string()}),
                        kTool)["result"]["digest"];
  };
  const auto record = [](const fnx::test::FileTensor& t, const std::string& shape) {
    return t.name + " F32 " + shape + " " + fnx::xxh3_hex(t.bytes.data(), t.bytes.size()) + "\n";
  };
  const std::string records = record(a, "[2]") + record(b, "[1]");
  CHECK(digest("one") == fnx::xxh3_hex(records.data(), records.size()));
  CHECK(digest("two") == digest("one"));
  CHECK(digest("other") != digest("one"));
}

TEST_CASE("fingerprint: says cached on the second run and computes again when a file changed") {
  const Workplace place;
  const RunResult first = place.run();
  CHECK(first.exit_code == 0);
  const Json computed = read_receipt(first, kTool);
  CHECK(computed["subjects"][0]["fingerprint"]["origin"] == "computed");
  const Json cached = read_receipt(place.run(), kTool);
  CHECK(cached["subjects"][0]["fingerprint"]["origin"] == "cached");
  CHECK(cached["result"] == computed["result"]);
  CHECK(cached["result_digest"] == computed["result_digest"]);
  CHECK(read_receipt(place.run({"--no-cache"}), kTool)["subjects"][0]["fingerprint"]["origin"] == "computed");
  place.flip_byte("lm_head.trellis");
  const Json changed = read_receipt(place.run(), kTool);
  CHECK(changed["subjects"][0]["fingerprint"]["origin"] == "computed");
  CHECK(changed["result"]["digest"] != computed["result"]["digest"]);
  for (const auto& entry : fs::directory_iterator(place.pack)) CHECK(fs::exists(kTiny / entry.path().filename()));
}

TEST_CASE("fingerprint: ignores a damaged cache and does without a writable one") {
  Workplace place;
  const std::string digest = place.digest();
  for (const auto& entry : fs::directory_iterator(place.dir / "cache/fnx"))
    fnx::test::write_file(entry.path(), "{\"version\":1");
  const Json again = read_receipt(place.run(), kTool);
  CHECK(again["result"]["digest"] == digest);
  CHECK(again["subjects"][0]["fingerprint"]["origin"] == "computed");
  for (const auto& entry : fs::directory_iterator(place.dir / "cache/fnx")) {
    fs::remove(entry.path());
    fs::create_directory(entry.path());
  }
  CHECK(place.digest() == digest);
  place.env = {"XDG_CACHE_HOME=/dev/null"};
  CHECK(place.digest() == digest);
}

TEST_CASE("fingerprint: finds a copy equal and a changed tensor different when verifying") {
  const Workplace place;
  const fs::path families = place.saved();
  const RunResult equal = place.run({"--verify", families.string()});
  CHECK(equal.exit_code == 0);
  CHECK(equal.out.ends_with("equal\n"));
  CHECK(read_receipt(equal, kTool)["subjects"][0]["fingerprint"]["origin"] == "computed");

  const fs::path tensors = place.dir / "tensors.json";
  REQUIRE(place.run({"--tensors", "--receipt", tensors.string()}).exit_code == 0);
  place.flip_byte("model.language_model.layers.2.mlp.experts.5.up_proj.trellis");
  const RunResult by_family = place.run({"--verify", families.string()});
  CHECK(by_family.exit_code == 1);
  CHECK(
      by_family.out.ends_with("different: checkpoint full\n"
                              "different: family model.language_model.layers.*.mlp.experts.*.up_proj.trellis\n"));
  const RunResult by_tensor = place.run({"--verify", tensors.string()});
  CHECK(by_tensor.exit_code == 1);
  CHECK(by_tensor.out.ends_with("different: tensor model.language_model.layers.2.mlp.experts.5.up_proj.trellis\n"));
}

TEST_CASE("fingerprint: calls a receipt without a digest unverified when verifying") {
  const Workplace place;
  Json receipt = read_json(place.saved());
  receipt["result"].erase("digest");
  receipt["subjects"][0].erase("fingerprint");
  fnx::test::write_file(place.dir / "none.json", receipt.dump());
  const RunResult run = place.run({"--verify", (place.dir / "none.json").string()});
  CHECK(run.exit_code == 1);
  CHECK(run.out.ends_with("unverified: checkpoint no digest in receipt\n"));
  fnx::test::write_file(place.dir / "text.json", "[]");
  CHECK(place.run({"--verify", (place.dir / "text.json").string()}).exit_code == 3);
  CHECK(place.run({"--verify", (place.dir / "absent.json").string()}).exit_code == 3);
}

TEST_CASE("fingerprint: reads little and tells packs apart when advisory") {
  const Workplace place;
  const fs::path earlier = place.saved({"--advisory"});
  const Json receipt = read_json(earlier);
  CHECK(receipt["subjects"][0]["fingerprint"]["kind"] == "advisory");
  CHECK(receipt["result"]["bytes"].get<uint64_t>() < 1'000'000);
  CHECK(place.run({"--verify", earlier.string()}).exit_code == 0);
  std::ofstream(place.pack / "config.json", std::ios::app) << "\n";
  CHECK(place.run({"--verify", earlier.string()}).exit_code == 1);
}

TEST_CASE("fingerprint: gives the SHA-256 of files when asked") {
  const Workplace place;
  const Json result = read_receipt(place.run({"--sha256"}), kTool)["result"];
  CHECK(result["files"].size() == 4);
  CHECK(result["files"][0]["sha256"] == fnx::sha256_file(kTiny / "model-00001-of-00003.safetensors"));
}
