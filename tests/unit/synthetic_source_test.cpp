#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <numeric>

#include "kernels/error.h"
#include "kernels/float16.h"
#include "kernels/random.h"
#include "libcore/format/exl3_linear.h"
#include "libcore/format/ngram_table.h"
#include "libcore/format/pack_survey.h"
#include "libcore/format/synthetic_source.h"
#include "libcore/measure/memory.h"
#include "tests/support/golden.h"

using namespace fnx;
using namespace fnx::test;

namespace {

SyntheticSource make(const std::string& spec, int threads = 0) {
  return SyntheticSource(SyntheticSpec::parse(spec), threads);
}

std::vector<std::byte> bytes_of(const TensorSource& source, const std::string& name) {
  const TensorData data = source.read(source.require(name));
  return {data.bytes.begin(), data.bytes.end()};
}

std::string refusal(const std::string& spec) {
  try {
    SyntheticSpec::parse(spec);
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::Usage);
    return e.what();
  }
  return "accepted";
}

// Share of 4000 random rows whose top-k holds each expert, most popular first.
std::vector<double> popularity(const SyntheticSource& source, int64_t experts, int64_t width, size_t k) {
  const TensorInfo& router = source.require("model.language_model.layers.0.mlp.gate.weight");
  const TensorData data = source.read(router);
  std::vector<double> weights(static_cast<size_t>(experts * width)), chosen(static_cast<size_t>(experts), 0);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = double{f16_to_f32(data.as<uint16_t>()[i])};
  constexpr int kRows = 4000;
  for (int row = 0; row < kRows; ++row) {
    std::vector<std::pair<double, int64_t>> logits;
    for (int64_t e = 0; e < experts; ++e) {
      double sum = 0;
      for (int64_t i = 0; i < width; ++i)
        sum += weights[static_cast<size_t>(e * width + i)] *
               (uniform(9, static_cast<uint64_t>(row), static_cast<uint64_t>(i)) - 0.5);
      logits.emplace_back(-sum, e);
    }
    std::partial_sort(logits.begin(), logits.begin() + static_cast<ptrdiff_t>(k), logits.end());
    for (size_t j = 0; j < k; ++j) chosen[static_cast<size_t>(logits[j].second)] += 1.0 / kRows;
  }
  std::sort(chosen.rbegin(), chosen.rend());
  return chosen;
}

}  // namespace

TEST_CASE("synthetic: a specification has one full spelling, and wrong ones are refused with what is known") {
  CHECK(SyntheticSpec::parse("synth:tiny").text() == "synth:tiny,seed=0,bits=3,layers=8,experts=32,skew=0");
  const std::string full = "synth:flash-next-4.05bpw,seed=18446744073709551615,bits=2.5,layers=2,experts=16,skew=1.1";
  CHECK(SyntheticSpec::parse(full).text() == full);
  CHECK(refusal("synth:flash").find("flash-next-3.05bpw, flash-next-4.05bpw, tiny") != std::string::npos);
  CHECK(refusal("synth:tiny,layer=2").find("unknown key \"layer\"; known are seed, bits") != std::string::npos);
  CHECK(refusal("synth:tiny,layers=0").find("layers=0: must be in 1 .. 256") != std::string::npos);
  CHECK(refusal("synth:tiny,experts=1e3").find("experts=1e3") != std::string::npos);
  CHECK(refusal("synth:tiny,bits=4.5").find("bits=4.5: must be 1 to 8, 1.5, 2.5 or 3.5") != std::string::npos);
  CHECK(refusal("synth:tiny,skew=nan").find("skew=nan") != std::string::npos);
  CHECK(refusal("synth:tiny,skew").find("skew=") != std::string::npos);
  CHECK_THROWS_AS(need_folder("synth:tiny"), Error);
  CHECK_NOTHROW(need_folder("pack"));
}

