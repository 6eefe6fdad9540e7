// Rules of single operations on the cpu backend: ties, NaN, boundaries, row independence.
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>

#include "kernels/cpu/dense.h"
#include "kernels/ops.h"
#include "tests/support/arrays.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct Routed {
  std::vector<int32_t> ids;
  std::vector<float> weights;
};

Routed route(std::vector<float> logits, int64_t rows, int64_t k, bool normalise = true) {
  const int64_t experts = static_cast<int64_t>(logits.size()) / rows;
  Routed r{std::vector<int32_t>(rows * k), std::vector<float>(rows * k)};
  const auto stream = cpu_backend().make_stream();
  cpu_backend().router(*stream, normalise, f32(logits, {rows, experts}), i32(r.ids, {rows, k}),
                       f32(r.weights, {rows, k}));
  return r;
}

std::vector<int32_t> draw(std::vector<float> logits, int64_t rows, int64_t valid,
                          const std::vector<SampleParams>& params) {
  std::vector<int32_t> ids(rows);
  const auto stream = cpu_backend().make_stream();
  cpu_backend().sample(*stream, valid, false, params_view(params),
                       f32(logits, {rows, static_cast<int64_t>(logits.size()) / rows}), i32(ids, {rows}));
  return ids;
}

// One row at position `position` of a sequence whose pooled index keys are given.
std::vector<int32_t> select(const std::vector<std::vector<float>>& keys, std::vector<float> query, int64_t blocks,
                            int64_t position) {
  QsaWeights w;
  w.heads = 1, w.kv_heads = 1, w.head_dim = 2, w.index_heads = 1, w.index_dim = 2, w.ratio = 4, w.blocks = blocks;
  std::vector<float> index_keys;
  for (const auto& k : keys) index_keys.insert(index_keys.end(), k.begin(), k.end());
  const auto pages = static_cast<int64_t>(keys.size());
  std::vector<int32_t> table(pages), selected(blocks, -7);
  std::iota(table.begin(), table.end(), 0);
  KvCache kv;
  kv.page_tokens = 4;
  kv.index_keys = f32(index_keys, {pages, 1, 2});
  query.insert(query.end(), {0, 0});  // the raw key, which selection does not read
  QsaRows rows;
  rows.index = f32(query, {1, 2, 2});
  rows.selected = i32(selected, {1, blocks});
  const Lane lane{0, 0, 1, static_cast<int32_t>(position)};
  Batch batch;
  batch.lanes = {&lane, 1}, batch.rows = 1;
  batch.block_table = i32(table, {1, pages});
  const auto stream = cpu_backend().make_stream();
  cpu_backend().qsa_select(*stream, w, batch, rows, kv);
  return selected;
}

}  // namespace

TEST_CASE("router: an all-zero row takes the lowest ids with equal weights") {
  const Routed r = route(std::vector<float>(16, 0.0f), 1, 4);
  CHECK(r.ids == std::vector<int32_t>{0, 1, 2, 3});
  for (float w : r.weights) CHECK(w == 0.25f);
}

TEST_CASE("router: a tie exactly at the cut takes the lower id") {
  const Routed r = route({0, 5, 1, 3, 1, 1, 4, 1}, 1, 4);
  CHECK(r.ids == std::vector<int32_t>{1, 6, 3, 2});
}

TEST_CASE("router: a NaN row takes the lowest ids and leaves its neighbours untouched") {
  std::vector<float> logits = normals(3 * 8, 1);
  const Routed clean = route(logits, 3, 3);
  for (int i = 8; i < 16; ++i) logits[i] = NAN;
  const Routed r = route(logits, 3, 3);
  for (int j = 0; j < 3; ++j) {
    CHECK(r.ids[3 + j] == j);
    CHECK(std::isnan(r.weights[3 + j]));
    for (int row : {0, 2}) {
      CHECK(r.ids[row * 3 + j] == clean.ids[row * 3 + j]);
      CHECK(r.weights[row * 3 + j] == clean.weights[row * 3 + j]);
    }
  }
}

