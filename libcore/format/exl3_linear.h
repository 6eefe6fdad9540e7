// The tensors of one linear layer under a name prefix, checked against each other and described for a backend.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/ops.h"
#include "libcore/format/tensor_source.h"

namespace fnx {

// Metadata only: what `prefix`.trellis, .suh/.su, .svh/.sv, .bias, .mul1/.mcg (or .weight, .bias) say together.
struct LinearInfo {
  std::string prefix;
  bool quantized = false;
  int64_t in = 0, out = 0;
  exl3::Codebook codebook = exl3::Codebook::ThreeInst;  // when quantized
  int half_bits = 0;                                    // twice the width in bits, when quantized
  bool packed_signs = false;                            // su/sv in place of suh/svh
  bool bias = false;
  uint64_t bytes = 0;  // of all its tensors
};

// Empty when neither prefix.trellis nor prefix.weight exists; throws Input naming the tensor and the numbers when the
// tensors contradict each other or exl3's rules. Reads tensor data only for the codebook marker's value.
std::optional<LinearInfo> describe_linear(const TensorSource& source, std::string_view prefix);

// The layer's data for Backend::load_linear; also throws Input when the layer is absent or not [out, in].
LinearSource load_linear_source(const TensorSource& source, std::string_view prefix, int64_t in, int64_t out);

}  // namespace fnx
