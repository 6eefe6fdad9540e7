#include "libcore/format/pack_layout.h"

#include <fmt/format.h>

#include <algorithm>

#include "kernels/exl3.h"
#include "libcore/engine/ngram.h"

namespace fnx {
namespace {

// What a sublayer adds to the streams, against their first scale of 1: a hundred of them stay of order 1.
constexpr double kSublayerGain = 0.5;
constexpr double kRouterGain = 3, kHeadGain = 5;

class Layout {
 public:
  Layout(const ModelConfig& config, const PackWidths& widths, const std::function<void(LayoutTensor&&)>& tensor)
      : c_(config), w_(widths), tensor_(tensor) {}

  void trunk() {
    const std::string root = "model.language_model";
    plain(root + ".embed_tokens.weight", DType::BF16, {c_.vocab_size, c_.hidden_size}, Content::Embedding);
    for (int64_t i = 0; i < c_.layers(); ++i) {
      const std::string name = fmt::format("{}.layers.{}", root, i);
      layer(name, c_.layer_types[static_cast<size_t>(i)]);
      if (std::count(c_.ple_layers.begin(), c_.ple_layers.end(), i) > 0) ple(name + ".ple");
    }
    hyper_connection(root + ".hyper_connection_mixer", false);
    if (!c_.tie_word_embeddings) linear("lm_head", c_.vocab_size, c_.hidden_size, w_.head, kHeadGain);
  }

  void draft_head() {
    if (c_.mtp_layers == 0) return;
    linear("mtp.fc_hidden", c_.hidden_size, c_.hidden_size, w_.mtp_fc);
    linear("mtp.fc_embedding", c_.hidden_size, c_.hidden_size, w_.mtp_fc);
    norm("mtp.pre_fc_norm_hidden", DType::F16, wide());
    norm("mtp.pre_fc_norm_embedding", DType::BF16, c_.hidden_size);
    layer("mtp.layers.0", LayerType::SparseAttention);
    hyper_connection("mtp.hyper_connection_mixer", false);
  }

  void tables() {
    for (size_t i = 0; i < c_.ple_layers.size(); ++i) {
      const std::string name =
          fmt::format("model.language_model.layers.{}.ple.ple_embedding.ngram_embedding", c_.ple_layers[i]);
      const NgramHash hash = NgramHash::derive(c_, static_cast<int64_t>(i));
      const int64_t heads = hash.heads(), dim = c_.ngram_dim(), rows = hash.padded_rows(c_.ngram_vocab_divisor);
      const auto add = [&](const char* part, DType dtype, std::vector<int64_t> shape, Content content) {
        tensor_({fmt::format("{}.{}", name, part), dtype, std::move(shape), {content, static_cast<int64_t>(i)}, true});
      };
      add("head_offsets", DType::I64, {heads}, Content::HeadOffsets);
      add("head_vocab_sizes", DType::I64, {heads}, Content::HeadSizes);
      add("layer_multipliers", DType::I64, {c_.ngram_size}, Content::Multipliers);
      add("head_bias", DType::F16, {heads, dim}, Content::HeadBias);
      add("trellis", DType::I16, {rows, 1 + dim * w_.table_bits / 16}, Content::Table);
    }
  }

 private:
  int64_t wide() const { return c_.streams * c_.hidden_size; }

  void plain(std::string name, DType dtype, std::vector<int64_t> shape, Content content, int64_t fan = 1,
             double gain = 1) {
    tensor_({std::move(name), dtype, std::move(shape), {content, fan, gain}, false});
  }
  void linear(const std::string& name, int64_t out, int64_t in, int half_bits, double gain = 1) {
    plain(name + ".mul1", DType::I32, {}, Content::Marker);
    plain(name + ".suh", DType::F16, {in}, Content::InputSigns);
    plain(name + ".svh", DType::F16, {out}, Content::OutputScale, in, gain);
    plain(name + ".trellis", DType::I16, {in / exl3::kTile, out / exl3::kTile, exl3::tile_words(half_bits)},
          Content::Trellis);
  }
  void matrix(const std::string& name, int64_t out, int64_t in, double gain = 1) {
    plain(name + ".weight", DType::F16, {out, in}, Content::Matrix, in, gain);
  }
  void norm(const std::string& name, DType dtype, int64_t width) {
    plain(name + ".weight", dtype, {width}, Content::CentredNorm);
  }

