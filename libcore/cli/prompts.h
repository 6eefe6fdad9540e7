// Prompts of a command line: one text, one id list, made-up ids or a JSONL file, as token ids.
#pragma once

#include <istream>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "libcore/cli/tool.h"
#include "libcore/format/model_config.h"
#include "libcore/text/tokenizer.h"

namespace fnx {

struct PromptOptions {
  std::string prompt, prompt_file, token_ids, jsonl;
  int64_t prompt_tokens = 0;
  bool chat = false;
  std::string thinking = "on";

  void add(CLI::App& app);
};

struct Prompt {
  Json id;  // of a JSONL line; null otherwise
  std::vector<int32_t> ids;
};

// Whether a stream ended for an error; that of std::cin only the C library knows.
bool cannot_read(const std::istream& in);
// The whole of a file, or of stdin for "-"; throws Input.
std::string read_text(const std::string& path);

// The "id" and the "tokens" of a line of JSONL; throw Input for what is none.
Json line_id(const Json& value);
std::vector<int32_t> line_tokens(const Json& value);

// `count` ids in [0, vocab), a pure function of `stream` and their places: a longer prompt begins with a shorter one.
std::vector<int32_t> made_up_prompt(int64_t count, int64_t vocab, uint64_t stream = 0);

// Throws Input when a sequence of so many tokens exceeds the model's context; `reduce` names what makes it shorter.
void require_context(const ModelConfig& config, int64_t tokens, std::string_view reduce,
                     std::string_view sequence = "a sequence");

// Throws Usage unless exactly one source is given, Input naming line and reason for a bad line. `tokenizer` may be
// null: then only ids are possible. `vocab` bounds made-up ids.
std::vector<Prompt> read_prompts(const PromptOptions& options, const Tokenizer* tokenizer, int64_t vocab);

}  // namespace fnx
