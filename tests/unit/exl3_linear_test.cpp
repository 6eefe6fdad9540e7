#include "libcore/format/exl3_linear.h"

#include <doctest/doctest.h>

#include "kernels/error.h"
#include "libcore/format/checkpoint.h"
#include "tests/support/memory_source.h"
#include "tests/support/refusal.h"

using namespace fnx;
using fnx::test::FileTensor;
using fnx::test::has;
using fnx::test::MemorySource;
using fnx::test::refusal_of;
using fnx::test::tensor;

namespace {

FileTensor zeros(std::string name, DType dtype, std::vector<int64_t> shape) {
  size_t bytes = dtype_size(dtype);
  for (int64_t d : shape) bytes *= static_cast<size_t>(d);
  return {std::move(name), dtype_name(dtype), std::move(shape), std::string(bytes, '\0')};
}

FileTensor marker(const char* name, uint32_t value) { return tensor<uint32_t>(name, DType::I32, {}, {value}); }

// A layer of 256 inputs and 128 outputs with `words` words a tile, and more tensors.
std::vector<FileTensor> layer(int64_t words, std::vector<FileTensor> more = {}) {
  std::vector<FileTensor> all = {zeros("l.trellis", DType::I16, {16, 8, words}), zeros("l.suh", DType::F16, {256}),
                                 zeros("l.svh", DType::F16, {128})};
  for (FileTensor& t : more) {
    std::erase_if(all, [&](const FileTensor& old) { return old.name == t.name; });
    all.push_back(std::move(t));
  }
  return all;
}

std::vector<FileTensor> without(std::vector<FileTensor> all, const std::string& name) {
  std::erase_if(all, [&](const FileTensor& t) { return t.name == name; });
  return all;
}

std::string refusal(const std::vector<FileTensor>& tensors) {
  return refusal_of([&] { describe_linear(MemorySource(tensors), "l"); });
}

}  // namespace

TEST_CASE("exl3_linear: takes width, sizes and codebook from the tensors") {
  const auto info = describe_linear(MemorySource(layer(96, {marker("l.mul1", exl3::kMul1)})), "l");
  REQUIRE(info);
  CHECK(info->quantized);
  CHECK(info->in == 256);
  CHECK(info->out == 128);
  CHECK(info->half_bits == 12);
  CHECK(info->codebook == exl3::Codebook::Mul1);
  CHECK(!info->packed_signs);
  CHECK(!info->bias);
  CHECK(info->bytes == 16 * 8 * 96 * 2 + 512 + 256 + 4);
  CHECK(!describe_linear(MemorySource(layer(96)), "m"));
  CHECK(!describe_linear(MemorySource(without(layer(96), "l.trellis")), "l"));
}

TEST_CASE("exl3_linear: no marker means 3inst, an empty marker means its name") {
  const auto codebook = [](std::vector<FileTensor> more) {
    return describe_linear(MemorySource(layer(48, std::move(more))), "l")->codebook;
  };
  CHECK(codebook({}) == exl3::Codebook::ThreeInst);
  CHECK(codebook({marker("l.mcg", exl3::kMcg)}) == exl3::Codebook::Mcg);
  CHECK(codebook({zeros("l.mcg", DType::I32, {0})}) == exl3::Codebook::Mcg);
  CHECK(codebook({zeros("l.mul1", DType::I32, {0})}) == exl3::Codebook::Mul1);
  CHECK(codebook({tensor<uint32_t>("l.mul1", DType::I32, {1}, {exl3::kMul1})}) == exl3::Codebook::Mul1);
}

