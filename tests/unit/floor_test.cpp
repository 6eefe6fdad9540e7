#include <doctest/doctest.h>

#include <algorithm>
#include <map>

#include "kernels/error.h"
#include "libcore/engine/floor.h"
#include "libcore/format/synthetic_source.h"
#include "tests/support/golden.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

namespace {

struct Total {
  double bytes = 0, values = 0;
};

std::map<std::string, Total> by_family(const std::vector<CostTerm>& terms) {
  std::map<std::string, Total> out;
  for (const CostTerm& t : terms) out[t.name].bytes += t.bytes, out[t.name].values += t.values;
  return out;
}

}  // namespace

TEST_CASE("floor: a token of the published geometry reads and decodes what the layout adds up to") {
  const SyntheticSource source(SyntheticSpec::parse("synth:flash-next-3.05bpw"));
  const ModelConfig config = ModelConfig::parse(source.config_json());
  const std::vector<CostTerm> terms = decode_cost(source, config, 1, 64);
  const auto families = by_family(terms);
  CHECK(families.at("linear_attn.in_proj_qkv").values == 36.0 * 10240 * 2560);
  // Ten of 512 experts of three matrices, 48 layers.
  CHECK(families.at("mlp.experts").values == doctest::Approx(48 * 10 * 3 * 640.0 * 2560).epsilon(1e-9));
  CHECK(families.at("mlp.experts").bytes == doctest::Approx(48.0 * 10 * (1843200 + 3 * (2 * 3200 + 4))).epsilon(1e-9));
  CHECK(families.at("mlp.gate").bytes == 48 * 512 * 2560 * 2.0);
  CHECK(families.at("mlp.gate").values == 0);
  CHECK(families.at("lm_head").values == 248320.0 * 2560);
  CHECK(families.at("linear_attn state").bytes == 36 * 8.0 * (48 * 128 * 128 + 3 * 10240));
  CHECK(families.at("hyper_connection_mixer.input_mix_weight_up").bytes == 10240 * 320 * 2.0);
  double values = 0;
  for (const CostTerm& t : terms) values += t.values;
  CHECK(values == doctest::Approx(5.93e9).epsilon(0.005));
  // About 1.43 ms where 4537 GB/s are read and 5.6e12 values a second decoded.
  CHECK(floor_ns(terms, {4537, 5600}) == doctest::Approx(1.43e6).epsilon(0.02));
  CHECK(floor_ns(terms, {4537, 1e12}) < floor_ns(terms, {4537, 5600}));
}

TEST_CASE("floor: more sequences read weights once, more experts, and their own state") {
  const ModelConfig config = ModelConfig::load(fixture("flashnext-tiny/config.json"));
  const auto one = by_family(decode_cost(tiny_checkpoint(), config, 1, 100));
  const auto eight = by_family(decode_cost(tiny_checkpoint(), config, 8, 100));
  const auto longer = by_family(decode_cost(tiny_checkpoint(), config, 1, 2000));
  CHECK(one.size() == eight.size());
  CHECK(eight.at("lm_head").bytes == one.at("lm_head").bytes);
  CHECK(eight.at("linear_attn state").bytes == 8 * one.at("linear_attn state").bytes);
  const double share = (1 - std::pow(1 - 4.0 / 32, 8)) * 32 / 4;
  CHECK(eight.at("mlp.experts").bytes == doctest::Approx(share * one.at("mlp.experts").bytes));
  // Beyond the index budget a row reads its budget of keys and values, and every block's index key.
  CHECK(one.at("self_attn state").bytes == 2 * 100 * 2 * 256 * 4.0);
  CHECK(longer.at("self_attn state").bytes == 2 * (259 * 2 * 256 * 4.0 + 500 * 128 * 4.0));
}

TEST_CASE("floor: ceilings come from a receipt of the kernel bench, and others are refused by name") {
  const TempDir dir;
  const auto write = [&](const char* read, const char* extra) {
    write_file(dir / "bench.json", std::string(R"({"measurements": [{"name": ")") + read +
                                       R"(", "unit": "us", "median": 2.0},
                 {"name": "ceiling/decode/3", "unit": "us", "median": 4.0},
                 {"name": "ceiling/decode/4", "unit": "us", "median": 2.0}], "result": {"cases": [
                 {"name": "ceiling/read", "moved_bytes": 9000000, "trellis_values": 0},
                 {"name": "ceiling/decode/3", "moved_bytes": 0, "trellis_values": 8000000})" +
                                       extra + R"(]}})");
    return dir / "bench.json";
  };
  const char* kFour = R"(, {"name": "ceiling/decode/4", "moved_bytes": 0, "trellis_values": 10000000})";
  const Ceilings c = load_ceilings(write("ceiling/read", kFour));
  CHECK(c.read == doctest::Approx(4500));
  CHECK(c.decode == doctest::Approx(5000));
  CHECK_THROWS_WITH_AS(load_ceilings(write("ceiling/copy", kFour)), doctest::Contains("no series ceiling/read"), Error);
  CHECK_THROWS_WITH_AS(load_ceilings(write("ceiling/read", "")), doctest::Contains("ceiling/decode/4 has no counts"),
                       Error);
  write_file(dir / "other.json", "{}");
  CHECK_THROWS_WITH_AS(load_ceilings(dir / "other.json"), doctest::Contains("fnx-kernel-bench"), Error);
}