  void hyper_connection(const std::string& name, bool inject = true) {
    // The projections down and for the injection are divided by the number of streams.
    const auto n = static_cast<double>(c_.streams);
    norm(name + ".hc_norm", DType::F16, wide());
    matrix(name + ".input_mix_weight_down", c_.hc_rank, wide(), n);
    matrix(name + ".input_mix_weight_up", wide(), c_.hc_rank, 2);
    if (inject) matrix(name + ".block_inject_weight", c_.streams, wide(), n);
  }

  void expert(const std::string& name, int64_t width, int half_bits) {
    linear(name + ".gate_proj", width, c_.hidden_size, half_bits, 2);
    linear(name + ".up_proj", width, c_.hidden_size, half_bits, 2);
    linear(name + ".down_proj", c_.hidden_size, width, half_bits, kSublayerGain);
  }

  void moe(const std::string& name) {
    for (int64_t e = 0; e < c_.experts; ++e) expert(fmt::format("{}.experts.{}", name, e), c_.expert_size, w_.experts);
    expert(name + ".shared_expert", c_.shared_expert_size, w_.shared);
    plain(name + ".gate.weight", DType::F16, {c_.experts, c_.hidden_size}, Content::Router, c_.hidden_size,
          kRouterGain);
    matrix(name + ".shared_expert_gate", 1, c_.hidden_size);
  }

  void linear_attention(const std::string& name) {
    linear(name + ".in_proj_qkv", c_.gdn_conv_width(), c_.hidden_size, w_.attention, 2);
    linear(name + ".in_proj_z", c_.gdn_value_width(), c_.hidden_size, w_.attention);
    linear(name + ".out_proj", c_.hidden_size, c_.gdn_value_width(), w_.attention, kSublayerGain);
    matrix(name + ".in_proj_a", c_.gdn_value_heads, c_.hidden_size);
    matrix(name + ".in_proj_b", c_.gdn_value_heads, c_.hidden_size, 2);
    plain(name + ".A_log", DType::BF16, {c_.gdn_value_heads}, Content::DecayLog);
    plain(name + ".dt_bias", DType::BF16, {c_.gdn_value_heads}, Content::DecayBias);
    plain(name + ".conv1d.weight", DType::BF16, {c_.gdn_conv_width(), 1, c_.gdn_conv_kernel}, Content::Conv);
    plain(name + ".norm.weight", DType::BF16, {c_.gdn_value_dim}, Content::Norm);
  }

  void sparse_attention(const std::string& name) {
    const int64_t kv = c_.kv_heads * c_.head_dim;
    linear(name + ".q_proj", 2 * c_.heads * c_.head_dim, c_.hidden_size, w_.attention, 2);
    linear(name + ".k_proj", kv, c_.hidden_size, w_.attention, 2);
    linear(name + ".v_proj", kv, c_.hidden_size, w_.attention, 2);
    linear(name + ".o_proj", c_.hidden_size, c_.heads * c_.head_dim, w_.attention, 2 * kSublayerGain);
    linear(name + ".indexer.index_qk_proj", (c_.index_heads + 1) * c_.index_head_dim, c_.hidden_size, w_.index, 2);
    norm(name + ".q_norm", DType::BF16, c_.head_dim);
    norm(name + ".k_norm", DType::BF16, c_.head_dim);
    norm(name + ".indexer.q_layernorm", DType::BF16, c_.index_head_dim);
    norm(name + ".indexer.k_layernorm", DType::BF16, c_.index_head_dim);
  }

  void layer(const std::string& name, LayerType type) {
    if (type == LayerType::SparseAttention)
      sparse_attention(name + ".self_attn");
    else
      linear_attention(name + ".linear_attn");
    moe(name + ".mlp");
    hyper_connection(name + ".attn_hyper_connection");
    hyper_connection(name + ".mlp_hyper_connection");
  }

  void ple(const std::string& name) {
    matrix(name + ".key_proj", wide(), c_.ple_embed_dim);
    matrix(name + ".value_proj", c_.hidden_size, c_.ple_embed_dim, kSublayerGain);
    plain(name + ".conv1d.weight", DType::F16, {wide(), 1, c_.ple_conv_kernel}, Content::Conv);
    for (const char* part : {"norm_key", "norm_query", "norm_conv"}) norm(name + "." + part, DType::F16, wide());
  }

  const ModelConfig& c_;
  const PackWidths& w_;
  const std::function<void(LayoutTensor&&)>& tensor_;
};

}  // namespace

void pack_layout(const ModelConfig& config, const PackWidths& widths,
                 const std::function<void(LayoutTensor&&)>& tensor) {
  Layout layout(config, widths, tensor);
  layout.trunk();
  layout.draft_head();
  layout.tables();
}

}  // namespace fnx
