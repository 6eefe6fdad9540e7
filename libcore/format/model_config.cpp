#include "libcore/format/model_config.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "kernels/error.h"
#include "libcore/format/json_text.h"
#include "libcore/format/model_rules.h"

namespace fnx {
namespace {

using Json = nlohmann::ordered_json;

constexpr int64_t kMaxLayers = 4096;

// A value for a message.
std::string shown(const Json& v) {
  if (v.is_structured()) return v.is_array() ? "a list" : "an object";
  return printable(v.dump(-1, ' ', false, Json::error_handler_t::replace));
}

// Reads keys of one object; whatever is wrong goes to `violations` under its key.
class Fields {
 public:
  Fields(const Json& object, std::vector<RuleViolation>& violations) : object_(object), violations_(violations) {}

  // nullptr when absent or null.
  const Json* find(const char* key) const {
    const auto it = object_.find(key);
    return it == object_.end() || it->is_null() ? nullptr : &*it;
  }
  void report(const std::string& key, const std::string& text) const { violations_.push_back({key, text}); }

  std::optional<int64_t> integer(const char* key) const {
    const Json* v = find(key);
    if (v == nullptr) return std::nullopt;
    return integer_value(key, *v);
  }
  std::optional<int64_t> integer_value(const std::string& key, const Json& v) const {
    // A text such as 1e3 or 8.0 is a float to the parser, and so is an integer beyond 64 bits.
    if (v.is_number_unsigned() && v.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int64_t>::max()))
      report(key, fmt::format("{} = {}: above 2^63-1", key, shown(v)));
    else if (!v.is_number_integer())
      report(key, fmt::format("{} = {}: must be an integer", key, shown(v)));
    else
      return v.get<int64_t>();
    return std::nullopt;
  }
  int64_t required(const char* key) const {
    if (find(key) == nullptr) report(key, fmt::format("{} is missing", key));
    return integer(key).value_or(0);
  }
  int64_t integer_or(const char* key, int64_t fallback) const {
    return find(key) == nullptr ? fallback : integer(key).value_or(0);
  }
  double number_or(const char* key, double fallback) const {
    const Json* v = find(key);
    if (v == nullptr) return fallback;
    if (!v->is_number()) report(key, fmt::format("{} = {}: must be a number", key, shown(*v)));
    return v->is_number() ? v->get<double>() : fallback;
  }
  bool boolean_or(const char* key, bool fallback) const {
    const Json* v = find(key);
    if (v == nullptr) return fallback;
    if (!v->is_boolean()) report(key, fmt::format("{} = {}: must be true or false", key, shown(*v)));
    return v->is_boolean() ? v->get<bool>() : fallback;
  }
  std::string text_or(const char* key, const std::string& fallback) const {
    const Json* v = find(key);
    if (v == nullptr) return fallback;
    if (!v->is_string()) report(key, fmt::format("{} = {}: must be a string", key, shown(*v)));
    return v->is_string() ? v->get<std::string>() : fallback;
  }
  // A value that must be one of a few words.
  void word(const char* key, const char* fallback, std::initializer_list<const char*> allowed) const {
    const std::string v = text_or(key, fallback);
    if (std::none_of(allowed.begin(), allowed.end(), [&](const char* a) { return v == a; }))
      report(key, fmt::format("{} = \"{}\": only {} is supported", key, printable(v), fmt::join(allowed, " or ")));
  }

