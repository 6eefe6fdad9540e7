// What a ModelConfig must satisfy, whoever filled it in.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libcore/format/model_config.h"

namespace fnx {

inline constexpr int64_t kMaxConfigSize = int64_t{1} << 40;  // of any size or product of sizes of one matrix

struct RuleViolation {
  std::string key, text;  // the config key that breaks a rule; key, value and rule in words
};

bool needs_indexer(const ModelConfig& config);  // a sparse layer or a draft head
bool needs_gdn(const ModelConfig& config);      // a linear-attention layer

// Every broken rule. Never computes with a number that has not been checked.
std::vector<RuleViolation> broken_rules(const ModelConfig& config);

}  // namespace fnx
