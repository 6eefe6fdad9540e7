#include "libcore/format/ngram_table.h"

#include <doctest/doctest.h>

#include <cstring>

#include "kernels/error.h"
#include "libcore/format/checkpoint.h"
#include "tests/support/memory_source.h"
#include "tests/support/refusal.h"

using namespace fnx;
using fnx::test::FileTensor;
using fnx::test::has;
using fnx::test::MemorySource;
using fnx::test::refusal_of;
using fnx::test::TempDir;
using fnx::test::tensor;

namespace {

constexpr const char* kPrefix = "x.ple_embedding.ngram_embedding";
constexpr int64_t kHeads = 2, kDim = 32, kWords = 1 + kDim * 3 / 16;

std::string in_table(const std::string& name) { return std::string(kPrefix) + "." + name; }

// Rows first .. last - 1 of a table of 3 bits; every word tells its row.
FileTensor rows(const std::string& name, int first, int last) {
  std::vector<uint16_t> words;
  for (int r = first; r < last; ++r)
    for (int64_t w = 0; w < kWords; ++w) words.push_back(static_cast<uint16_t>(r * 16 + w));
  return tensor(in_table(name), DType::I16, {last - first, kWords}, words);
}

// 12 shards of 2 rows, in an order that is neither numeric nor the names'; the last has 1 row.
std::vector<FileTensor> shards() {
  std::vector<FileTensor> all;
  for (int i : {10, 2, 0, 11, 1, 3, 9, 4, 8, 5, 7, 6})
    all.push_back(rows("shard_" + std::to_string(i) + ".trellis", 2 * i, i == 11 ? 23 : 2 * i + 2));
  return all;
}

bool row_is(const NgramTable& table, int64_t r) {
  uint16_t words[kWords];
  std::memcpy(words, table.row(r), sizeof words);
  for (int64_t w = 0; w < kWords; ++w)
    if (words[w] != r * 16 + w) return false;
  return true;
}

std::string refusal(const std::vector<FileTensor>& tensors) {
  return refusal_of([&] { NgramTable(MemorySource(tensors), kPrefix, kHeads, kDim); });
}

}  // namespace

TEST_CASE("ngram_table: one tensor and numbered shards give equal rows") {
  const MemorySource one({rows("trellis", 0, 23)}), many(shards());
  const NgramTable a(one, kPrefix, kHeads, kDim), b(many, kPrefix, kHeads, kDim);
  for (const NgramTable* t : {&a, &b}) {
    CHECK(t->rows() == 23);
    CHECK(t->bits() == 3);
    CHECK(t->dim() == kDim);
    CHECK(t->row_bytes() == 2 * kWords);
    for (int64_t r = 0; r < 23; ++r) CHECK(row_is(*t, r));
    CHECK_THROWS_AS(t->row(23), Error);
    CHECK_THROWS_AS(t->row(-1), Error);
    CHECK(t->head_bias().empty());
    CHECK(t->multipliers().empty());
  }
}

TEST_CASE("ngram_table: reads shards from a side file outside the index and survives the checkpoint") {
  TempDir dir;
  test::write_file(dir / "config.json", "{}");
  test::write_safetensors(dir / "m.safetensors", {tensor<float>("a", DType::F32, {1}, {1})});
  test::write_safetensors(dir / "ngram_embedding.safetensors", shards());
  test::write_file(dir / "model.safetensors.index.json", R"({"weight_map":{"a":"m.safetensors"}})");
  const auto table = [&] { return NgramTable(Checkpoint(dir.path()), kPrefix, kHeads, kDim); }();
  for (int64_t r = 0; r < 23; ++r) CHECK(row_is(table, r));
}

TEST_CASE("ngram_table: names what is missing or contradicts") {
  auto missing = shards();
  std::erase_if(missing, [](const FileTensor& t) { return t.name == in_table("shard_7.trellis"); });
  CHECK(has(refusal(missing), "shard_7.trellis is missing (11 shards are there, the last is 11)"));
  CHECK(has(refusal({rows("shard_1.trellis", 0, 2)}), "shard_0.trellis is missing"));
  CHECK(has(refusal({}), "n-gram table x.ple_embedding.ngram_embedding is missing"));
  CHECK(has(refusal({rows("shard_0.trellis", 0, 2), rows("trellis", 0, 2)}), "several forms"));
  CHECK(has(refusal({rows("shard_0.trellis", 0, 2), rows("shard_00.trellis", 0, 2)}), "same number as"));
  CHECK(has(refusal({rows("shard_x.trellis", 0, 2)}), "not an integer"));
  CHECK(has(refusal({rows("shard_99999999999.trellis", 0, 2)}), "not an integer"));
  CHECK(has(refusal({rows("shard_0.trellis", 0, 2), rows("shard_1.trellis", 2, 3), rows("shard_2.trellis", 3, 5)}),
            "shard_1.trellis in memory: I16 [1, 7] does not continue"));
  CHECK(has(refusal({rows("shard_0.trellis", 0, 2), rows("shard_1.trellis", 2, 5)}), "does not continue"));
  CHECK(has(refusal({rows("shard_0.trellis", 0, 0)}), "does not continue"));
}

