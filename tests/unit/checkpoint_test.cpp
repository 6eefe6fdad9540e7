#include "libcore/format/checkpoint.h"

#include <doctest/doctest.h>

#include "kernels/error.h"
#include "tests/support/refusal.h"
#include "tests/support/safetensors_file.h"

using namespace fnx;
using fnx::test::FileTensor;
using fnx::test::has;
using fnx::test::refusal_of;
using fnx::test::TempDir;
using fnx::test::tensor;
using fnx::test::write_file;
using fnx::test::write_safetensors;

namespace {

constexpr const char* kIndex = "model.safetensors.index.json";

FileTensor floats(const char* name, std::vector<float> values) {
  const auto n = static_cast<int64_t>(values.size());
  return tensor(name, DType::F32, {n}, values);
}

// Two shards with an index, and a side file.
void write_pack(const TempDir& dir) {
  write_file(dir / "config.json", "{}");
  write_safetensors(dir / "m-1.safetensors", {floats("a", {1, 2}), floats("b", {3})});
  write_safetensors(dir / "m-2.safetensors", {floats("c", {4})});
  write_safetensors(dir / "side.safetensors", {floats("s", {5})});
  write_file(dir / kIndex, R"({"metadata":{"total_size":16,"x":[{"y":null}]},"weight_map":)"
                           R"({"a":"m-1.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}})");
}

std::string refusal(const TempDir& dir, bool strict = true) {
  return refusal_of([&] { Checkpoint(dir.path(), {.strict = strict}); });
}

std::string problems(const TempDir& dir) {
  std::string all;
  const Checkpoint pack(dir.path(), {.strict = false});
  for (const std::string& p : pack.problems()) all += p + "\n";
  return all;
}

}  // namespace

TEST_CASE("checkpoint: reads the tensors of shards and side files") {
  TempDir dir;
  write_pack(dir);
  Checkpoint pack(dir.path());
  CHECK(pack.problems().empty());
  REQUIRE(pack.files().size() == 3);
  CHECK(pack.files()[0].name == "m-1.safetensors");
  CHECK(pack.files()[1].in_index);
  CHECK(pack.files()[2].name == "side.safetensors");
  CHECK(!pack.files()[2].in_index);
  CHECK(pack.tensors().size() == 4);
  CHECK(pack.find("nothing") == nullptr);
  CHECK(pack.read(pack.require("a")).as<float>()[1] == 2);
  CHECK(pack.read(pack.require("s")).as<float>()[0] == 5);
}

TEST_CASE("checkpoint: data outlive the checkpoint that read them") {
  TempDir dir;
  write_pack(dir);
  TensorData data;
  {
    Checkpoint pack(dir.path());
    data = pack.read(pack.require("c"));
  }
  CHECK(data.as<float>()[0] == 4);
}

TEST_CASE("checkpoint: hands out aligned data when the header has an odd length") {
  for (int odd = 0; odd < 8; ++odd) {
    TempDir dir;
    write_file(dir / "config.json", "{}");
    write_safetensors(dir / "m.safetensors", {tensor<double>("d", DType::F64, {2}, {1, 2}), floats("f", {3, 4})}, odd);
    Checkpoint pack(dir.path());
    const TensorData d = pack.read(pack.require("d")), f = pack.read(pack.require("f"));
    CHECK(reinterpret_cast<uintptr_t>(d.bytes.data()) % 8 == 0);
    CHECK(reinterpret_cast<uintptr_t>(f.bytes.data()) % 4 == 0);
    CHECK(d.as<double>()[1] == 2);
    CHECK(f.as<float>()[1] == 4);
  }
}

TEST_CASE("checkpoint: reads the fixture and finds its side table") {
  Checkpoint pack(FNX_SOURCE_DIR "/fixtures/flashnext-tiny");
  CHECK(pack.files().size() == 4);
  CHECK(!pack.files()[3].in_index);
  CHECK(pack.find("lm_head.trellis") != nullptr);
  CHECK(pack.find("model.language_model.layers.1.ple.ple_embedding.ngram_embedding.trellis") != nullptr);
}

TEST_CASE("checkpoint: takes every file when there is no index") {
  TempDir dir;
  write_pack(dir);
  std::filesystem::remove(dir / kIndex);
  Checkpoint pack(dir.path());
  CHECK(pack.tensors().size() == 4);
  CHECK(pack.files()[2].in_index);
}

TEST_CASE("checkpoint: refuses one name in two files with both places") {
  TempDir dir;
  write_pack(dir);
  write_safetensors(dir / "side.safetensors", {floats("b", {5})});
  for (bool strict : {true, false}) {
    const std::string text = refusal(dir, strict);
    CHECK(has(text, "tensor b stands in two files"));
    CHECK(has(text, "m-1.safetensors (bytes "));
    CHECK(has(text, "side.safetensors (bytes "));
  }
}

TEST_CASE("checkpoint: says incomplete and lists everything when files are missing, cut or unfinished") {
  TempDir dir;
  write_pack(dir);
  std::filesystem::remove(dir / "config.json");
  std::filesystem::remove(dir / "m-2.safetensors");
  write_file(dir / "m-2.safetensors.part", "x");
  std::filesystem::resize_file(dir / "m-1.safetensors", std::filesystem::file_size(dir / "m-1.safetensors") - 1);
  const std::string text = refusal(dir);
  CHECK(has(text, "incomplete: missing config.json, m-2.safetensors"));
  CHECK(has(text, "m-1.safetensors has "));
  CHECK(has(text, "m-2.safetensors.part"));
  CHECK(!has(text, "no shard holds"));

  Checkpoint pack(dir.path(), {.strict = false});
  CHECK(pack.problems().size() == 3);
  CHECK(pack.read(pack.require("a")).as<float>()[0] == 1);
  CHECK_THROWS_WITH_AS(pack.read(pack.require("b")), doctest::Contains("incomplete: tensor b ends at byte"), Error);
}