TEST_CASE("exl3_linear: refuses both markers, another value and another form") {
  CHECK(
      has(refusal(layer(48, {marker("l.mul1", exl3::kMul1), marker("l.mcg", exl3::kMcg)})), "both a mul1 and an mcg"));
  CHECK(has(refusal(layer(48, {marker("l.mul1", exl3::kMcg)})), "marker value 0xCBAC1FED where 0x83DCD12D"));
  CHECK(has(refusal(layer(48, {marker("l.mcg", 0)})), "marker value 0x00000000"));
  CHECK(has(refusal(layer(48, {zeros("l.mcg", DType::I64, {})})), "must be one I32, found I64"));
  CHECK(has(refusal(layer(48, {zeros("l.mcg", DType::I32, {2})})), "must be one I32, found I32 [2]"));
}

TEST_CASE("exl3_linear: refuses widths that the codebook does not have and never floors them") {
  const FileTensor mul1 = marker("l.mul1", exl3::kMul1), mcg = marker("l.mcg", exl3::kMcg);
  for (int64_t words : {24, 40, 56}) {
    CHECK(describe_linear(MemorySource(layer(words, {mul1})), "l")->half_bits == words / 8);
    CHECK(has(refusal(layer(words, {mcg})), "bits, which codebook mcg does not have"));
    CHECK(has(refusal(layer(words)), "codebook 3inst"));
  }
  CHECK(has(refusal(layer(40, {mcg})), "40 words a tile are 2.5 bits"));
  for (int64_t words : {0, 8, 20, 33, 72, 88, 104, 120, 136, 144, 160}) {
    CAPTURE(words);
    CHECK(has(refusal(layer(words, {mul1})), "codebook mul1 does not have"));
  }
  for (int64_t bits = 1; bits <= 8; ++bits) CHECK(refusal(layer(16 * bits, {mcg})) == "");
}

TEST_CASE("exl3_linear: refuses sizes off the 128 grid, wrong dtypes and missing scales") {
  CHECK(has(refusal(layer(48, {zeros("l.trellis", DType::I16, {12, 8, 48})})),
            "input width is not a positive multiple of 128"));
  CHECK(has(refusal(layer(48, {zeros("l.trellis", DType::I16, {16, 9, 48})})), "output width"));
  CHECK(has(refusal(layer(48, {zeros("l.trellis", DType::I16, {0, 8, 48})})), "input width"));
  CHECK(has(refusal(layer(48, {{"l.trellis", "I16", {int64_t{1} << 60, 0, 48}, ""}})), "input width"));
  CHECK(has(refusal(layer(48, {zeros("l.trellis", DType::U8, {16, 8, 48})})), "dtype U8 where I16"));
  CHECK(has(refusal(layer(48, {zeros("l.trellis", DType::I16, {16, 8})})), "shape [16, 8] where"));
  CHECK(has(refusal(layer(48, {zeros("l.suh", DType::F16, {128})})),
            "l.suh in memory: shape [128] where [256] is needed"));
  CHECK(has(refusal(layer(48, {zeros("l.svh", DType::I16, {128})})), "dtype I16 is not supported"));
  CHECK(has(refusal(layer(48, {zeros("l.su", DType::I16, {16})})), "suh and su contradict"));
  CHECK(has(refusal(without(layer(48), "l.svh")), "tensor l.svh: missing, and so is sv"));
  CHECK(has(refusal(layer(48, {zeros("l.bias", DType::F16, {256})})), "shape [256] where [128]"));
  CHECK(has(refusal(layer(48, {zeros("l.weight", DType::F16, {128, 256})})), "a plain weight beside it"));
}

TEST_CASE("exl3_linear: reads scales of every float type") {
  const std::vector<float> values(256, 1.5f);
  std::vector<uint16_t> bf16(128, 0xBFC0);  // -1.5
  bf16[1] = 0x4000;                         // 2
  const MemorySource source(
      layer(48, {tensor("l.suh", DType::F32, {256}, values), tensor("l.svh", DType::BF16, {128}, bf16),
                 tensor("l.bias", DType::F16, {128}, std::vector<uint16_t>(128, 0x3800))}));
  const LinearSource w = load_linear_source(source, "l", 256, 128);
  CHECK(w.trellis == source.read(source.require("l.trellis")).as<uint16_t>());
  CHECK(w.plain == nullptr);
  CHECK(w.half_bits == 6);
  CHECK(w.suh == values);
  CHECK(w.svh[0] == -1.5f);
  CHECK(w.svh[1] == 2.0f);
  CHECK(w.bias == std::vector<float>(128, 0.5f));
  CHECK(w.owner.size() == 1);
}