 private:
  const Json& object_;
  std::vector<RuleViolation>& violations_;
};

std::vector<LayerType> read_layers(const Fields& text) {
  std::vector<LayerType> layers;
  const std::optional<int64_t> count = text.integer("num_hidden_layers");
  if (const Json* list = text.find("layer_types")) {
    if (!list->is_array()) text.report("layer_types", fmt::format("layer_types = {}: must be a list", shown(*list)));
    for (size_t i = 0; list->is_array() && i < list->size(); ++i) {
      const Json& v = (*list)[i];
      const std::string type = v.is_string() ? v.get<std::string>() : "";
      if (type == "full_attention" || type == "qwen_sparse_attention")
        layers.push_back(LayerType::SparseAttention);
      else
        layers.push_back(LayerType::LinearAttention);
      if (layers.back() == LayerType::LinearAttention && type != "linear_attention")
        text.report("layer_types", fmt::format("layer_types[{}] = {}: must be linear_attention, full_attention or "
                                               "qwen_sparse_attention",
                                               i, shown(v)));
    }
    if (list->is_array() && count && *count != static_cast<int64_t>(layers.size()))
      text.report("num_hidden_layers",
                  fmt::format("num_hidden_layers = {}: layer_types has {} entries", *count, layers.size()));
    return layers;
  }
  const int64_t interval = text.integer_or("full_attention_interval", 4);
  if (interval < 1)
    text.report("full_attention_interval", fmt::format("full_attention_interval = {}: must be positive", interval));
  if (!count && text.find("num_hidden_layers") == nullptr)
    text.report("num_hidden_layers", "num_hidden_layers is missing, and so is layer_types");
  if (count && (*count < 1 || *count > kMaxLayers))
    text.report("num_hidden_layers", fmt::format("num_hidden_layers = {}: must be in 1 .. {}", *count, kMaxLayers));
  else if (count && interval >= 1)
    for (int64_t i = 0; i < *count; ++i)
      layers.push_back((i + 1) % interval == 0 ? LayerType::SparseAttention : LayerType::LinearAttention);
  return layers;
}

void read_rope(const Fields& text, std::vector<RuleViolation>& violations, ModelConfig& c) {
  const Json empty = Json::object();
  const Json* nested = text.find("rope_parameters");
  const char* key = nested ? "rope_parameters" : "rope_scaling";
  if (nested == nullptr) nested = text.find("rope_scaling");
  if (nested != nullptr && !nested->is_object()) {
    text.report(key, fmt::format("{} = {}: must be an object", key, shown(*nested)));
    nested = nullptr;
  }
  const Fields rope(nested ? *nested : empty, violations);
  rope.word("rope_type", "default", {"default"});
  rope.word("type", "default", {"default"});
  c.rope_theta = rope.number_or("rope_theta", text.number_or("rope_theta", 10000));
  const double factor = rope.number_or("partial_rotary_factor", text.number_or("partial_rotary_factor", 1));
  if (!(factor > 0 && factor <= 1))
    text.report("partial_rotary_factor",
                fmt::format("partial_rotary_factor = {}: must be above 0 and at most 1", factor));
  else if (c.head_dim > 0 && c.head_dim <= kMaxConfigSize)
    c.rotary_dim = static_cast<int64_t>(static_cast<double>(c.head_dim) * factor);
}

void read_ple(const Fields& text, ModelConfig& c) {
  if (const Json* list = text.find("ple_layer_ids")) {
    if (!list->is_array())
      text.report("ple_layer_ids", fmt::format("ple_layer_ids = {}: must be a list", shown(*list)));
    std::set<int64_t> layers;
    for (size_t i = 0; list->is_array() && i < list->size(); ++i) {
      const std::string key = fmt::format("ple_layer_ids[{}]", i);
      const std::optional<int64_t> id = text.integer_value(key, (*list)[i]);
      if (!id) continue;
      if (*id < 1 || *id > c.layers())
        text.report(key, fmt::format("{} = {}: must be in 1 .. {}", key, *id, c.layers()));
      else
        layers.insert(*id - 1);
    }
    c.ple_layers.assign(layers.begin(), layers.end());
  }
  c.ple_embed_dim = text.integer_or("ple_embed_dim", c.hidden_size);
  c.ple_conv_kernel = text.integer_or("ple_conv_kernel_size", 4);
  c.ngram_size = text.integer_or("ngram_size", 3);
  c.heads_per_ngram = text.integer_or("heads_per_ngram", 8);
  c.ngram_vocab_base = text.integer_or("ngram_vocab_size_base", 20000000);
  c.ngram_vocab_divisor = text.integer_or("make_ngram_vocab_size_divisible_by", 128);
  const int64_t seed = text.integer_or("seed", 1234);
  if (seed < 0) text.report("seed", fmt::format("seed = {}: must not be negative", seed));
  c.ngram_seed = static_cast<uint64_t>(seed);

  const Json* eos = text.find("eos_token_id");
  if (eos != nullptr && eos->is_array()) eos = eos->empty() ? nullptr : &eos->front();
  if (eos == nullptr && !c.ple_layers.empty())
    text.report("eos_token_id", "eos_token_id is missing: the n-gram embedding needs it");
  if (eos != nullptr) c.ngram_eos = text.integer_value("eos_token_id", *eos).value_or(0);
}

void read_text(const Fields& text, std::vector<RuleViolation>& violations, ModelConfig& c) {
  c.vocab_size = text.required("vocab_size");
  c.hidden_size = text.required("hidden_size");
  c.max_position_embeddings = text.required("max_position_embeddings");
  c.rms_norm_eps = text.number_or("rms_norm_eps", 1e-6);
  c.layer_types = read_layers(text);

  c.heads = text.required("num_attention_heads");
  c.kv_heads = text.required("num_key_value_heads");
  c.head_dim = text.integer_or("head_dim", 256);
  text.boolean_or("attention_bias", false);
  read_rope(text, violations, c);

  c.mtp_layers = text.integer_or("mtp_num_hidden_layers", 0);
  if (needs_indexer(c)) {
    c.index_heads = text.required("indexer_n_heads");
    c.index_head_dim = text.required("indexer_head_dim");
    c.index_budget = text.required("indexer_budget");
    c.index_ratio = text.required("indexer_compress_ratio");
    const int64_t kv = text.required("indexer_kv_heads");
    if (text.find("indexer_kv_heads") && kv != 1)
      text.report("indexer_kv_heads", fmt::format("indexer_kv_heads = {}: only 1 is supported", kv));
  }

  if (needs_gdn(c)) {
    c.gdn_key_heads = text.required("linear_num_key_heads");
    c.gdn_value_heads = text.required("linear_num_value_heads");
    c.gdn_key_dim = text.required("linear_key_head_dim");
    c.gdn_value_dim = text.required("linear_value_head_dim");
    c.gdn_conv_kernel = text.required("linear_conv_kernel_dim");
  }
  text.word("hidden_act", "silu", {"silu"});
  text.word("output_gate_type", "silu", {"sigmoid", "silu"});
  c.gdn_output_gate = text.text_or("output_gate_type", "silu") == "sigmoid" ? GateType::Sigmoid : GateType::Silu;

  c.experts = text.required("num_experts");
  c.experts_per_token = text.required("num_experts_per_tok");
  c.expert_size = text.required("moe_intermediate_size");
  c.shared_expert_size = text.required("shared_expert_intermediate_size");
  c.normalise_top_k = text.boolean_or("norm_topk_prob", true);
  c.streams = text.integer_or("hc_count", 4);
  c.hc_rank = text.integer_or("hc_lowrank", 320);
  read_ple(text, c);
}

// The object that holds the text model's keys.
const Json& text_part(const Json& root, std::vector<RuleViolation>& violations) {
  if (!root.is_object()) throw Error(ErrorKind::Input, fmt::format("config.json holds {}, not an object", shown(root)));
  const Json* nested = Fields(root, violations).find("text_config");
  if (nested == nullptr) return root;
  if (!nested->is_object())
    throw Error(ErrorKind::Input, fmt::format("text_config is {}, not an object", shown(*nested)));
  return *nested;
}

}  // namespace

