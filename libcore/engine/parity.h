// What a run of a workload computed, forward by forward, and where two runs first differ.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "libcore/engine/workload.h"

namespace fnx {

struct ParityRecord {
  struct Slots {
    int64_t layer = 0, columns = 0;
    std::vector<int32_t> ids;   // [rows, columns]
    std::vector<float> values;  // [rows, columns, H]
  };
  struct Forward {
    std::vector<int32_t> drawn;
    std::vector<float> logits;  // [drawn, V]
    std::vector<Slots> slots;   // by layer, where they were asked for
  };
  std::vector<Forward> forwards;
  bool stopped = false;

  std::vector<int32_t> tokens() const;
  std::string logits_hash() const;  // XXH3-128 of all rows
  std::string slots_hash() const;   // of all outputs; empty when none were asked for
};

// Runs `work` and records it; `slots`: every layer's expert outputs too, and no round is replayed then.
ParityRecord record_run(Engine& engine, Workload work, bool slots, const std::function<bool()>& stop);

// The first number in the order in which it was computed: expert outputs by layer, then logits, then tokens.
struct ParityDifference {
  std::string what;  // "expert output", "logit", "token", "number of forwards"
  int64_t forward = 0, layer = -1, row = -1, slot = -1, expert = -1, element = -1;
  double a = 0, b = 0;
  std::string text() const;
};
// Bits are compared, so that NaN equals itself and 0 is not -0.
std::optional<ParityDifference> first_difference(const ParityRecord& a, const ParityRecord& b);

}  // namespace fnx
