// Reads tokenizer.json without building a tree of the two lists that make up nearly all of it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

namespace fnx {

struct TokenizerJson {
  bool has_vocab = false, has_merges = false;               // as an object and as a list
  nlohmann::json rest;                                      // everything but model.vocab and model.merges
  std::vector<std::pair<std::string, int32_t>> vocab;       // as spelled, byte-level alphabet
  std::vector<std::pair<std::string, std::string>> merges;  // in rank order
};

// Throws Input for text that is not JSON, for a key given twice and for lists of another form.
TokenizerJson parse_tokenizer_json(std::string_view text);

}  // namespace fnx