TEST_CASE("synthetic: tiny has the names, dtypes and shapes of the tiny checkpoint, widths aside") {
  const SyntheticSource source = make("synth:tiny");
  const Checkpoint& real = tiny_checkpoint();
  CHECK(source.tensors().size() == real.tensors().size());
  for (const TensorInfo& t : real.tensors()) {
    CAPTURE(t.name);
    const TensorInfo* own = source.find(t.name);
    REQUIRE(own);
    CHECK(own->dtype == t.dtype);
    REQUIRE(own->shape.size() == t.shape.size());
    const bool trellis = t.name.ends_with(".trellis");
    for (size_t axis = 0; axis + (trellis ? 1 : 0) < t.shape.size(); ++axis) CHECK(own->shape[axis] == t.shape[axis]);
  }
  const ModelConfig own = ModelConfig::parse(source.config_json()),
                    want = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  CHECK(own.layer_types == want.layer_types);
  CHECK(own.rope_theta == want.rope_theta);
  CHECK(own.rotary_dim == want.rotary_dim);
  CHECK(own.index_budget == want.index_budget);
  CHECK(own.max_position_embeddings == want.max_position_embeddings);
  CHECK(own.ngram_seed == want.ngram_seed);
  CHECK(source.stop_ids() == load_stop_ids(fixture("flashnext-tiny")));
}

TEST_CASE("synthetic: bytes are the same whoever reads them, in pieces or whole, and change with seed and name") {
  const SyntheticSource one = make("synth:tiny,layers=2,experts=8", 1), many = make("synth:tiny,layers=2,experts=8", 3);
  const SyntheticSource other = make("synth:tiny,layers=2,experts=8,seed=1");
  CHECK(one.digest() == many.digest());
  CHECK(one.digest() != other.digest());
  uint64_t total = 0;
  for (const TensorInfo& t : one.tensors()) {
    CAPTURE(t.name);
    const std::vector<std::byte> whole = bytes_of(one, t.name);
    REQUIRE(whole.size() == t.bytes);
    total += t.bytes;
    CHECK(whole == bytes_of(many, t.name));
    std::vector<std::byte> pieces(whole.size());
    for (uint64_t at = 0; at < t.bytes; at += 1000)
      one.fill(t, at, std::span(pieces).subspan(at, std::min<uint64_t>(1000, t.bytes - at)));
    CHECK(whole == pieces);
  }
  CHECK(total == one.bytes());
  const std::string up = "model.language_model.layers.1.mlp.experts.7.up_proj.trellis";
  const std::string gate = "model.language_model.layers.1.mlp.experts.7.gate_proj.trellis";
  CHECK(bytes_of(one, up) != bytes_of(one, gate));
  CHECK(bytes_of(one, up) != bytes_of(other, up));
}

TEST_CASE("synthetic: values lie where their use wants them") {
  const SyntheticSource source = make("synth:tiny,layers=4,experts=8");
  const auto check = [&](const std::string& name, double mean, double deviation) {
    const TensorInfo& t = source.require(name);
    const TensorData data = source.read(t);
    double sum = 0, square = 0;
    for (int64_t i = 0; i < t.elements(); ++i) {
      const uint16_t raw = data.as<uint16_t>()[i];
      const double v = double{t.dtype == DType::BF16 ? bf16_to_f32(raw) : f16_to_f32(raw)};
      sum += v, square += v * v;
    }
    const auto n = static_cast<double>(t.elements());
    CAPTURE(name);
    CHECK(std::abs(sum / n - mean) < 4 * deviation / std::sqrt(n));
    CHECK(std::sqrt(square / n - sum / n * sum / n) == doctest::Approx(deviation).epsilon(0.1));
  };
  check("model.language_model.embed_tokens.weight", 0, 1);
  check("lm_head.svh", 0, 5.0 / 16);
  check("lm_head.suh", 0, 1);
  check("model.language_model.layers.3.self_attn.q_norm.weight", 0, 0.0577);
  check("model.language_model.layers.0.linear_attn.norm.weight", 1, 0.0577);
  check("model.language_model.layers.2.mlp.gate.weight", 0, 3.0 / 16);
  CHECK(raw_norm_problems(survey_norms(source)).empty());
}