ModelConfig ModelConfig::parse(const nlohmann::ordered_json& root) {
  std::vector<RuleViolation> violations;
  const Json& part = text_part(root, violations);
  const Fields outer(root, violations), text(part, violations);
  if (&part != &root) outer.word("model_type", "qwen4_exp", {"qwen4_exp"});
  text.word("model_type", "qwen4_exp_text", {"qwen4_exp_text", "qwen4_exp"});

  ModelConfig c;
  read_text(text, violations, c);
  c.tie_word_embeddings = text.boolean_or("tie_word_embeddings", outer.boolean_or("tie_word_embeddings", false));
  const Json* quantization = outer.find("quantization_config");
  if (quantization == nullptr) quantization = text.find("quantization_config");
  if (quantization != nullptr && !quantization->is_object())
    outer.report("quantization_config",
                 fmt::format("quantization_config = {}: must be an object", shown(*quantization)));
  else if (quantization != nullptr)
    Fields(*quantization, violations).word("quant_method", "exl3", {"exl3"});

  // A key that could not be read is named once, not again by a rule that its stand-in value breaks.
  std::vector<std::string> lines;
  const auto reported = violations;
  for (RuleViolation& v : broken_rules(c)) {
    const auto same_key = [&](const RuleViolation& r) { return v.key == r.key; };
    if (std::none_of(reported.begin(), reported.end(), same_key)) violations.push_back(std::move(v));
  }
  for (const RuleViolation& v : violations)
    if (std::find(lines.begin(), lines.end(), v.text) == lines.end()) lines.push_back(v.text);
  if (!lines.empty())
    throw Error(ErrorKind::Input, fmt::format("config.json has {} problems: {}", lines.size(), fmt::join(lines, "; ")));
  return c;
}

ModelConfig ModelConfig::load(const std::filesystem::path& config_json) {
  const Json root = read_json(config_json);
  try {
    return parse(root);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{}: {}", config_json.string(), e.what()));
  }
}

std::vector<std::string> ModelConfig::problems() const {
  std::vector<std::string> lines;
  for (RuleViolation& v : broken_rules(*this)) lines.push_back(std::move(v.text));
  return lines;
}

std::vector<int32_t> load_stop_ids(const std::filesystem::path& folder) {
  std::vector<int32_t> ids;
  // True when `object` has the key, be the list empty or not.
  const auto take = [&](const Json& object, const std::filesystem::path& path) {
    const auto it = object.is_object() ? object.find("eos_token_id") : object.end();
    if (it == object.end() || it->is_null()) return false;
    const Json list = it->is_array() ? *it : Json::array({*it});
    for (const Json& v : list) {
      if (!v.is_number_unsigned() || v.get<uint64_t>() > static_cast<uint64_t>(std::numeric_limits<int32_t>::max()))
        throw Error(ErrorKind::Input, fmt::format("{}: eos_token_id holds {}: must be an integer in 0 .. 2^31-1",
                                                  path.string(), shown(v)));
      const int32_t id = v.get<int32_t>();
      if (std::find(ids.begin(), ids.end(), id) == ids.end()) ids.push_back(id);
    }
    return true;
  };
  const auto generation = folder / "generation_config.json", config = folder / "config.json";
  std::error_code error;
  if (std::filesystem::exists(generation, error) && take(read_json(generation), generation)) return ids;
  if (!std::filesystem::exists(config, error)) return ids;
  const Json root = read_json(config);
  if (root.is_object() && root.contains("text_config") && take(root["text_config"], config)) return ids;
  take(root, config);
  return ids;
}

}  // namespace fnx