TEST_CASE("router: weights sum to 1 when normalised and are the probabilities when not") {
  const std::vector<float> logits = normals(32, 2);
  const Routed normal = route(logits, 1, 4), raw = route(logits, 1, 4, false);
  CHECK(normal.ids == raw.ids);
  CHECK(std::accumulate(normal.weights.begin(), normal.weights.end(), 0.0) == doctest::Approx(1).epsilon(1e-6));
  double total = 0;
  for (float x : logits) total += std::exp(double{x});
  for (int j = 0; j < 4; ++j)
    CHECK(raw.weights[j] == doctest::Approx(std::exp(double{logits[raw.ids[j]]}) / total).epsilon(1e-6));
}

TEST_CASE("selection: every complete block while they fit, the tail's block never") {
  const std::vector<std::vector<float>> keys(6, {1, 0});
  CHECK(select(keys, {1, 0}, 4, 0) == std::vector<int32_t>{-1, -1, -1, -1});
  CHECK(select(keys, {1, 0}, 4, 2) == std::vector<int32_t>{-1, -1, -1, -1});
  CHECK(select(keys, {1, 0}, 4, 3) == std::vector<int32_t>{0, -1, -1, -1});
  CHECK(select(keys, {1, 0}, 4, 14) == std::vector<int32_t>{0, 1, 2, -1});
  CHECK(select(keys, {1, 0}, 4, 15) == std::vector<int32_t>{0, 1, 2, 3});
}

TEST_CASE("selection: tied scores take the lower block, higher scores win, ids ascend") {
  CHECK(select(std::vector<std::vector<float>>(6, {1, 0}), {1, 0}, 4, 23) == std::vector<int32_t>{0, 1, 2, 3});
  CHECK(select({{1, 0}, {3, 0}, {1, 0}, {2, 0}, {1, 0}, {5, 0}}, {1, 0}, 4, 23) == std::vector<int32_t>{0, 1, 3, 5});
  // Negative products count as zero, so they tie with each other.
  CHECK(select({{-1, 0}, {-3, 0}, {-2, 0}, {0, 0}, {-9, 0}, {5, 0}}, {1, 0}, 3, 23) == std::vector<int32_t>{0, 1, 5});
}

TEST_CASE("sample: greedy takes the highest logit, ties to the lower id, never padding, never NaN") {
  const SampleParams greedy;
  CHECK(draw({1, 7, 7, 3}, 1, 4, {greedy}) == std::vector<int32_t>{1});
  CHECK(draw({1, 2, 9, 9}, 1, 2, {greedy}) == std::vector<int32_t>{1});
  CHECK(draw({NAN, 2, NAN, 1}, 1, 4, {greedy}) == std::vector<int32_t>{1});
  CHECK(draw({NAN, NAN}, 1, 2, {greedy}) == std::vector<int32_t>{0});
}

TEST_CASE("sample: draws follow the filtered distribution and depend on seed, stream and position alone") {
  const std::vector<float> logits = {2, 1, 0, -1, 30};  // the last one is padding
  std::vector<int> count(5);
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    SampleParams p;
    p.temperature = 1, p.seed = 7, p.position = i;
    ++count[draw(logits, 1, 4, {p})[0]];
  }
  double total = 0;
  for (int i = 0; i < 4; ++i) total += std::exp(double{logits[i]});
  for (int i = 0; i < 4; ++i) {
    const double p = std::exp(double{logits[i]}) / total;
    CHECK(std::abs(count[i] / double{kDraws} - p) < 5 * std::sqrt(p * (1 - p) / kDraws));
  }
  CHECK(count[4] == 0);
  // The same row alone and beside others.
  SampleParams p;
  p.temperature = 1, p.seed = 3, p.stream = 5, p.position = 11;
  SampleParams q = p;
  q.position = 12;
  std::vector<float> two = logits;
  two.insert(two.end(), logits.begin(), logits.end());
  CHECK(draw(logits, 1, 4, {p})[0] == draw(two, 2, 4, {q, p})[1]);
}

TEST_CASE("sample: top-k, top-p and min-p cut the candidates where they say") {
  const std::vector<float> logits = {std::log(0.4f), std::log(0.3f), std::log(0.2f), std::log(0.1f)};
  const auto support = [&](SampleParams p) {
    std::vector<int> seen(4);
    p.temperature = 1;
    for (int i = 0; i < 400; ++i) p.position = i, seen[draw(logits, 1, 4, {p})[0]] = 1;
    return std::accumulate(seen.begin(), seen.end(), 0);
  };
  SampleParams p;
  CHECK(support(p) == 4);
  p.top_k = 2;
  CHECK(support(p) == 2);
  p = {}, p.top_p = 0.5f;
  CHECK(support(p) == 2);
  p = {}, p.top_p = 0.05f;
  CHECK(support(p) == 1);
  p = {}, p.min_p = 0.6f;
  CHECK(support(p) == 2);
}

