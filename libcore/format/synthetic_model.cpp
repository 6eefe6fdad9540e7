#include "libcore/format/synthetic_model.h"

#include <fmt/format.h>

#include <charconv>
#include <cmath>

#include "kernels/error.h"
#include "kernels/exl3.h"

namespace fnx {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMostLayers = 256, kMostExperts = 4096;
constexpr double kMostSkew = 4;

// What sets the models apart; the rest of the config is the same in all.
struct Geometry {
  const char* name;
  const char* config;  // keys of text_config
  double mean_bits;
  PackWidths widths;
  std::vector<int32_t> stop_ids;
};

constexpr const char* kPublished = R"({
  "vocab_size": 248320, "hidden_size": 2560, "num_hidden_layers": 48, "num_attention_heads": 24,
  "max_position_embeddings": 262144, "linear_num_key_heads": 16, "linear_num_value_heads": 48,
  "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640, "num_experts": 512, "num_experts_per_tok": 10,
  "eos_token_id": 248044, "hc_lowrank": 320, "ple_embed_dim": 2560, "heads_per_ngram": 8,
  "ngram_vocab_size_base": 20000000, "indexer_budget": 2048, "rope_theta": 10000000})";

constexpr const char* kTiny = R"({
  "vocab_size": 4096, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4,
  "max_position_embeddings": 8192, "linear_num_key_heads": 1, "linear_num_value_heads": 3,
  "moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts": 32, "num_experts_per_tok": 4,
  "eos_token_id": 4000, "hc_lowrank": 32, "ple_embed_dim": 640, "heads_per_ngram": 2,
  "ngram_vocab_size_base": 4000, "indexer_budget": 256, "rope_theta": 100000})";

constexpr const char* kCommon = R"({
  "model_type": "qwen4_exp_text", "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": false,
  "attention_bias": false, "num_key_value_heads": 2, "head_dim": 256, "linear_conv_kernel_dim": 4,
  "linear_key_head_dim": 128, "linear_value_head_dim": 128, "norm_topk_prob": true, "hc_count": 4,
  "ple_conv_kernel_size": 4, "ngram_size": 3, "make_ngram_vocab_size_divisible_by": 128, "seed": 1234,
  "indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 128, "indexer_compress_ratio": 4,
  "output_gate_type": "sigmoid", "mtp_num_hidden_layers": 1, "dtype": "bfloat16"})";

const std::vector<Geometry>& geometries() {
  static const std::vector<Geometry> all = {
      {"flash-next-3.05bpw", kPublished, 3.05, {12, 8, 6, 12, 10, 10, 5}, {248046, 248044}},
      {"flash-next-4.05bpw", kPublished, 4.05, {12, 8, 8, 12, 12, 10, 6}, {248046, 248044}},
      {"tiny", kTiny, 3.05, {12, 8, 6, 12, 10, 10, 5}, {4002, 4000}}};
  return all;
}

const Geometry& geometry_of(std::string_view name) {
  std::string known;
  for (const Geometry& g : geometries()) {
    if (g.name == name) return g;
    known += (known.empty() ? "" : ", ") + std::string(g.name);
  }
  throw Error(ErrorKind::Usage, fmt::format("synth:{}: there is no such model; known are {}", name, known));
}

template <class T>
T parse_number(std::string_view key, std::string_view text, T least, T most) {
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || !(value >= least && value <= most))
    throw Error(ErrorKind::Usage, fmt::format("synth: {}={}: must be in {} .. {}", key, text, least, most));
  return value;
}

}  // namespace

SyntheticSpec SyntheticSpec::parse(std::string_view text) {
  if (is_synthetic(text)) text.remove_prefix(6);
  const auto take = [&] {
    const size_t comma = std::min(text.find(','), text.size());
    const std::string_view part = text.substr(0, comma);
    text.remove_prefix(std::min(comma + 1, text.size()));
    return part;
  };
  SyntheticSpec spec;
  const Geometry& g = geometry_of(take());
  const Json config = Json::parse(g.config);
  spec.name = g.name;
  spec.expert_half_bits = g.widths.experts;
  spec.layers = config["num_hidden_layers"];
  spec.experts = config["num_experts"];
  while (!text.empty()) {
    const std::string_view part = take(), key = part.substr(0, part.find('='));
    const std::string_view value = part.substr(std::min(part.size(), key.size() + 1));
    if (key == "seed") {
      spec.seed = parse_number<uint64_t>(key, value, 0, UINT64_MAX);
    } else if (key == "bits") {
      const auto half = 2 * parse_number<double>(key, value, 1, 8);
      spec.expert_half_bits = static_cast<int>(half);
      if (half != spec.expert_half_bits || !exl3::width_supported(exl3::Codebook::Mul1, spec.expert_half_bits))
        throw Error(ErrorKind::Usage, fmt::format("synth: bits={}: must be 1 to 8, 1.5, 2.5 or 3.5", value));
    } else if (key == "layers") {
      spec.layers = parse_number<int64_t>(key, value, 1, kMostLayers);
    } else if (key == "experts") {
      spec.experts = parse_number<int64_t>(key, value, 1, kMostExperts);
    } else if (key == "skew") {
      spec.skew = parse_number<double>(key, value, 0, kMostSkew);
    } else {
      throw Error(ErrorKind::Usage,
                  fmt::format("synth: unknown key \"{}\"; known are seed, bits, layers, experts and skew", key));
    }
  }
  return spec;
}

std::string SyntheticSpec::text() const {
  return fmt::format("synth:{},seed={},bits={},layers={},experts={},skew={}", name, seed, expert_half_bits / 2.0,
                     layers, experts, skew);
}

nlohmann::ordered_json synthetic_config(const SyntheticSpec& spec) {
  const Geometry& g = geometry_of(spec.name);
  Json text = Json::parse(kCommon);
  const Json own = Json::parse(g.config);
  for (const auto& [key, value] : own.items()) text[key] = value;
  text["rope_parameters"] = {{"rope_type", "default"},
                             {"rope_theta", text["rope_theta"]},
                             {"partial_rotary_factor", 0.25},
                             {"mrope_section", {11, 11, 10}},
                             {"mrope_interleaved", true}};
  text.erase("rope_theta");
  text["num_hidden_layers"] = spec.layers;
  text["layer_types"] = Json::array();
  for (int64_t i = 0; i < spec.layers; ++i)
    text["layer_types"].push_back(i % 4 == 3 ? "full_attention" : "linear_attention");
  text["ple_layer_ids"] = spec.layers >= 2 ? Json::array({2}) : Json::array();
  text["num_experts"] = spec.experts;
  text["num_experts_per_tok"] = std::min<int64_t>(spec.experts, text["num_experts_per_tok"]);
  return {{"architectures", Json::array({"Qwen4ExpForConditionalGeneration"})},
          {"model_type", "qwen4_exp"},
          {"text_config", text},
          {"tie_word_embeddings", false},
          {"quantization_config",
           {{"quant_method", "exl3"}, {"bits", g.mean_bits}, {"head_bits", g.widths.head / 2}, {"codebook", "mul1"}}}};
}

PackWidths synthetic_widths(const SyntheticSpec& spec) {
  PackWidths widths = geometry_of(spec.name).widths;
  widths.experts = spec.expert_half_bits;
  return widths;
}

std::vector<int32_t> SyntheticSource::stop_ids() const { return geometry_of(spec_.name).stop_ids; }

}  // namespace fnx
