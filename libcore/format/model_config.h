// config.json of a qwen4_exp checkpoint: the text part, with every default filled in. Meanings and symbols:
// libcore/engine/README.md. All sizes count elements.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json_fwd.hpp>

namespace fnx {

enum class LayerType : uint8_t { LinearAttention, SparseAttention };
enum class GateType : uint8_t { Sigmoid, Silu };

struct ModelConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;              // H
  int64_t max_position_embeddings = 0;  // tokens a sequence may hold
  double rms_norm_eps = 1e-6;
  bool tie_word_embeddings = false;    // lm_head is embed_tokens
  std::vector<LayerType> layer_types;  // one a layer; its size is the layer count

  // QSA, "self_attn".
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  int64_t rotary_dim = 0;  // head_dim * partial_rotary_factor, even
  double rope_theta = 0;
  int64_t index_heads = 0, index_head_dim = 0, index_budget = 0, index_ratio = 0;

  // GDN, "linear_attn".
  int64_t gdn_key_heads = 0, gdn_value_heads = 0, gdn_key_dim = 0, gdn_value_dim = 0, gdn_conv_kernel = 0;
  GateType gdn_output_gate = GateType::Sigmoid;

  // MoE.
  int64_t experts = 0, experts_per_token = 0, expert_size = 0, shared_expert_size = 0;
  bool normalise_top_k = true;  // norm_topk_prob

  // Hyper-connections.
  int64_t streams = 0, hc_rank = 0;

  // PLE; ple_layers empty when the model has none. Zero-based layer numbers, ascending.
  std::vector<int64_t> ple_layers;
  int64_t ple_embed_dim = 0, ple_conv_kernel = 0, ngram_size = 0, heads_per_ngram = 0, ngram_vocab_base = 0;
  int64_t ngram_vocab_divisor = 0, ngram_eos = 0;
  uint64_t ngram_seed = 1234;

  int64_t mtp_layers = 0;  // 0 or 1: whether config.json announces a draft head

  int64_t layers() const { return static_cast<int64_t>(layer_types.size()); }
  int64_t gdn_key_width() const { return gdn_key_heads * gdn_key_dim; }
  int64_t gdn_value_width() const { return gdn_value_heads * gdn_value_dim; }
  int64_t gdn_conv_width() const { return 2 * gdn_key_width() + gdn_value_width(); }
  int64_t ngram_heads() const { return (ngram_size - 1) * heads_per_ngram; }
  int64_t ngram_dim() const { return ngram_heads() > 0 ? ple_embed_dim / ngram_heads() : 0; }
  // Blocks a row may select; 0 in a model without an indexer.
  int64_t index_blocks() const { return index_ratio > 0 ? index_budget / index_ratio : 0; }

  // Every violation of the model's rules, each naming its key and numbers; empty when the config is sound.
  std::vector<std::string> problems() const;

  // Reads the text part of a parsed config.json; throws Input with all violations in one message.
  static ModelConfig parse(const nlohmann::ordered_json& root);
  static ModelConfig load(const std::filesystem::path& config_json);
};

// Generation stops of a checkpoint folder: generation_config.json, else config.json's eos_token_id; may be empty.
std::vector<int32_t> load_stop_ids(const std::filesystem::path& folder);

}  // namespace fnx
