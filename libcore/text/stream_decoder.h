// Decodes ids as they are generated; the pieces joined are Tokenizer::decode of the whole list.
#pragma once

#include <cstdint>
#include <string>

#include "libcore/text/tokenizer.h"

namespace fnx {

class StreamDecoder {
 public:
  // `tokenizer` outlives the decoder.
  explicit StreamDecoder(const Tokenizer& tokenizer, bool skip_special = false)
      : tokenizer_(&tokenizer), skip_special_(skip_special) {}

  // The text that is certain now, whole characters only; often empty inside a character. An id that is no token adds
  // nothing.
  std::string push(int32_t id);
  // The rest: U+FFFD when the last character was cut off. The decoder is then ready for another list.
  std::string finish();

 private:
  const Tokenizer* tokenizer_;
  bool skip_special_;
  std::string pending_;  // the beginning of a character, at most 3 bytes
};

}  // namespace fnx
