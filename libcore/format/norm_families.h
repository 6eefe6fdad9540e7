// Norms that should be stored centred (gamma - 1) and the check that they are.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libcore/format/tensor_source.h"

namespace fnx {

// A family of centred norms that averages above this was stored as gamma itself.
inline constexpr double kRawNormMean = 0.6;

// One norm of all layers: names that differ in layer numbers only.
struct NormFamily {
  std::string name;     // numbers replaced by N
  std::string example;  // one tensor of it
  int64_t tensors = 0;
  double mean = 0;      // of all elements
  bool centred = true;  // false for linear_attn.norm, which holds gamma
  bool mixer = false;   // the gain before a head; trained ones average above 1, so its mean proves nothing

  bool stored_raw() const { return centred && !mixer && mean > kRawNormMean; }
};

// The norm weights of the text model and the draft head, by name. Reads their data; tensors of dtypes that hold no
// floating numbers are left out.
std::vector<NormFamily> norm_families(const TensorSource& source);

}  // namespace fnx
