#include "libcore/engine/weights.h"

#include <fmt/format.h>

#include <cmath>

#include "kernels/error.h"
#include "kernels/float16.h"
#include "libcore/base/parallel.h"
#include "libcore/format/exl3_linear.h"
#include "libcore/format/float_values.h"
#include "libcore/format/pack_survey.h"

namespace fnx {

namespace {

std::string shape_text(const std::vector<int64_t>& shape) { return fmt::format("[{}]", fmt::join(shape, ", ")); }

void refuse_raw_norms(const TensorSource& source) {
  const std::vector<std::string> problems = raw_norm_problems(survey_norms(source));
  if (!problems.empty())
    throw Error(ErrorKind::Input,
                fmt::format("{}; --accept-raw-norms takes them as they are", fmt::join(problems, "; ")));
}

class Loader {
 public:
  Loader(const TensorSource& source, Backend& backend, const LoadOptions& options, Weights& to)
      : source_(source), backend_(backend), options_(options), to_(to), c_(to.config), stream_(backend.make_stream()) {}

  LinearPtr linear(const std::string& prefix, int64_t in, int64_t out) {
    return backend_.load_linear(load_linear_source(source_, prefix, in, out));
  }

  View upload(View host) {
    to_.buffers.push_back(backend_.allocate(host.bytes(), Space::Device));
    View v = host;
    const View at = to_.buffers.back().view(DType::U8, {host.bytes()});
    v.data = at.data, v.space = at.space;
    backend_.copy(*stream_, v, host);
    stream_->synchronize();  // the host copy may go
    return v;
  }

  // A small tensor as fp32, of exactly these elements; axes of length 1 do not matter.
  std::vector<float> values(const std::string& name, const std::vector<int64_t>& shape) {
    const TensorInfo& info = source_.require(name);
    std::vector<int64_t> want, have;
    for (int64_t d : shape)
      if (d != 1) want.push_back(d);
    for (int64_t d : info.shape)
      if (d != 1) have.push_back(d);
    if (want != have)
      throw Error(ErrorKind::Input, fmt::format("tensor {} is {}, the config asks for {}", name, shape_text(info.shape),
                                                shape_text(shape)));
    return float_values(source_, info);
  }

  View vector(const std::string& name, const std::vector<int64_t>& shape) {
    return upload_f32(values(name, shape), shape);
  }

  View upload_f32(std::vector<float> host, const std::vector<int64_t>& shape) {
    View v{reinterpret_cast<std::byte*>(host.data()), DType::F32, Space::Host, 0, {}};
    for (int64_t d : shape) v.shape[v.rank++] = d;
    return upload(v);
  }

  NormWeights norm(const std::string& name, int64_t width) {
    return {vector(name, {width}), static_cast<float>(c_.rms_norm_eps)};
  }

  HyperConnection hyper_connection(const std::string& prefix, bool inject) {
    HyperConnection hc;
    const int64_t wide = c_.streams * c_.hidden_size;
    hc.ops.norm = norm(prefix + ".hc_norm.weight", wide);
    hc.down = linear(prefix + ".input_mix_weight_down", wide, c_.hc_rank);
    hc.up = linear(prefix + ".input_mix_weight_up", c_.hc_rank, wide);
    if (inject) hc.inject = linear(prefix + ".block_inject_weight", wide, c_.streams);
    hc.ops.down = hc.down.get(), hc.ops.up = hc.up.get(), hc.ops.inject = hc.inject.get();
    return hc;
  }

  GdnLayer gdn(const std::string& p) {
    GdnLayer g;
    const int64_t h = c_.hidden_size, channels = c_.gdn_conv_width(), values_wide = c_.gdn_value_width();
    g.qkv = linear(p + ".in_proj_qkv", h, channels);
    g.z = linear(p + ".in_proj_z", h, values_wide);
    g.b = linear(p + ".in_proj_b", h, c_.gdn_value_heads);
    g.a = linear(p + ".in_proj_a", h, c_.gdn_value_heads);
    g.out = linear(p + ".out_proj", values_wide, h);
    g.ops = {c_.gdn_key_heads, c_.gdn_value_heads, c_.gdn_key_dim, c_.gdn_value_dim, c_.gdn_conv_kernel};
    g.ops.conv =
        vector(p + ".conv1d.weight", {channels, 1, c_.gdn_conv_kernel}).reshape({channels, c_.gdn_conv_kernel});
    g.ops.a_log = vector(p + ".A_log", {c_.gdn_value_heads});
    g.ops.dt_bias = vector(p + ".dt_bias", {c_.gdn_value_heads});
    g.ops.norm = vector(p + ".norm.weight", {c_.gdn_value_dim});
    g.ops.eps = static_cast<float>(c_.rms_norm_eps);
    g.ops.gate = c_.gdn_output_gate == GateType::Silu ? Gate::Silu : Gate::Sigmoid;
    return g;
  }

