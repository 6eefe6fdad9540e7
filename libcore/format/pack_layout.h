// The tensors of a published EXL3 pack of a given geometry: names, dtypes, shapes, widths, and what each one is for.
// Source: the headers of the published packs (libcore/engine/README.md).
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/dtype.h"
#include "libcore/format/model_config.h"

namespace fnx {

// Twice the width in bits of each family of quantized layers, so that half widths are integers too; codebook mul1.
struct PackWidths {
  int attention = 12;  // linear_attn and self_attn
  int index = 8;       // self_attn.indexer
  int experts = 6;     // routed
  int shared = 12;     // shared_expert
  int head = 10;       // lm_head
  int mtp_fc = 10;     // mtp.fc_hidden and mtp.fc_embedding
  int table_bits = 5;  // of the n-gram table, in bits
};

// What the values of a tensor are for, so that whoever makes some up can keep activations of order 1.
enum class Content : uint8_t {
  Marker,       // codebook marker of a mul1 layer
  InputSigns,   // suh
  OutputScale,  // svh of a layer of `fan` inputs
  Trellis,      // of a layer or of the n-gram table
  Table,        // rows of the n-gram table: fp16 scale, then trellis words
  Matrix,       // plain [out, fan]
  Router,       // plain [experts, fan]
  Embedding,    // rows of unit scale
  CentredNorm,  // around 0
  Norm,         // around 1
  Conv,         // taps
  DecayLog,     // A_log
  DecayBias,    // dt_bias
  HeadBias,     // of the n-gram table
  HeadOffsets,  // I64 constants of the n-gram hash
  HeadSizes,
  Multipliers
};

struct Values {
  Content content = Content::Matrix;
  int64_t fan = 1;  // inputs that a row sums over; of n-gram constants the number of the PLE layer
  double gain = 1;  // wanted scale of an output over that of an input
};

struct LayoutTensor {
  std::string name;
  DType dtype = DType::F16;
  std::vector<int64_t> shape;
  Values values;
  bool table = false;  // lies in the n-gram side file
};

inline constexpr const char* kNgramFile = "ngram_embedding.safetensors";

// Every tensor of the text model, trunk first, then the draft head where the config has one, then the n-gram tables.
void pack_layout(const ModelConfig& config, const PackWidths& widths,
                 const std::function<void(LayoutTensor&&)>& tensor);

}  // namespace fnx
