#include "libcore/format/model_rules.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

namespace fnx {
namespace {

constexpr int64_t kMaxIndex = (int64_t{1} << 31) - 1;  // tokens, positions and experts are numbered in 32 bits
constexpr int64_t kMaxTaps = 1024;

class Rules {
 public:
  std::vector<RuleViolation> broken;

  void fail(const char* key, std::string text) { broken.push_back({key, std::move(text)}); }

  bool size(const char* key, int64_t v, int64_t limit = kMaxConfigSize) {
    const bool good = v >= 1 && v <= limit;
    if (!good) fail(key, fmt::format("{} = {}: must be in 1 .. {}", key, v, limit));
    return good;
  }
  void multiple(const char* key, int64_t v, const char* of, int64_t divisor) {
    if (good(v) && good(divisor) && v % divisor != 0)
      fail(key, fmt::format("{} = {}: must be a multiple of {} = {}", key, v, of, divisor));
  }
  void at_most(const char* key, int64_t v, const char* limit_key, int64_t limit) {
    if (good(v) && good(limit) && v > limit)
      fail(key, fmt::format("{} = {}: must be at most {} = {}", key, v, limit_key, limit));
  }
  // Sizes of one matrix or state; 0 when a factor is out of range by itself or the product is.
  int64_t product(const char* key_a, int64_t a, const char* key_b, int64_t b) {
    int64_t ab = 0;
    if (!good(a) || !good(b)) return 0;
    if (!__builtin_mul_overflow(a, b, &ab) && ab <= kMaxConfigSize) return ab;
    fail(key_a,
         fmt::format("{} = {} times {} = {}: the product must be at most {}", key_a, a, key_b, b, kMaxConfigSize));
    return 0;
  }

