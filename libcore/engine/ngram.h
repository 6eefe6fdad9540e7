// Which rows of the n-gram table a token reads. Definition: PLE in libcore/engine/README.md; all arithmetic is 64-bit
// and wraps.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "libcore/format/model_config.h"

namespace fnx {

struct NgramHash {
  int64_t orders = 0;  // largest n-gram, 2 or more
  int64_t heads_per_order = 0;
  int64_t eos = 0;                                   // segment boundary
  std::vector<int64_t> multipliers, sizes, offsets;  // [orders], [heads], [heads]

  // The constants of PLE layer number `ple_index` (counted among PLE layers, from 0).
  static NgramHash derive(const ModelConfig& config, int64_t ple_index);

  int64_t heads() const { return static_cast<int64_t>(sizes.size()); }
  int64_t padded_rows(int64_t divisor) const;  // rows of the table
  // Rows of the last token of `history`, which holds at least the last `orders` tokens of the sequence, or all of it.
  void rows(std::span<const int32_t> history, int64_t* out) const;
};

}  // namespace fnx