  QsaLayer qsa(const std::string& p) {
    QsaLayer q;
    const int64_t h = c_.hidden_size, kv = c_.kv_heads * c_.head_dim;
    q.q = linear(p + ".q_proj", h, 2 * c_.heads * c_.head_dim);
    q.k = linear(p + ".k_proj", h, kv);
    q.v = linear(p + ".v_proj", h, kv);
    q.o = linear(p + ".o_proj", c_.heads * c_.head_dim, h);
    q.index_qk = linear(p + ".indexer.index_qk_proj", h, (c_.index_heads + 1) * c_.index_head_dim);
    q.ops = {c_.heads,          c_.kv_heads,    c_.head_dim,       c_.index_heads,
             c_.index_head_dim, c_.index_ratio, c_.index_blocks(), c_.rotary_dim};
    if (inv_freq_.rank == 0) {  // a plan's views have no memory
      std::vector<float> f(c_.rotary_dim / 2);
      for (size_t i = 0; i < f.size(); ++i)
        f[i] = static_cast<float>(
            1.0 / std::pow(c_.rope_theta, 2.0 * static_cast<double>(i) / static_cast<double>(c_.rotary_dim)));
      inv_freq_ = upload_f32(f, {c_.rotary_dim / 2});
    }
    q.ops.inv_freq = inv_freq_;
    q.ops.q_norm = norm(p + ".q_norm.weight", c_.head_dim);
    q.ops.k_norm = norm(p + ".k_norm.weight", c_.head_dim);
    q.ops.index_q_norm = norm(p + ".indexer.q_layernorm.weight", c_.index_head_dim);
    q.ops.index_k_norm = norm(p + ".indexer.k_layernorm.weight", c_.index_head_dim);
    return q;
  }

  // An EXL3 head's outputs, cut into whole blocks of 128 for the ranks.
  void head(const std::string& prefix) {
    const int64_t in = c_.hidden_size, out = c_.vocab_size, blocks = out / exl3::kHadamard;
    const Shard& shard = options_.shard;
    LinearSource source = load_linear_source(source_, prefix, in, out);
    if (shard.world > 1 && source.trellis != nullptr && blocks >= shard.world) {
      const auto first = [&](int rank) { return rank * blocks / shard.world * exl3::kHadamard; };
      for (int r = 0; r < shard.world; ++r) to_.head_columns.push_back(first(r + 1) - first(r));
      source.first_out = first(shard.rank), source.full_out = out, source.out = to_.head_columns[shard.rank];
      const auto cut = [&](std::vector<float>& v) {
        if (!v.empty()) v = {v.begin() + source.first_out, v.begin() + source.first_out + source.out};
      };
      cut(source.svh), cut(source.bias);
    }
    if (options_.plant_shard_plan) {
      if (source.full_out == 0 || in % (2 * exl3::kHadamard) != 0)
        throw Error(ErrorKind::Unsupported, "the fault shard-plan needs a head that is split and inputs to halve");
      LinearSource rest = source;
      source.in = rest.in = in / 2;
      source.suh.resize(in / 2), rest.suh = {rest.suh.begin() + in / 2, rest.suh.end()}, rest.bias.clear();
      rest.trellis += in / 2 / exl3::kTile * (out / exl3::kTile) * exl3::tile_words(rest.half_bits);
      to_.planted_half = backend_.load_linear(std::move(rest));
    }
    to_.lm_head = backend_.load_linear(std::move(source));
  }

