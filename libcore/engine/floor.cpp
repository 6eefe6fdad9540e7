#include "libcore/engine/floor.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "libcore/format/exl3_linear.h"
#include "libcore/format/json_text.h"
#include "libcore/format/tensor_names.h"

namespace fnx {
namespace {

class Cost {
 public:
  Cost(const TensorSource& source, const ModelConfig& config, int64_t sequences, int64_t context)
      : source_(source), c_(config), sequences_(static_cast<double>(sequences)), context_(context) {}

  void layer(const std::string& name, LayerType type, bool ple) {
    if (ple)
      for (const char* part : {".ple.key_proj", ".ple.value_proj"}) linear(name + part);
    hyper_connection(name + ".attn_hyper_connection", true);
    if (type == LayerType::LinearAttention)
      linear_attention(name + ".linear_attn");
    else
      sparse_attention(name + ".self_attn");
    hyper_connection(name + ".mlp_hyper_connection", true);
    moe(name + ".mlp");
  }

  void hyper_connection(const std::string& name, bool inject) {
    linear(name + ".input_mix_weight_down");
    linear(name + ".input_mix_weight_up");
    if (inject) linear(name + ".block_inject_weight");
  }

  void linear(const std::string& name) {
    terms.push_back({family(name)});
    add(name, 1, terms.back());
  }

  std::vector<CostTerm> terms;

 private:
  static std::string family(const std::string& name) {
    const std::string whole = family_name(name);
    const size_t layer = whole.find("layers.*."), mixer = whole.find("hyper_connection_mixer");
    return layer != std::string::npos   ? whole.substr(layer + 9)
           : mixer != std::string::npos ? whole.substr(mixer)
                                        : whole;
  }

  void add(const std::string& name, double share, CostTerm& to) const {
    const std::optional<LinearInfo> info = describe_linear(source_, name);
    if (!info) throw Error(ErrorKind::Input, fmt::format("linear layer {} is missing", name));
    to.bytes += share * static_cast<double>(info->bytes);
    if (info->quantized) to.values += share * static_cast<double>(info->in) * static_cast<double>(info->out);
  }

  void state(const std::string& name, double bytes) { terms.push_back({family(name) + " state", sequences_ * bytes}); }

  void linear_attention(const std::string& name) {
    for (const char* part : {".in_proj_qkv", ".in_proj_z", ".in_proj_b", ".in_proj_a", ".out_proj"})
      linear(name + part);
    const int64_t delta = c_.gdn_value_heads * c_.gdn_key_dim * c_.gdn_value_dim;
    const int64_t conv = (c_.gdn_conv_kernel - 1) * c_.gdn_conv_width();
    state(name, 2 * sizeof(float) * static_cast<double>(delta + conv));
  }

  void sparse_attention(const std::string& name) {
    for (const char* part : {".q_proj", ".k_proj", ".v_proj", ".indexer.index_qk_proj", ".o_proj"}) linear(name + part);
    const int64_t tokens = std::min(context_, c_.index_budget + c_.index_ratio - 1);
    const int64_t blocks = context_ > c_.index_budget ? context_ / c_.index_ratio : 0;
    state(name, 2.0 * 2 * static_cast<double>(tokens * c_.kv_heads * c_.head_dim) +
                    sizeof(float) * static_cast<double>(blocks * c_.index_head_dim));
  }

  void moe(const std::string& name) {
    linear(name + ".gate");
    const auto experts = static_cast<double>(c_.experts), chosen = static_cast<double>(c_.experts_per_token);
    const double distinct = experts * (1 - std::pow(1 - chosen / experts, sequences_));
    terms.push_back({family(name) + ".experts"});
    for (int64_t e = 0; e < c_.experts; ++e)
      for (const char* part : {"gate_proj", "up_proj", "down_proj"})
        add(fmt::format("{}.experts.{}.{}", name, e, part), distinct / experts, terms.back());
    for (const char* part : {"gate_proj", "up_proj", "down_proj"}) linear(name + ".shared_expert." + part);
    linear(name + ".shared_expert_gate");
  }

  const TensorSource& source_;
  const ModelConfig& c_;
  const double sequences_;
  const int64_t context_;
};

const nlohmann::ordered_json* entry(const nlohmann::ordered_json& list, const std::string& name) {
  for (const auto& e : list)
    if (e.is_object() && e.contains("name") && e["name"] == name) return &e;
  return nullptr;
}

}  // namespace

std::vector<CostTerm> decode_cost(const TensorSource& source, const ModelConfig& config, int64_t sequences,
                                  int64_t context) {
  Cost cost(source, config, sequences, context);
  const std::string root = text_root(source);
  for (int64_t l = 0; l < config.layers(); ++l)
    cost.layer(fmt::format("{}.layers.{}", root, l), config.layer_types[static_cast<size_t>(l)],
               std::count(config.ple_layers.begin(), config.ple_layers.end(), l) > 0);
  cost.hyper_connection(root + ".hyper_connection_mixer", false);
  cost.linear(describe_linear(source, "lm_head") ? "lm_head" : root + ".embed_tokens");
  return std::move(cost.terms);
}

double floor_ns(std::span<const CostTerm> terms, const Ceilings& ceilings) {
  double sum = 0;
  for (const CostTerm& t : terms) sum += std::max(t.bytes / ceilings.read, t.values / ceilings.decode);
  return sum;
}

Ceilings load_ceilings(const std::filesystem::path& path) {
  const nlohmann::ordered_json receipt = read_json(path);
  const auto fail = [&](const std::string& what) {
    throw Error(ErrorKind::Input, fmt::format("{}: {}; give a receipt of fnx-kernel-bench", path.string(), what));
  };
  Ceilings out;
  try {
    for (const auto& series : receipt.at("measurements")) {
      const std::string name = series.at("name");
      const bool read = name == "ceiling/read", decode = name.starts_with("ceiling/decode/");
      if (!read && !decode) continue;
      const auto* counts = entry(receipt.at("result").at("cases"), name);
      if (counts == nullptr || series.at("unit") != "us") fail(fmt::format("{} has no counts in us", name));
      const double ns = 1e3 * series.at("median").get<double>();
      if (!(ns > 0)) fail(fmt::format("{} has a median of {} us", name, ns / 1e3));
      if (read) out.read = counts->at("moved_bytes").get<double>() / ns;
      if (decode) out.decode = std::max(out.decode, counts->at("trellis_values").get<double>() / ns);
    }
  } catch (const nlohmann::json::exception& e) {
    fail(e.what());
  }
  if (out.read <= 0) fail("it has no series ceiling/read");
  if (out.decode <= 0) fail("it has no series ceiling/decode");
  return out;
}

}  // namespace fnx