  static bool good(int64_t v) { return v >= 1 && v <= kMaxConfigSize; }
};

void check_attention(const ModelConfig& c, Rules& r) {
  r.size("num_attention_heads", c.heads);
  r.size("num_key_value_heads", c.kv_heads);
  r.multiple("num_attention_heads", c.heads, "num_key_value_heads", c.kv_heads);
  r.size("head_dim", c.head_dim);
  r.product("num_attention_heads", c.heads, "head_dim", c.head_dim);
  if (Rules::good(c.head_dim) && (c.rotary_dim < 2 || c.rotary_dim % 2 != 0))
    r.fail("partial_rotary_factor",
           fmt::format("rotary dims (head_dim * partial_rotary_factor) = {}: must be even and positive", c.rotary_dim));
  r.at_most("partial_rotary_factor", c.rotary_dim, "head_dim", c.head_dim);
  if (!(c.rope_theta > 0 && std::isfinite(c.rope_theta)))
    r.fail("rope_theta", fmt::format("rope_theta = {}: must be positive", c.rope_theta));
  if (!needs_indexer(c)) return;
  r.size("indexer_n_heads", c.index_heads);
  r.size("indexer_head_dim", c.index_head_dim);
  r.size("indexer_budget", c.index_budget);
  r.size("indexer_compress_ratio", c.index_ratio);
  r.product("indexer_n_heads", c.index_heads, "indexer_head_dim", c.index_head_dim);
  r.multiple("indexer_budget", c.index_budget, "indexer_compress_ratio", c.index_ratio);
  if (c.index_head_dim > 0 && c.rotary_dim > c.index_head_dim)
    r.fail("indexer_head_dim",
           fmt::format("rotary dims (head_dim * partial_rotary_factor) = {}: must be at most indexer_head_dim = {}",
                       c.rotary_dim, c.index_head_dim));
}

void check_gdn(const ModelConfig& c, Rules& r) {
  if (!needs_gdn(c)) return;
  r.size("linear_num_key_heads", c.gdn_key_heads);
  r.size("linear_num_value_heads", c.gdn_value_heads);
  r.size("linear_key_head_dim", c.gdn_key_dim);
  r.size("linear_value_head_dim", c.gdn_value_dim);
  r.size("linear_conv_kernel_dim", c.gdn_conv_kernel, kMaxTaps);
  r.multiple("linear_num_value_heads", c.gdn_value_heads, "linear_num_key_heads", c.gdn_key_heads);
  r.product("linear_num_key_heads", c.gdn_key_heads, "linear_key_head_dim", c.gdn_key_dim);
  const int64_t width =
      r.product("linear_num_value_heads", c.gdn_value_heads, "linear_value_head_dim", c.gdn_value_dim);
  r.product("linear_key_head_dim", c.gdn_key_dim, "the values' width", width);
}

void check_ple(const ModelConfig& c, Rules& r) {
  if (c.ple_layers.empty()) return;
  for (int64_t layer : c.ple_layers) {
    if (layer < 0 || layer >= c.layers())
      r.fail("ple_layer_ids", fmt::format("ple_layer_ids holds {}: must be in 1 .. {}", layer + 1, c.layers()));
    else if (c.layer_types[static_cast<size_t>(layer)] != LayerType::LinearAttention)
      r.fail("ple_layer_ids", fmt::format("ple_layer_ids holds {}: that layer is not linear_attention", layer + 1));
  }
  const bool sizes = r.size("ple_embed_dim", c.ple_embed_dim) & r.size("heads_per_ngram", c.heads_per_ngram);
  r.size("ple_conv_kernel_size", c.ple_conv_kernel, kMaxTaps);
  r.size("ngram_vocab_size_base", c.ngram_vocab_base);
  r.size("make_ngram_vocab_size_divisible_by", c.ngram_vocab_divisor);
  r.product("ngram_vocab_size_base", c.ngram_vocab_base, "heads_per_ngram", c.heads_per_ngram);
  // One hash multiplier an order; the public class stops far below.
  if (c.ngram_size < 2 || c.ngram_size > 64)
    r.fail("ngram_size", fmt::format("ngram_size = {}: must be in 2 .. 64", c.ngram_size));
  else if (sizes && c.ple_embed_dim % c.ngram_heads() != 0)
    r.fail("ple_embed_dim",
           fmt::format("ple_embed_dim = {}: must be a multiple of (ngram_size - 1) * heads_per_ngram = {}",
                       c.ple_embed_dim, c.ngram_heads()));
  if (Rules::good(c.vocab_size) && (c.ngram_eos < 0 || c.ngram_eos >= c.vocab_size))
    r.fail("eos_token_id",
           fmt::format("eos_token_id = {}: must be in 0 .. vocab_size - 1 = {}", c.ngram_eos, c.vocab_size - 1));
}

}  // namespace

bool needs_indexer(const ModelConfig& c) {
  return c.mtp_layers != 0 || std::count(c.layer_types.begin(), c.layer_types.end(), LayerType::SparseAttention) > 0;
}

bool needs_gdn(const ModelConfig& c) {
  return std::count(c.layer_types.begin(), c.layer_types.end(), LayerType::LinearAttention) > 0;
}

std::vector<RuleViolation> broken_rules(const ModelConfig& c) {
  Rules r;
  r.size("vocab_size", c.vocab_size, kMaxIndex);
  r.size("hidden_size", c.hidden_size);
  r.product("vocab_size", c.vocab_size, "hidden_size", c.hidden_size);
  r.size("max_position_embeddings", c.max_position_embeddings, kMaxIndex);
  if (!(c.rms_norm_eps > 0 && c.rms_norm_eps < 1))
    r.fail("rms_norm_eps", fmt::format("rms_norm_eps = {}: must be above 0 and below 1", c.rms_norm_eps));
  if (c.layer_types.empty()) r.fail("num_hidden_layers", "num_hidden_layers = 0: must be positive");
  check_attention(c, r);
  check_gdn(c, r);

  r.size("num_experts", c.experts, kMaxIndex);
  r.size("num_experts_per_tok", c.experts_per_token);
  r.at_most("num_experts_per_tok", c.experts_per_token, "num_experts", c.experts);
  r.size("moe_intermediate_size", c.expert_size);
  r.size("shared_expert_intermediate_size", c.shared_expert_size);
  const int64_t expert = r.product("moe_intermediate_size", c.expert_size, "hidden_size", c.hidden_size);
  r.product("num_experts", c.experts, "the elements of an expert's matrix", expert);
  if (c.streams < 2 || c.streams > kMaxConfigSize)
    r.fail("hc_count", fmt::format("hc_count = {}: must be above 1 and at most 2^40", c.streams));
  r.size("hc_lowrank", c.hc_rank);
  r.product("hc_count", c.streams, "hidden_size", c.hidden_size);
  check_ple(c, r);
  if (c.mtp_layers != 0 && c.mtp_layers != 1)
    r.fail("mtp_num_hidden_layers", fmt::format("mtp_num_hidden_layers = {}: must be 0 or 1", c.mtp_layers));
  return std::move(r.broken);
}

}  // namespace fnx