  // With all experts where `spread` is false.
  MoeLayer moe(const std::string& p, bool spread) {
    MoeLayer m;
    const int64_t h = c_.hidden_size, E = c_.experts;
    const Shard shard = spread ? options_.shard : Shard{};
    m.router = linear(p + ".gate", h, E);
    m.shared_expert_gate = linear(p + ".shared_expert_gate", h, 1);
    if (shard.world > 1) m.per_rank = E / shard.world;
    const int64_t first = shard.rank * E / shard.world, count = E / shard.world;
    std::vector<ExpertSource> experts(E);
    in_parallel(default_threads(), count, [&](size_t i) {
      experts[first + i] = expert(fmt::format("{}.experts.{}", p, first + i), c_.expert_size);
    });
    const std::string sp = p + ".shared_expert";
    if (E > 0 && same_form(p + ".experts.0", sp)) {
      const bool last = shard.rank == shard.world - 1;
      experts.push_back(last ? expert(sp, c_.shared_expert_size) : ExpertSource{});
    } else {
      m.shared_gate = linear(sp + ".gate_proj", h, c_.shared_expert_size);
      m.shared_up = linear(sp + ".up_proj", h, c_.shared_expert_size);
      m.shared_down = linear(sp + ".down_proj", c_.shared_expert_size, h);
    }
    m.experts = backend_.load_experts(std::move(experts), options_.pools.lines > 0 ? c_.experts : 0);
    return m;
  }

  PleLayer ple(const std::string& p, int64_t ple_index) {
    const int64_t wide = c_.streams * c_.hidden_size, heads = c_.ngram_heads();
    const std::string tp = p + ".ple_embedding.ngram_embedding";
    PleLayer l{
        NgramHash::derive(c_, ple_index), NgramTable(source_, tp, heads, c_.ngram_dim()), {}, nullptr, nullptr, {}};
    check_hash(tp, "layer_multipliers", l.table.multipliers(), l.hash.multipliers);
    check_hash(tp, "head_vocab_sizes", l.table.head_sizes(), l.hash.sizes);
    check_hash(tp, "head_offsets", l.table.head_offsets(), l.hash.offsets);
    if (const int64_t need = l.hash.offsets.back() + l.hash.sizes.back(); l.table.rows() < need)
      throw Error(ErrorKind::Input,
                  fmt::format("n-gram table {} has {} rows, its heads need {}", tp, l.table.rows(), need));
    if (!l.table.head_bias().empty()) l.head_bias = upload_f32(l.table.head_bias(), {heads, c_.ngram_dim()});
    l.key = linear(p + ".key_proj", c_.ple_embed_dim, wide);
    l.value = linear(p + ".value_proj", c_.ple_embed_dim, c_.hidden_size);
    l.ops.norm_key = norm(p + ".norm_key.weight", wide);
    l.ops.norm_query = norm(p + ".norm_query.weight", wide);
    l.ops.norm_conv = norm(p + ".norm_conv.weight", wide);
    l.ops.taps = c_.ple_conv_kernel, l.ops.dilation = c_.ngram_size;
    l.ops.conv = vector(p + ".conv1d.weight", {wide, 1, c_.ple_conv_kernel}).reshape({wide, c_.ple_conv_kernel});
    return l;
  }

  Layer layer(const std::string& p, LayerType type, bool spread) {
    Layer l;
    l.attn_hc = hyper_connection(p + ".attn_hyper_connection", true);
    l.mlp_hc = hyper_connection(p + ".mlp_hyper_connection", true);
    if (type == LayerType::LinearAttention)
      l.gdn = gdn(p + ".linear_attn");
    else
      l.qsa = qsa(p + ".self_attn");
    l.moe = moe(p + ".mlp", spread);
    return l;
  }

  MtpHead mtp() {
    MtpHead m;
    const int64_t h = c_.hidden_size;
    m.norm_hidden = norm("mtp.pre_fc_norm_hidden.weight", c_.streams * h);
    m.norm_embedding = norm("mtp.pre_fc_norm_embedding.weight", h);
    m.fc_hidden = linear("mtp.fc_hidden", h, h);
    m.fc_embedding = linear("mtp.fc_embedding", h, h);
    m.layer = layer("mtp.layers.0", LayerType::SparseAttention, false);
    m.mixer = hyper_connection("mtp.hyper_connection_mixer", false);
    return m;
  }

