// Text to token ids and back, as tokenizer.json describes it: byte-level BPE with added tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "libcore/text/added_tokens.h"
#include "libcore/text/bpe.h"
#include "libcore/text/split_regex.h"
#include "libcore/text/vocabulary.h"

namespace fnx {

// Immutable after loading; threads may share one.
class Tokenizer {
 public:
  // `path` is a tokenizer.json or the folder that holds it. Throws Input for a damaged file and Unsupported, naming the
  // part, for a pipeline of another kind.
  static Tokenizer load(const std::filesystem::path& path);
  static Tokenizer parse(std::string_view json);

  // Throws Input with the byte offset when `utf8` is not UTF-8. Added tokens are found in the text; special ones are
  // read as plain text when not `parse_special`.
  std::vector<int32_t> encode(std::string_view utf8, bool parse_special = true) const;

  // Bytes that form no UTF-8 become U+FFFD. Throws Input naming an id that is no token.
  std::string decode(std::span<const int32_t> ids, bool skip_special = false) const;

  // The bytes that a token stands for; empty when the id is no token.
  std::string_view token_bytes(int32_t id) const { return vocabulary_.bytes(id); }
  // Highest token id plus one. Ids from here on are padding rows of the model's head and never sampled.
  int32_t vocab_limit() const { return vocabulary_.limit(); }
  // By the spelling in tokenizer.json, for example "<|im_end|>".
  std::optional<int32_t> token_id(std::string_view content) const { return vocabulary_.find(content); }
  bool is_token(int32_t id) const { return vocabulary_.contains(id); }
  bool is_special(int32_t id) const { return id >= 0 && id < vocab_limit() && special_[id]; }
  // Size of tokenizer.json and its XXH3-128 as 32 hex digits.
  uint64_t file_bytes() const { return file_bytes_; }
  const std::string& fingerprint() const { return fingerprint_; }

 private:
  Tokenizer(Vocabulary vocabulary, Bpe bpe) : vocabulary_(std::move(vocabulary)), bpe_(std::move(bpe)) {}

  void encode_plain(std::string_view text, bool parse_special, std::vector<int32_t>& ids) const;
  void encode_pieces(std::string_view text, size_t splitter, std::vector<int32_t>& ids) const;

  Vocabulary vocabulary_;
  Bpe bpe_;
  bool nfc_ = false;
  bool ignore_merges_ = false;
  std::vector<SplitRegex> splitters_;  // applied one after the other
  AddedTokenSet added_;                // searched for before normalisation
  AddedTokenSet added_normalized_;     // searched for after it
  std::vector<bool> special_;
  uint64_t file_bytes_ = 0;
  std::string fingerprint_;
};

}  // namespace fnx
