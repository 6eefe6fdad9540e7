#include "libcore/text/stream_decoder.h"

#include "libcore/text/utf8.h"

namespace fnx {

std::string StreamDecoder::push(int32_t id) {
  if (skip_special_ && tokenizer_->is_special(id)) return {};
  pending_ += tokenizer_->token_bytes(id);
  std::string text;
  pending_.erase(0, append_utf8_lossy(text, pending_, false));
  return text;
}

std::string StreamDecoder::finish() {
  std::string text;
  append_utf8_lossy(text, pending_, true);
  pending_.clear();
  return text;
}

}  // namespace fnx