  View embed(const std::string& name) {
    const TensorInfo& info = source_.require(name);
    if (info.shape != std::vector<int64_t>{c_.vocab_size, c_.hidden_size} ||
        (*info.dtype != DType::F16 && *info.dtype != DType::BF16 && *info.dtype != DType::F32))
      throw Error(ErrorKind::Input,
                  fmt::format("tensor {} is {} {}, the config asks for [{}, {}] of F16, BF16 or F32", name,
                              info.dtype_text, shape_text(info.shape), c_.vocab_size, c_.hidden_size));
    const TensorData data = source_.read(info);
    View v{const_cast<std::byte*>(data.bytes.data()), *info.dtype, Space::Host, 2, {c_.vocab_size, c_.hidden_size}};
    return upload(v);
  }

 private:
  ExpertSource expert(const std::string& p, int64_t width) const {
    const int64_t h = c_.hidden_size;
    return {load_linear_source(source_, p + ".gate_proj", h, width),
            load_linear_source(source_, p + ".up_proj", h, width),
            load_linear_source(source_, p + ".down_proj", width, h)};
  }

  // Whether one bank can hold both, whatever the widths.
  bool same_form(const std::string& a, const std::string& b) const {
    for (const char* part : {".gate_proj", ".up_proj", ".down_proj"}) {
      const auto x = describe_linear(source_, a + part), y = describe_linear(source_, b + part);
      if (!x || !y) return false;
      if (x->in != y->in || x->out != y->out || x->quantized != y->quantized || x->codebook != y->codebook || x->bias ||
          y->bias)
        return false;
    }
    return true;
  }

  static void check_hash(const std::string& prefix, const char* what, const std::vector<int64_t>& stored,
                         const std::vector<int64_t>& derived) {
    if (stored.empty() || stored == derived) return;
    throw Error(ErrorKind::Input, fmt::format("{}.{} is [{}], seed and sizes of the config give [{}]", prefix, what,
                                              fmt::join(stored, ", "), fmt::join(derived, ", ")));
  }

  const TensorSource& source_;
  Backend& backend_;
  const LoadOptions& options_;
  Weights& to_;
  const ModelConfig& c_;
  std::unique_ptr<Stream> stream_;
  View inv_freq_;
};

}  // namespace

bool has_draft_head(const TensorSource& source, const ModelConfig& config) {
  return config.mtp_layers > 0 && describe_linear(source, "mtp.fc_hidden").has_value();
}

Weights Weights::load(const TensorSource& source, const ModelConfig& config, Backend& backend,
                      const LoadOptions& options, const std::function<void(int64_t, int64_t)>& progress) {
  Weights w;
  w.config = config;
  w.shard = options.shard;
  if (w.shard.world > 1 && (config.experts == 0 || config.experts % w.shard.world != 0))
    throw Error(ErrorKind::Unsupported, fmt::format("{} experts do not divide among {} ranks; choose another --tp",
                                                    config.experts, w.shard.world));
  Loader load(source, backend, options, w);
  const std::string root = text_root(source);
  const bool draft = options.draft_head && fnx::has_draft_head(source, config);
  w.has_draft_head = draft;
  const bool draft_here = draft && w.shard.rank == 0;
  const int64_t total = config.layers() + (draft_here ? 2 : 1);
  const auto done = [&](int64_t n) {
    if (progress) progress(n, total);
  };

  if (!options.accept_raw_norms) refuse_raw_norms(source);
  w.embed = load.embed(root + ".embed_tokens.weight");
  if (describe_linear(source, "lm_head") || !config.tie_word_embeddings)
    load.head("lm_head");
  else
    load.head(root + ".embed_tokens");
  w.mixer = load.hyper_connection(root + ".hyper_connection_mixer", false);
  done(1);
  for (int64_t l = 0; l < config.layers(); ++l) {
    const std::string prefix = fmt::format("{}.layers.{}", root, l);
    w.layers.push_back(load.layer(prefix, config.layer_types[l], true));
    for (size_t i = 0; i < config.ple_layers.size(); ++i)
      if (config.ple_layers[i] == l) w.layers.back().ple.emplace(load.ple(prefix + ".ple", static_cast<int64_t>(i)));
    done(l + 2);
  }
  if (draft_here) {
    w.mtp.emplace(load.mtp());
    done(total);
  }
  if (options.pools.lines > 0) {
    std::vector<ExpertBank*> banks;
    for (const Layer& l : w.layers) banks.push_back(l.moe.experts.get());
    if (w.mtp) banks.push_back(w.mtp->layer.moe.experts.get());
    w.pools = std::make_unique<ExpertPools>(backend, std::move(banks), options.pools);
  }
  return w;
}

}  // namespace fnx
