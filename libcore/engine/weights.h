// The weights of a checkpoint in a backend's form: one plain struct a part of the model.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "kernels/ops.h"
#include "libcore/engine/expert_pools.h"
#include "libcore/engine/ngram.h"
#include "libcore/format/model_config.h"
#include "libcore/format/ngram_table.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

using LinearPtr = std::unique_ptr<Linear>;

struct HyperConnection {
  LinearPtr down, up, inject;
  HcWeights ops;
};

struct GdnLayer {
  LinearPtr qkv, z, b, a, out;
  GdnWeights ops;
};

struct QsaLayer {
  LinearPtr q, k, v, o, index_qk;
  QsaWeights ops;
};

// The part of a model that one of `world` ranks holds, E experts in all: rank r the experts [r * E / world, (r + 1) *
// E / world), the last rank the shared expert where banks can hold it, rank 0 the draft head; of an EXL3 head whole
// blocks of 128 outputs; everything else in full.
struct Shard {
  int rank = 0, world = 1;
};

struct MoeLayer {
  LinearPtr router, shared_expert_gate;
  LinearPtr shared_gate, shared_up, shared_down;  // null when the bank holds the shared expert, after the routed ones
  std::unique_ptr<ExpertBank> experts;
  int64_t per_rank = 0;  // experts of a rank; 0: all are here
  bool shared_in_bank() const { return shared_gate == nullptr; }
};

struct PleLayer {
  NgramHash hash;
  NgramTable table;
  View head_bias;  // F32 [heads, dim]; empty when the table has none
  LinearPtr key, value;
  PleWeights ops;
};

struct Layer {
  std::optional<PleLayer> ple;
  HyperConnection attn_hc, mlp_hc;
  std::optional<GdnLayer> gdn;  // exactly one of the two
  std::optional<QsaLayer> qsa;
  MoeLayer moe;
};

struct MtpHead {
  NormWeights norm_hidden, norm_embedding;  // [n * H], [H]
  LinearPtr fc_hidden, fc_embedding;
  Layer layer;
  HyperConnection mixer;
};

// Whether the tensors of a draft head are there: a config may announce one that a pack left out.
bool has_draft_head(const TensorSource& source, const ModelConfig& config);

struct LoadOptions {
  bool draft_head = true;         // load mtp.* when the checkpoint has it
  ExpertPoolsOptions pools;       // lines above 0: routed experts go to pinned host memory
  bool accept_raw_norms = false;  // skip the check of raw_norm_problems (libcore/format/pack_survey.h)
  Shard shard;
  bool plant_shard_plan = false;  // a fault for tests: the head's shard is summed in two halves
};

struct Weights {
  ModelConfig config;
  View embed;  // [V, H], as stored
  LinearPtr lm_head;
  std::vector<int64_t> head_columns;  // outputs of each rank's lm_head; empty: it is whole here
  LinearPtr planted_half;             // of the planted fault: the head over the second half of its inputs
  std::vector<Layer> layers;
  HyperConnection mixer;
  std::optional<MtpHead> mtp;
  bool has_draft_head = false;  // on some rank
  Shard shard;
  std::unique_ptr<ExpertPools> pools;  // of every layer, the draft head's last; null when every expert is on the device
  std::vector<Buffer> buffers;         // owns what the views above show

  // Throws Input naming the tensor for everything missing, misshapen or contradicting the config. `progress` is called
  // with layers done and their number.
  static Weights load(const TensorSource& source, const ModelConfig& config, Backend& backend,
                      const LoadOptions& options = {}, const std::function<void(int64_t, int64_t)>& progress = nullptr);
};

}  // namespace fnx
