// Hashing of token n-grams against stated and golden vectors.
#include <doctest/doctest.h>

#include "libcore/engine/ngram.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

std::vector<std::vector<int64_t>> all_rows(const NgramHash& h, const std::vector<int32_t>& tokens) {
  std::vector<std::vector<int64_t>> out;
  for (size_t i = 0; i < tokens.size(); ++i) {
    out.emplace_back(h.heads());
    h.rows(std::span(tokens).first(i + 1), out.back().data());
  }
  return out;
}

}  // namespace

TEST_CASE("ngram: tokens 7, 9, 11 with stated multipliers and sizes give the stated rows") {
  const NgramHash h{3, 1, 99, {3, 5, 7}, {101, 103}, {0, 101}};
  CHECK(all_rows(h, {7, 9, 11}) == std::vector<std::vector<int64_t>>{{1, 124}, {56, 136}, {12, 162}});
}

TEST_CASE("ngram: an eos belongs to the segment that it ends") {
  const NgramHash h{3, 1, 99, {3, 5, 7}, {101, 103}, {0, 101}};
  const auto rows = all_rows(h, {7, 99, 11, 12});
  const auto fresh = all_rows(h, {11, 12});
  CHECK(rows[2] == fresh[0]);
  CHECK(rows[3] == fresh[1]);
  CHECK(all_rows(h, {7, 99})[1] ==
        std::vector<int64_t>{((99 * 3) ^ (7 * 5)) % 101, ((99 * 3) ^ (7 * 5) ^ (99 * 7)) % 103 + 101});
}

TEST_CASE("ngram: constants and rows of the tiny checkpoint equal the golden vectors") {
  const auto& g = Golden::get().json().at("ngram");
  const NgramHash h = NgramHash::derive(ModelConfig::load(fixture("flashnext-tiny/config.json")), 0);
  CHECK(h.multipliers == g.at("multipliers").get<std::vector<int64_t>>());
  CHECK(h.sizes == g.at("sizes").get<std::vector<int64_t>>());
  CHECK(h.offsets == g.at("offsets").get<std::vector<int64_t>>());
  CHECK(all_rows(h, g.at("ids")) == g.at("rows").get<std::vector<std::vector<int64_t>>>());
}

TEST_CASE("ngram: constants of the published geometry equal the pack's, and rows reach the end of 320 001 536") {
  const auto& g = Golden::get().json().at("ngram_real_config");
  ModelConfig c;
  c.vocab_size = g.at("vocab_size"), c.ngram_seed = g.at("seed"), c.ngram_vocab_base = g.at("base");
  c.ngram_size = 3, c.heads_per_ngram = g.at("heads").get<int64_t>() / 2, c.ngram_eos = 248044;
  NgramHash h = NgramHash::derive(c, 0);
  CHECK(h.multipliers == g.at("multipliers").get<std::vector<int64_t>>());
  CHECK(h.sizes == g.at("sizes").get<std::vector<int64_t>>());
  CHECK(h.padded_rows(128) == 320001536);
  // Every row a token list can reach is inside the table, also where products wrap around.
  const std::vector<int32_t> tokens = {248319, 0, 248044, 248319, 248318, 1, 123456, 248319};
  for (const auto& rows : all_rows(h, tokens))
    for (int64_t i = 0; i < h.heads(); ++i) {
      CHECK(rows[i] >= h.offsets[i]);
      CHECK(rows[i] < h.offsets[i] + h.sizes[i]);
    }
}

TEST_CASE("ngram: a second PLE layer takes the primes and the multipliers that follow") {
  ModelConfig c;
  c.vocab_size = 1000, c.ngram_vocab_base = 100, c.ngram_size = 3, c.heads_per_ngram = 1, c.ngram_eos = 5;
  const NgramHash first = NgramHash::derive(c, 0), second = NgramHash::derive(c, 1);
  CHECK(first.sizes == std::vector<int64_t>{101, 103});
  CHECK(second.sizes == std::vector<int64_t>{107, 109});
  CHECK(second.offsets == std::vector<int64_t>{0, 107});
  CHECK(first.multipliers != second.multipliers);
}
