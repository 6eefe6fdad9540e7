// Long text with facts hidden in it, for the recall of long contexts.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libcore/text/tokenizer.h"

namespace fnx {

struct Needle {
  std::vector<int32_t> question;  // ends where the answer begins
  std::string answer;             // digits
};

struct NeedleText {
  std::vector<int32_t> ids;
  std::vector<Needle> needles;  // in the order of their places, which are spread evenly
};

// Exactly `tokens` ids of filler with `needles` facts; other names and numbers for every `stream`. Throws Usage when
// the facts alone take half of the tokens.
NeedleText make_needle_text(const Tokenizer& tokenizer, int64_t tokens, int64_t needles, uint64_t stream);

}  // namespace fnx