TEST_CASE("synthetic: bits, layers and experts shape the model; published widths hold elsewhere") {
  const SyntheticSource source = make("synth:flash-next-3.05bpw,bits=2.5,layers=4,experts=3");
  const auto half_bits = [&](const std::string& name) { return describe_linear(source, name).value().half_bits; };
  const std::string root = "model.language_model.layers.";
  CHECK(half_bits(root + "3.mlp.experts.2.down_proj") == 5);
  CHECK(half_bits("mtp.layers.0.mlp.experts.2.up_proj") == 5);
  CHECK(half_bits(root + "3.mlp.shared_expert.up_proj") == 12);
  CHECK(half_bits(root + "3.self_attn.indexer.index_qk_proj") == 8);
  CHECK(half_bits(root + "0.linear_attn.in_proj_qkv") == 12);
  CHECK(half_bits("lm_head") == 10);
  CHECK(source.find(root + "4.mlp.gate.weight") == nullptr);
  CHECK(source.find(root + "0.mlp.experts.3.up_proj.trellis") == nullptr);
  CHECK(ModelConfig::parse(source.config_json()).experts_per_token == 3);
  CHECK(ModelConfig::parse(make("synth:tiny,layers=1").config_json()).ple_layers.empty());
}

TEST_CASE("synthetic: the published geometry has its tensors, and a table of 33 GB that takes one period of memory") {
  const SyntheticSource source = make("synth:flash-next-3.05bpw");
  const ModelConfig config = ModelConfig::parse(source.config_json());
  CHECK(source.tensors().size() == 303126);
  CHECK(source.find("model.language_model.layers.47.mlp.experts.511.gate_proj.trellis")->bytes == 614400);
  const std::string name = "model.language_model.layers.1.ple.ple_embedding.ngram_embedding";
  const NgramTable table(source, name, config.ngram_heads(), config.ngram_dim());
  CHECK(table.rows() == 320001536);
  CHECK(table.bits() == 5);
  const auto row = [&](int64_t i) {
    const std::byte* at = table.row(i);
    return std::vector<std::byte>(at, at + table.row_bytes());
  };
  CHECK(row(5) == row(5 + 600 * kTablePeriod));
  CHECK(row(kTablePeriod - 1) == row(3 * kTablePeriod - 1));
  CHECK(row(5) != row(6));
  for (const int64_t i : {int64_t{0}, int64_t{12345}, table.rows() - 1}) {
    uint16_t scale = 0;
    std::memcpy(&scale, table.row(i), 2);
    CHECK(std::abs(f16_to_f32(scale) - 1) <= 0.25f);
  }
  // The same bytes as fill gives, across a period's end.
  const TensorInfo& t = source.require(name + ".trellis");
  std::vector<std::byte> around(4096);
  const uint64_t at = static_cast<uint64_t>(kTablePeriod) * static_cast<uint64_t>(table.row_bytes()) - 2048;
  source.fill(t, at, around);
  CHECK(std::memcmp(around.data(), table.row(0) + at, around.size()) == 0);
}

TEST_CASE("synthetic: what was read and let go takes no memory") {
  const SyntheticSource source = make("synth:flash-next-3.05bpw,layers=1,experts=64");
  reset_peak_rss();
  [[maybe_unused]] const uint64_t before = peak_rss_bytes();
  uint64_t read = 0;
  for (const TensorInfo& t : source.tensors())
    if (t.name.find(".experts.") != std::string::npos) read += source.read(t).bytes.size();
  CHECK(read > uint64_t{200} << 20);
#ifndef __SANITIZE_ADDRESS__
  CHECK(peak_rss_bytes() - before < uint64_t{16} << 20);
#endif
}

TEST_CASE("synthetic: skew makes few experts popular, without it all are nearly alike") {
  const std::vector<double> even = popularity(make("synth:tiny"), 32, 256, 4);
  const std::vector<double> skewed = popularity(make("synth:tiny,skew=1"), 32, 256, 4);
  CHECK(even.front() < 1.5 * 4 / 32);
  CHECK(even.back() > 4.0 / 32 / 1.5);
  // Wanted: 1/4 for ranks 1 to 6, then 1.554 / rank; a common threshold holds on average only.
  CHECK(std::accumulate(skewed.begin(), skewed.begin() + 4, 0.0) / 4 == doctest::Approx(0.25).epsilon(0.15));
  CHECK(skewed[15] == doctest::Approx(1.554 / 16).epsilon(0.2));
  CHECK(skewed.back() == doctest::Approx(1.554 / 32).epsilon(0.2));
}
