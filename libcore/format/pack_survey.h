// What a checkpoint holds, gathered from headers, codebook markers and norm weights alone.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "libcore/format/checkpoint.h"
#include "libcore/format/tensor_names.h"

namespace fnx {

// Tensors or linear layers that differ in their numbers alone: one name pattern, one shape, one form.
struct PackFamily {
  std::string name;  // of the layer without .trellis, or of the plain tensor; numbers are *
  Role role = Role::Other;
  std::string form;  // codebook of a quantized layer, else the dtype
  bool quantized = false;
  std::vector<int64_t> shape;  // [out, in] of a quantized layer; [rows, dim] of a trellis n-gram table
  uint64_t count = 0, bytes = 0, weights = 0;
  std::map<int, uint64_t> widths;         // twice the width in bits -> layers, when quantized
  uint64_t packed_signs = 0, biases = 0;  // layers that have them

  double mean_bits() const;  // of `widths`, each layer counting the same
};

// The weights of one norm over all layers.
struct NormFamily {
  std::string name;
  bool centred = true;  // the model multiplies by 1 + weight
  uint64_t tensors = 0, elements = 0;
  double mean = 0;  // NaN when a weight is NaN
};

struct RoleTotal {
  uint64_t tensors = 0, bytes = 0;
};

struct PackSurvey {
  std::vector<PackFamily> families;  // by role, then name
  std::vector<NormFamily> norms;     // by name
  std::array<RoleTotal, kRoles> roles;
  uint64_t tensors = 0, bytes = 0;    // of all tensors
  std::vector<std::string> problems;  // the checkpoint's own and those found here, the most common kinds summed up

  bool has_text() const;
  // 8 * bytes / weights over quantized layers, scales and markers included; 0 without any.
  double quantized_bits() const;
  double expert_bits() const;
};

// Centred norms are stored around 0, by some conversions around 1. One trained family may average near 1 by itself, the
// last norm before the head for one, so trunk and draft head are each judged by the mean over their families.
inline constexpr double kCentredNormLimit = 0.6;
enum class NormGroup : uint8_t { Trunk, DraftHead };
const char* norm_group_name(NormGroup group);
NormGroup norm_group(const NormFamily& norm);
// Mean of the family means of the group's centred norms; 0 without any.
double centred_norm_mean(const std::vector<NormFamily>& norms, NormGroup group);

// One line a group of centred norms that is stored around 1; empty when none is.
std::vector<std::string> raw_norm_problems(const std::vector<NormFamily>& norms);

// Every norm of the text model; reads the norm weights. Throws Input when one is of an unreadable dtype.
std::vector<NormFamily> survey_norms(const TensorSource& source);

PackSurvey survey_pack(const Checkpoint& checkpoint);

}  // namespace fnx