TEST_CASE("ngram_table: takes the width from the row length alone") {
  for (int64_t bits = 1; bits <= 8; ++bits) {
    const MemorySource source({tensor(in_table("trellis"), DType::I16, {2, 1 + 2 * bits},
                                      std::vector<uint16_t>(static_cast<size_t>(2 + 4 * bits)))});
    CHECK(NgramTable(source, kPrefix, kHeads, kDim).bits() == bits);
  }
  for (int64_t words : {1, 2, 6, 19}) {
    const auto t =
        tensor(in_table("trellis"), DType::I16, {1, words}, std::vector<uint16_t>(static_cast<size_t>(words)));
    CHECK(has(refusal({t}), "words are not 1 + 32 * bits / 16"));
  }
  CHECK(
      has(refusal({tensor(in_table("trellis"), DType::I32, {1, 7}, std::vector<int32_t>(7))}), "dtype I32 where I16"));
  CHECK(has(refusal({tensor(in_table("trellis"), DType::I16, {7}, std::vector<uint16_t>(7))}), "shape [7]"));
}

TEST_CASE("ngram_table: reads a plain table") {
  const std::vector<float> values(64, 2.5f);
  const MemorySource source({tensor(in_table("weight"), DType::F32, {2, 32}, values)});
  const NgramTable table(source, kPrefix, kHeads, kDim);
  CHECK(table.bits() == 0);
  CHECK(table.plain_dtype() == DType::F32);
  CHECK(table.row_bytes() == 128);
  const MemorySource shards({tensor(in_table("shard_1.weight"), DType::F32, {1, 32}, std::vector<float>(32, 7.0f)),
                             tensor(in_table("shard_0.weight"), DType::F32, {2, 32}, values)});
  const NgramTable sharded(shards, kPrefix, kHeads, kDim);
  CHECK(sharded.rows() == 3);
  CHECK(*reinterpret_cast<const float*>(sharded.row(1)) == 2.5f);
  CHECK(*reinterpret_cast<const float*>(sharded.row(2)) == 7.0f);
  CHECK(has(refusal({tensor(in_table("weight"), DType::F32, {4, 16}, values)}), "where [rows, 32]"));
  CHECK(has(refusal({tensor(in_table("weight"), DType::I8, {2, 32}, std::vector<int8_t>(64))}), "dtype I8"));
}

TEST_CASE("ngram_table: reads the side vectors under both public names, beside the table or above it") {
  const std::vector<int64_t> offsets = {0, 11}, sizes = {11, 12}, multipliers = {3, 5, 7};
  const std::string above = "x.ple_embedding.";
  const std::vector<FileTensor> places[] = {{tensor(in_table("head_offsets"), DType::I64, {2}, offsets),
                                             tensor(in_table("head_vocab_sizes"), DType::I64, {2}, sizes),
                                             tensor(in_table("layer_multipliers"), DType::I64, {3}, multipliers)},
                                            {tensor(above + "ngram_heads_offsets", DType::I64, {2}, offsets),
                                             tensor(above + "ngram_heads_vocab_sizes", DType::I64, {2}, sizes),
                                             tensor(above + "layer_multipliers", DType::I64, {3}, multipliers)}};
  for (auto tensors : places) {
    tensors.push_back(rows("trellis", 0, 23));
    tensors.push_back(tensor(in_table("head_bias"), DType::BF16, {2, 32}, std::vector<uint16_t>(64, 0x3F80)));
    const MemorySource source(tensors);
    const NgramTable table(source, kPrefix, kHeads, kDim);
    CHECK(table.head_offsets() == offsets);
    CHECK(table.head_sizes() == sizes);
    CHECK(table.multipliers() == multipliers);
    CHECK(table.head_bias() == std::vector<float>(64, 1.0f));
  }
}

TEST_CASE("ngram_table: refuses side vectors of other sizes and heads beyond the table") {
  const FileTensor table = rows("trellis", 0, 23);
  CHECK(has(refusal({table, tensor(in_table("head_bias"), DType::F16, {32, 2}, std::vector<uint16_t>(64))}),
            "[32, 2] where [2, 32]"));
  CHECK(has(refusal({table, tensor(in_table("head_offsets"), DType::I64, {3}, std::vector<int64_t>(3))}),
            "[3] where [2]"));
  CHECK(has(refusal({table, tensor(in_table("head_offsets"), DType::I32, {2}, std::vector<int32_t>(2))}),
            "dtype I32 where I64"));
  const auto heads = [&](std::vector<int64_t> offsets, std::vector<int64_t> sizes) {
    return refusal({table, tensor(in_table("head_offsets"), DType::I64, {2}, offsets),
                    tensor(in_table("head_vocab_sizes"), DType::I64, {2}, sizes)});
  };
  CHECK(heads({0, 11}, {11, 12}) == "");
  CHECK(has(heads({0, 11}, {11, 13}), "head 1 has 13 rows from 11 on, but the table has 23 rows"));
  CHECK(has(heads({-1, 11}, {11, 12}), "head 0"));
  CHECK(has(heads({0, INT64_MAX}, {11, INT64_MAX}), "head 1"));
}

TEST_CASE("ngram_table: reads the fixture's table") {
  const Checkpoint pack(FNX_SOURCE_DIR "/fixtures/flashnext-tiny");
  const NgramTable table(pack, "model.language_model.layers.1.ple.ple_embedding.ngram_embedding", 4, 160);
  CHECK(table.rows() == 16128);
  CHECK(table.bits() == 6);
  CHECK(table.row_bytes() == 122);
  CHECK(table.head_bias().size() == 640);
  CHECK(table.head_offsets().size() == 4);
  CHECK(table.head_sizes().front() > 4000);
  CHECK(table.multipliers().size() == 3);
  CHECK(table.row(16127) - table.row(0) == 16127 * 122);
}
