#include <doctest/doctest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "kernels/kernel_bench.h"
#include "libcore/engine/floor.h"
#include "libcore/format/synthetic_source.h"

using namespace fnx;

namespace {

std::map<std::string, BenchOperation> by_name(int64_t rows) {
  std::map<std::string, BenchOperation> out;
  for (const BenchOperation& op : bench_operations({rows})) out[op.name] = op;
  return out;
}

}  // namespace

TEST_CASE("kernel bench: operations have the sizes of the published geometry") {
  const SyntheticSource source(SyntheticSpec::parse("synth:flash-next-3.05bpw"));
  const ModelConfig c = ModelConfig::parse(source.config_json());
  const BenchModel m;
  CHECK(m.hidden == c.hidden_size);
  CHECK(m.streams == c.streams);
  CHECK(m.hc_rank == c.hc_rank);
  CHECK(m.vocabulary == c.vocab_size);
  CHECK(m.experts == c.experts);
  CHECK(m.chosen == c.experts_per_token);
  CHECK(m.expert_width == c.expert_size);
  CHECK(m.key_heads == c.gdn_key_heads);
  CHECK(m.value_heads == c.gdn_value_heads);
  CHECK(m.gdn_dim == c.gdn_key_dim);
  CHECK(m.gdn_dim == c.gdn_value_dim);
  CHECK(m.gdn_taps == c.gdn_conv_kernel);
  CHECK(m.heads == c.heads);
  CHECK(m.kv_heads == c.kv_heads);
  CHECK(m.head_dim == c.head_dim);
  CHECK(m.rotary == c.rotary_dim);
  CHECK(m.index_heads == c.index_heads);
  CHECK(m.index_dim == c.index_head_dim);
  CHECK(m.index_ratio == c.index_ratio);
  CHECK(m.index_blocks == c.index_blocks());
  CHECK(m.ngram_heads == c.ngram_heads());
  CHECK(m.ngram_dim == c.ngram_dim());
  CHECK(m.ple_taps == c.ple_conv_kernel);
  CHECK(m.ple_dilation == c.ngram_size);
}

TEST_CASE("kernel bench: operations count the weights and states that the floor of a round does") {
  const SyntheticSource source(SyntheticSpec::parse("synth:flash-next-3.05bpw"));
  const ModelConfig config = ModelConfig::parse(source.config_json());
  for (const int64_t context : {32768, 262144}) {
    std::map<std::string, double> bytes;
    for (const CostTerm& t : decode_cost(source, config, 1, context)) bytes[t.name] += t.bytes;
    const auto one = by_name(1);
    const auto at = [&](const std::string& name) { return one.at(name + " at " + std::to_string(context)).bytes; };
    const double weights = bytes["attn_hyper_connection.input_mix_weight_down"] +
                           bytes["attn_hyper_connection.input_mix_weight_up"] +
                           bytes["attn_hyper_connection.block_inject_weight"];
    CHECK(one.at("hc_mix").bytes == doctest::Approx(weights / 48).epsilon(0.02));
    CHECK(one.at("gdn").bytes == doctest::Approx(bytes["linear_attn state"] / 36).epsilon(0.05));
    CHECK(at("qsa_select") + at("qsa_attend") == doctest::Approx(bytes["self_attn state"] / 12).epsilon(0.02));
    CHECK(one.at("linear 512 + 1 x 2560").bytes ==
          doctest::Approx((bytes["mlp.gate"] + bytes["mlp.shared_expert_gate"]) / 48).epsilon(0.01));
  }
}

TEST_CASE(
    "kernel bench: every operation has its floor at every number of rows, and parts move no less than the whole") {
  const std::vector<BenchOperation> list = bench_operations({1, 16});
  std::set<std::pair<std::string, int64_t>> names;
  std::set<BenchKind> kinds;
  for (const BenchOperation& op : list) {
    CAPTURE(op.name);
    CHECK(op.bytes > 0);
    CHECK(names.emplace(op.name, op.rows).second);
    kinds.insert(op.kind);
  }
  CHECK(kinds.size() == static_cast<size_t>(BenchKind::SampleTopK) + 1);
  const auto one = by_name(1), sixteen = by_name(16);
  CHECK(list.size() == one.size() + sixteen.size());
  for (const auto& [name, op] : one) CHECK(op.bytes < sixteen.at(name).bytes);
  CHECK(sixteen.at("gdn").bytes > 15 * one.at("gdn").bytes);         // its state is a sequence's
  CHECK(sixteen.at("hc_mix").bytes < 1.2 * one.at("hc_mix").bytes);  // weights are read once
  for (const auto& ops : {one, sixteen}) {
    CHECK(ops.at("hc_down").bytes + ops.at("hc_up").bytes > ops.at("hc_mix").bytes);
    CHECK(ops.at("gdn_conv").bytes + ops.at("gdn_recurrence").bytes + ops.at("gdn_norm").bytes > ops.at("gdn").bytes);
  }
  CHECK(one.at("qsa_select at 262144").context == 262144);
  CHECK(one.at("qsa_select at 262144").bytes > 7 * one.at("qsa_select at 32768").bytes);
  CHECK(one.at("qsa_attend at 262144").bytes == one.at("qsa_attend at 32768").bytes);
}

TEST_CASE("kernel bench: hyper-connections, norms, GDN, router, index and attention are limited, others are not") {
  for (const BenchOperation& op : bench_operations({1})) {
    CAPTURE(op.name);
    const bool asked = op.name.starts_with("hc_") || op.name == "grouped_norm" || op.name.starts_with("gdn") ||
                       op.name.starts_with("router") || op.name.starts_with("linear 512") ||
                       op.name.starts_with("qsa_");
    CHECK(op.limited == asked);
  }
  CHECK(operation_limit_us(0.1) == 3);
  CHECK(operation_limit_us(1.5) == 3);
  CHECK(operation_limit_us(8.1) == doctest::Approx(16.2));
}