TEST_CASE("exl3_linear: unpacks packed signs, low bit first, a set bit is negative") {
  auto tensors = without(without(layer(48), "l.suh"), "l.svh");
  std::vector<uint16_t> su(16, 0), sv(8, 0xFFFF);
  su[0] = 0x8001;
  su[3] = 0x0002;
  tensors.push_back(tensor("l.su", DType::I16, {16}, su));
  tensors.push_back(tensor("l.sv", DType::I16, {8}, sv));
  const MemorySource source(tensors);
  CHECK(describe_linear(source, "l")->packed_signs);
  const LinearSource w = load_linear_source(source, "l", 256, 128);
  REQUIRE(w.suh.size() == 256);
  for (size_t i = 0; i < 256; ++i) CHECK(w.suh[i] == (i == 0 || i == 15 || i == 49 ? -1.0f : 1.0f));
  CHECK(w.svh == std::vector<float>(128, -1.0f));
}

TEST_CASE("exl3_linear: reads plain layers") {
  const MemorySource source({zeros("l.weight", DType::BF16, {3, 5}), zeros("l.bias", DType::F32, {3})});
  const LinearSource w = load_linear_source(source, "l", 5, 3);
  CHECK(w.plain != nullptr);
  CHECK(w.plain_dtype == DType::BF16);
  CHECK(w.trellis == nullptr);
  CHECK(w.bias.size() == 3);
  CHECK(has(refusal({zeros("l.weight", DType::I8, {3, 5})}), "dtype I8"));
  CHECK(has(refusal({zeros("l.weight", DType::F16, {3, 5, 1})}), "shape [3, 5, 1]"));
  CHECK(has(refusal({zeros("l.weight", DType::F16, {0, 5})}), "shape [0, 5]"));
}

TEST_CASE("exl3_linear: refuses an absent layer and other sizes than the model's") {
  const MemorySource source(layer(48));
  CHECK_THROWS_WITH_AS(load_linear_source(source, "m", 256, 128), doctest::Contains("linear layer m is missing"),
                       Error);
  CHECK_THROWS_WITH_AS(load_linear_source(source, "l", 128, 256),
                       doctest::Contains("is [128, 256] where [out, in] = [256, 128] is needed"), Error);
}

TEST_CASE("exl3_linear: reads every layer of the fixture with mixed widths") {
  const Checkpoint pack(FNX_SOURCE_DIR "/fixtures/flashnext-tiny");
  const std::string layers = "model.language_model.layers.";
  CHECK(load_linear_source(pack, layers + "3.mlp.experts.0.down_proj", 128, 256).half_bits == 6);
  CHECK(load_linear_source(pack, layers + "0.mlp.experts.0.down_proj", 128, 256).half_bits == 8);
  CHECK(load_linear_source(pack, "lm_head", 256, 4096).half_bits == 12);
  CHECK(load_linear_source(pack, layers + "0.mlp.gate", 256, 32).plain != nullptr);
  int quantized = 0, halves = 0;
  for (const TensorInfo& t : pack.tensors())
    if (t.name.ends_with(".trellis") && !t.name.ends_with("ngram_embedding.trellis")) {
      const auto info = describe_linear(pack, std::string_view(t.name).substr(0, t.name.size() - 8));
      quantized += info && info->codebook == exl3::Codebook::Mul1;
      halves += info && info->half_bits == 5;
    }
  CHECK(quantized > 900);
  CHECK(halves > 0);
}
