// --gate NAME>=VALUE: limits that a user sets on figures of a measuring tool.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "libcore/receipt/receipt.h"

namespace fnx {

struct GateLimit {
  std::string name, comparator;
  double limit = 0;
};

// One figure that gates may name. `missing` says why there is no value; empty when there is one.
struct Figure {
  std::string name, unit;  // "decode/c1/ratio"
  double value = 0;
  std::string missing;
};

// Every gate of the command line. Throws Usage for a text that is no gate, and for one that names none of `names`:
// NAME is a whole name or what follows one of its slashes, so that "ratio" means every cell's.
std::vector<GateLimit> parse_gates(const std::vector<std::string>& texts, const std::vector<std::string>& names);

// Judges every figure that a gate names.
void judge_gates(const std::vector<GateLimit>& gates, const std::vector<Figure>& figures, Receipt& receipt);

}  // namespace fnx