TEST_CASE("checkpoint: each sign of an unfinished download alone is incomplete") {
  for (int what = 0; what < 4; ++what) {
    CAPTURE(what);
    TempDir dir;
    write_pack(dir);
    if (what == 0) std::filesystem::resize_file(dir / "side.safetensors", 20);
    if (what == 1) std::filesystem::remove(dir / "config.json");
    if (what == 2) write_file(dir / "tokenizer.json.part", "");
    if (what == 3) write_file(dir / "m-2.safetensors", "");
    CHECK(has(refusal(dir), "incomplete"));
  }
}

TEST_CASE("checkpoint: names absent members of a numbered series when there is no index") {
  TempDir dir;
  write_file(dir / "config.json", "{}");
  write_safetensors(dir / "model-00002-of-00003.safetensors", {floats("a", {1})});
  const std::string text = refusal(dir);
  CHECK(has(text, "model-00001-of-00003.safetensors"));
  CHECK(has(text, "model-00003-of-00003.safetensors"));
}

TEST_CASE("checkpoint: refuses an index that disagrees with the shards") {
  TempDir dir;
  write_pack(dir);
  write_file(dir / kIndex, R"({"weight_map":{"a":"m-1.safetensors","b":"m-1.safetensors","c":"m-2.safetensors",)"
                           R"("ghost":"m-2.safetensors"}})");
  CHECK(has(refusal(dir), "1 tensors that no shard holds: ghost (m-2.safetensors)"));
  write_file(dir / kIndex, R"({"weight_map":{"a":"m-2.safetensors","b":"m-1.safetensors","c":"m-2.safetensors"}})");
  CHECK(has(refusal(dir), "a (index: m-2.safetensors, found in m-1.safetensors)"));
}

TEST_CASE("checkpoint: says so when weight_map lacks a tensor that is present") {
  TempDir dir;
  write_pack(dir);
  write_file(dir / kIndex, R"({"weight_map":{"a":"m-1.safetensors","c":"m-2.safetensors"}})");
  CHECK(refusal(dir) == "");
  CHECK(has(problems(dir), "weight_map lacks 1 tensors that are present: b (m-1.safetensors)"));
  CHECK(Checkpoint(dir.path()).problems().size() == 1);
}

TEST_CASE("checkpoint: refuses a malformed index") {
  TempDir dir;
  write_pack(dir);
  const std::pair<const char*, const char*> cases[] = {
      {R"({"weight_map":{"a":"m-1.safetensors","a":"m-2.safetensors"}})", "names tensor a twice"},
      {R"({"weight_map":{},"weight_map":{}})", "\"weight_map\" appears twice"},
      {R"({"metadata":{}})", "no weight_map"},
      {R"([])", "must be an object"},
      {R"({"weight_map":[]})", "must be an object"},
      {R"({"weight_map":{"a":1}})", "tensor a to a file name"},
      {R"({"weight_map":{"a":null}})", "tensor a to a file name"},
      {R"({"weight_map":{"a":["m-1.safetensors"]}})", "tensor a to a file name"},
      {R"({"weight_map":{"a":"../m-1.safetensors"}})", "not a file name in this folder"},
      {R"({"weight_map":{"a":"/etc/passwd"}})", "not a file name in this folder"},
      {R"({"weight_map":{"a":""}})", "not a file name in this folder"},
      {R"({"weight_map":{"a":"m-1.safetensors"})", "not valid JSON"},
      {"", "not valid JSON"},
  };
  for (const auto& [text, message] : cases) {
    CAPTURE(text);
    write_file(dir / kIndex, text);
    CHECK(has(refusal(dir), message));
    CHECK(has(refusal(dir), kIndex));
  }
}

TEST_CASE("checkpoint: refuses a wrong path, an empty folder and a single file") {
  TempDir dir;
  CHECK(has(refusal(dir), "no *.safetensors"));
  CHECK_THROWS_WITH_AS(Checkpoint(dir / "nowhere"), doctest::Contains("does not exist"), Error);
  write_safetensors(dir / "v.safetensors", {floats("model.visual.x", {1})});
  CHECK_THROWS_WITH_AS(Checkpoint(dir / "v.safetensors"), doctest::Contains("give the folder"), Error);
  Checkpoint one(dir / "v.safetensors", {.strict = false});
  CHECK(one.problems().empty());
  CHECK(one.read(one.require("model.visual.x")).as<float>()[0] == 1);
}

TEST_CASE("checkpoint: refuses a huge header length in a sparse file without reading it in") {
  TempDir dir;
  write_file(dir / "config.json", "{}");
  const std::string length{"\x01\xe1\xf5\x05\0\0\0\0", 8};  // 100 000 001
  write_file(dir / "m.safetensors", length);
  std::filesystem::resize_file(dir / "m.safetensors", 200'000'000);
  CHECK(has(refusal(dir), "not a safetensors file"));
}

TEST_CASE("checkpoint: lists an unknown dtype and refuses it only when it is needed") {
  TempDir dir;
  write_file(dir / "config.json", "{}");
  write_safetensors(dir / "m.safetensors", {{"q", "F4", {3}, "ab"}, floats("a", {1})});
  Checkpoint pack(dir.path());
  REQUIRE(pack.find("q") != nullptr);
  CHECK(pack.read(*pack.find("q")).bytes.size() == 2);
  CHECK_THROWS_WITH_AS(pack.require("q"), doctest::Contains("unknown dtype F4"), Error);
}
