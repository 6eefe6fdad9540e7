#include "libcore/cli/prompts.h"

#include <fmt/format.h>

#include <charconv>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <sstream>

#include "kernels/error.h"
#include "kernels/random.h"
#include "libcore/format/json_text.h"
#include "libcore/text/chat.h"
#include "libcore/text/utf8.h"

namespace fnx {

namespace {

std::vector<int32_t> parse_ids(std::string_view text) {
  std::vector<int32_t> ids;
  const char *p = text.data(), *end = p + text.size();
  const auto separator = [](char c) { return c == ',' || c == ' ' || c == '\n' || c == '\t' || c == '\r'; };
  while (true) {
    while (p != end && separator(*p)) ++p;
    if (p == end) return ids;
    int32_t id = 0;
    const auto [next, error] = std::from_chars(p, end, id);
    if (error != std::errc{} || id < 0 || (next != end && !separator(*next)))
      throw Error(ErrorKind::Usage, fmt::format("--token-ids: \"{}\" is no token id; give numbers as in 1,2,3",
                                                std::string_view(p, std::min<size_t>(end - p, 20))));
    ids.push_back(id);
    p = next;
  }
}

void need_tokenizer(const Tokenizer* tokenizer) {
  if (tokenizer == nullptr)
    throw Error(ErrorKind::Input,
                "the model has no tokenizer.json: give --token-ids, --prompt-tokens, or \"tokens\" in --jsonl");
}

std::vector<int32_t> encode_chat(std::vector<ChatMessage> messages, const PromptOptions& o,
                                 const Tokenizer& tokenizer) {
  return tokenizer.encode(render_chat(messages, o.thinking == "on"));
}

Prompt parse_line(const std::string& line, size_t number, const PromptOptions& o, const Tokenizer* tokenizer) {
  require_utf8(line, "text");
  const Json j = parse_json(line, "line");
  if (!j.is_object()) throw Error(ErrorKind::Input, "not a JSON object");
  Prompt p;
  p.id = number;
  int sources = 0;
  for (const auto& [key, value] : j.items()) {
    if (key == "id") {
      p.id = line_id(value);
      continue;
    }
    ++sources;
    if (key == "prompt") {
      if (!value.is_string()) throw Error(ErrorKind::Input, "\"prompt\" is not a string");
      need_tokenizer(tokenizer);
      const std::string text = value;
      p.ids = o.chat ? encode_chat({{"user", text}}, o, *tokenizer) : tokenizer->encode(text);
    } else if (key == "messages") {
      need_tokenizer(tokenizer);
      p.ids = encode_chat(parse_messages(value), o, *tokenizer);
    } else if (key == "tokens") {
      p.ids = line_tokens(value);
    } else {
      throw Error(ErrorKind::Input, fmt::format("unknown key \"{}\"; id, prompt, messages and tokens are known", key));
    }
  }
  if (sources != 1) throw Error(ErrorKind::Input, "exactly one of prompt, messages and tokens is needed");
  return p;
}

}  // namespace

Json line_id(const Json& value) {
  if (!value.is_string() && !value.is_number_integer())
    throw Error(ErrorKind::Input, "\"id\" is neither a string nor an integer");
  return value;
}

std::vector<int32_t> line_tokens(const Json& value) {
  if (!value.is_array()) throw Error(ErrorKind::Input, "\"tokens\" is not a list");
  std::vector<int32_t> ids;
  for (const Json& id : value) {
    if (!id.is_number_integer() || id < 0 || id > INT32_MAX)
      throw Error(ErrorKind::Input, "\"tokens\" holds " + printable(id.dump()));
    ids.push_back(id);
  }
  return ids;
}

bool cannot_read(const std::istream& in) { return in.bad() || (&in == &std::cin && std::ferror(stdin) != 0); }

std::string read_text(const std::string& path) {
  const bool piped = path == "-";
  std::error_code ignored;
  if (!piped && std::filesystem::is_directory(path, ignored))
    throw Error(ErrorKind::Input, fmt::format("cannot read {}: it is a folder", path));
  std::ifstream file;
  if (!piped) file.open(path, std::ios::binary);
  std::istream& in = piped ? std::cin : file;
  std::string text;
  for (char part[1 << 16]; in.read(part, sizeof part), in.gcount() > 0;)
    text.append(part, static_cast<size_t>(in.gcount()));
  if (!in.eof() || cannot_read(in))
    throw Error(ErrorKind::Input, fmt::format("cannot read {}", piped ? "stdin" : path));
  return text;
}

void PromptOptions::add(CLI::App& app) {
  app.add_option("--prompt", prompt, "Prompt text")->type_name("TEXT");
  app.add_option("--prompt-file", prompt_file, "File with one prompt; - is stdin")->type_name("FILE");
  app.add_option("--token-ids", token_ids, "Prompt as ids: 1,2,3")->type_name("IDS");
  app.add_option("--prompt-tokens", prompt_tokens, "Prompt of this many made-up ids")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 24))
      ->type_name("N");
  app.add_option("--jsonl", jsonl, "One object a line: id and one of prompt, messages, tokens; - is stdin")
      ->type_name("FILE");
  app.add_flag("--chat", chat, "Wrap a prompt text as one user message of the chat template");
  app.add_option("--thinking", thinking, "Whether the chat template opens a thinking part")
      ->check(CLI::IsMember({"on", "off"}))
      ->capture_default_str();
}