TEST_CASE("linear: the bits of a row do not depend on the number of rows or the instruction set") {
  constexpr int64_t kIn = 72, kRows = 4;
  const std::vector<float> x = normals(kIn * kRows, 4), w = normals(kIn * cpu::kPanel, 5);
  std::vector<double> want(kRows * cpu::kPanel);
  for (int64_t r = 0; r < kRows; ++r)
    for (int64_t c = 0; c < cpu::kPanel; ++c) {
      double sum = 0;
      for (int64_t k = 0; k < kIn; ++k) sum += double{x[r * kIn + k]} * double{w[k * cpu::kPanel + c]};
      want[r * cpu::kPanel + c] = sum;
    }
  for (const cpu::DenseIsa* const* isa = cpu::dense_isas(); *isa != nullptr; ++isa)
    for (int rows = 1; rows <= kRows; ++rows) {
      CAPTURE((*isa)->name);
      CAPTURE(rows);
      std::vector<double> got(kRows * cpu::kPanel);
      (*isa)->f32(w.data(), kIn, x.data(), kIn, rows, got.data());
      CHECK(std::memcmp(got.data(), want.data(), rows * cpu::kPanel * sizeof(double)) == 0);
    }
}

TEST_CASE("linear: EXL3 with signs, scales and bias equals the definition in fp64") {
  // x * suh, Hadamard, decoded matrix, Hadamard, * svh, + bias; one 128 x 256 layer of random words.
  constexpr int64_t kIn = 128, kOut = 256;
  for (const int half_bits : {2, 5, 6, 7, 12, 16}) {
    std::mt19937 random(half_bits);
    std::vector<uint16_t> trellis(kIn / 16 * kOut / 16 * exl3::tile_words(half_bits));
    for (uint16_t& t : trellis) t = static_cast<uint16_t>(random());
    LinearSource s;
    s.in = kIn, s.out = kOut;
    s.trellis = trellis.data(), s.codebook = exl3::Codebook::Mul1, s.half_bits = half_bits;
    s.suh = normals(kIn, 1), s.svh = normals(kOut, 2), s.bias = normals(kOut, 3);
    std::vector<double> wq(kIn * kOut);
    for (int64_t tk = 0; tk < kIn / 16; ++tk)
      for (int64_t tn = 0; tn < kOut / 16; ++tn)
        for (int p = 0; p < 256; ++p) {
          const uint16_t* tile = trellis.data() + (tk * (kOut / 16) + tn) * exl3::tile_words(half_bits);
          wq[(tk * 16 + exl3::value_row(p)) * kOut + tn * 16 + exl3::value_column(p)] =
              f16_to_f32(exl3::decode_state(exl3::tile_state(tile, p, half_bits), exl3::Codebook::Mul1));
        }
    const auto sign = [](int64_t i, int64_t j) { return __builtin_popcountll(i & j) % 2 == 0 ? 1.0 : -1.0; };
    std::vector<float> x = normals(kIn, 6), y(kOut);
    std::vector<double> xh(kIn), z(kOut);
    for (int64_t i = 0; i < kIn; ++i)
      for (int64_t j = 0; j < kIn; ++j) xh[i] += sign(i, j) * x[j] * s.suh[j] / std::sqrt(128.0);
    for (int64_t k = 0; k < kIn; ++k)
      for (int64_t n = 0; n < kOut; ++n) z[n] += xh[k] * wq[k * kOut + n];
    const auto linear = cpu_backend().load_linear(s);
    const auto stream = cpu_backend().make_stream();
    cpu_backend().linear(*stream, *linear, f32(x, {1, kIn}), f32(y, {1, kOut}));
    double worst = 0;
    for (int64_t n = 0; n < kOut; ++n) {
      double v = 0;
      for (int64_t j = 0; j < 128; ++j) v += sign(n % 128, j) * z[n / 128 * 128 + j] / std::sqrt(128.0);
      worst = std::max(worst, std::abs(v * s.svh[n] + s.bias[n] - y[n]));
    }
    CHECK(worst < 2e-5);
  }
}
