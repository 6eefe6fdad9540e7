// Byte-pair encoding of one piece of text.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "libcore/text/vocabulary.h"

namespace fnx {

class Bpe {
 public:
  // `merges` are pairs of spellings in rank order; throws Input for one whose parts or result are not in the
  // vocabulary.
  Bpe(const Vocabulary& vocabulary, const std::vector<std::pair<std::string, std::string>>& merges);

  // Appends the ids of `bytes`. Merges the pair of lowest rank, leftmost first, until none is left; the time grows as
  // n log n. Throws Input for a byte that is no token.
  void encode(std::string_view bytes, std::vector<int32_t>& ids) const;

 private:
  struct Merge {
    uint64_t pair = kNoPair;  // left id << 32 | right id
    uint32_t rank = 0;
    int32_t id = 0;
  };
  static constexpr uint64_t kNoPair = ~uint64_t{0};

  const Merge* find(int32_t left, int32_t right) const;
  size_t slot_of(uint64_t pair) const;

  std::vector<Merge> table_;  // open addressing, a power of two of slots, at most half full
  std::array<int32_t, 256> byte_ids_;
};

}  // namespace fnx