std::vector<int32_t> made_up_prompt(int64_t count, int64_t vocab, uint64_t stream) {
  std::vector<int32_t> ids;
  for (int64_t i = 0; i < count; ++i)
    ids.push_back(
        static_cast<int32_t>(random_bits(0, stream, static_cast<uint64_t>(i)) % static_cast<uint64_t>(vocab)));
  return ids;
}

void require_context(const ModelConfig& config, int64_t tokens, std::string_view reduce, std::string_view sequence) {
  if (tokens > config.max_position_embeddings)
    throw Error(ErrorKind::Input, fmt::format("{}: {} tokens, the model's context holds {}; reduce {}", sequence,
                                              tokens, config.max_position_embeddings, reduce));
}

std::vector<Prompt> read_prompts(const PromptOptions& o, const Tokenizer* tokenizer, int64_t vocab) {
  const int given =
      !o.prompt.empty() + !o.prompt_file.empty() + !o.token_ids.empty() + !o.jsonl.empty() + (o.prompt_tokens > 0);
  if (given != 1)
    throw Error(ErrorKind::Usage,
                "give exactly one of --prompt, --prompt-file, --token-ids, --prompt-tokens and --jsonl, and not empty");
  std::vector<Prompt> prompts;
  if (o.prompt_tokens > 0) {
    prompts.push_back({nullptr, made_up_prompt(o.prompt_tokens, vocab)});
    return prompts;
  }
  if (!o.token_ids.empty()) {
    prompts.push_back({nullptr, parse_ids(o.token_ids)});
  } else if (o.jsonl.empty()) {
    need_tokenizer(tokenizer);
    const std::string source = o.prompt.empty() ? o.prompt_file : "--prompt";
    const std::string text = o.prompt.empty() ? read_text(o.prompt_file) : o.prompt;
    try {
      prompts.push_back({nullptr, o.chat ? encode_chat({{"user", text}}, o, *tokenizer) : tokenizer->encode(text)});
    } catch (const Error& e) {
      throw Error(e.kind(), fmt::format("{}: {}", source == "-" ? "stdin" : source, e.what()));
    }
  } else {
    std::istringstream lines(read_text(o.jsonl));
    std::string line;
    for (size_t number = 1; std::getline(lines, line); ++number) {
      if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
      try {
        prompts.push_back(parse_line(line, number, o, tokenizer));
      } catch (const Error& e) {
        throw Error(e.kind(), fmt::format("{}, line {}: {}", o.jsonl == "-" ? "stdin" : o.jsonl, number, e.what()));
      }
    }
  }
  for (const Prompt& p : prompts)
    if (p.ids.empty())
      throw Error(ErrorKind::Input,
                  fmt::format("prompt {}is empty: give at least one token", p.id.is_null() ? "" : p.id.dump() + " "));
  return prompts;
}

}  // namespace fnx
