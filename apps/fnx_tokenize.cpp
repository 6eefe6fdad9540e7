// Text to token ids and back, one line at a time.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <filesystem>
#include <fstream>
#include <iostream>

#include "kernels/error.h"
#include "libcore/cli/prompts.h"
#include "libcore/format/json_text.h"
#include "libcore/format/synthetic_source.h"
#include "libcore/text/chat.h"
#include "libcore/text/utf8.h"

using namespace fnx;

namespace {

struct Options {
  std::string model, file = "-", jsonl, format = "table", thinking = "on";
  bool decode = false, chat = false, no_special = false;
};

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::Input, what); }

// "1 2 3", "1,2,3" or "[1, 2, 3]".
std::vector<int32_t> parse_ids(std::string_view line) {
  std::vector<int32_t> ids;
  constexpr std::string_view kBetween = " \t\r,";
  std::string_view rest = trim_white_space(line);
  if (rest.starts_with('[') && rest.ends_with(']')) rest = rest.substr(1, rest.size() - 2);
  while (true) {
    rest.remove_prefix(std::min(rest.find_first_not_of(kBetween), rest.size()));
    if (rest.empty()) return ids;
    const std::string_view word = rest.substr(0, rest.find_first_of(kBetween));
    int32_t id = 0;
    const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), id);
    if (error != std::errc{} || end != word.data() + word.size())
      refuse(fmt::format("\"{}\" is no token id", printable(word)));
    ids.push_back(id);
    rest.remove_prefix(word.size());
  }
}

struct Line {
  Json id;
  std::vector<int32_t> ids;
  std::string decoded;
};

class Converter {
 public:
  Converter(const Options& options, const Tokenizer& tokenizer) : options_(options), tokenizer_(tokenizer) {}

  Line convert(const std::string& line, size_t number) const {
    Line out;
    out.id = number;
    if (options_.jsonl.empty())
      options_.decode ? void(out.ids = parse_ids(line)) : void(out.ids = encode_text(line));
    else
      read_object(line, out);
    if (options_.decode || !options_.jsonl.empty()) out.decoded = tokenizer_.decode(out.ids);
    return out;
  }

  std::string print(const Line& line) const {
    if (!options_.jsonl.empty())
      return Json{{"id", line.id}, {"tokens", line.ids}, {"decoded", line.decoded}}.dump() + "\n";
    if (options_.decode) return (options_.format == "table" ? line.decoded : Json(line.decoded).dump()) + "\n";
    return (options_.format == "table" ? fmt::format("{}", fmt::join(line.ids, " ")) : Json(line.ids).dump()) + "\n";
  }

 private:
  std::vector<int32_t> encode_text(const std::string& text) const {
    if (options_.chat) return encode_chat({{"user", text}});
    return tokenizer_.encode(text, !options_.no_special);
  }

  std::vector<int32_t> encode_chat(const std::vector<ChatMessage>& messages) const {
    return tokenizer_.encode(render_chat(messages, options_.thinking == "on"));
  }

  void read_object(const std::string& line, Line& out) const {
    require_utf8(line, "the line");
    const Json object = parse_json(line, "the line");
    if (!object.is_object()) refuse("not a JSON object");
    int sources = 0;
    for (const auto& [key, value] : object.items()) {
      if (key == "id") {
        out.id = line_id(value);
        continue;
      }
      ++sources;
      if (key == "tokens" && options_.decode)
        out.ids = line_tokens(value);
      else if (key == "text" && !options_.decode && value.is_string())
        out.ids = encode_text(value.get<std::string>());
      else if (key == "messages" && !options_.decode)
        out.ids = encode_chat(parse_messages(value));
      else
        refuse(fmt::format("unexpected \"{}\"; {}", key, expected()));
    }
    if (sources != 1) refuse(fmt::format("{} sources in one object; {}", sources, expected()));
  }

  std::string_view expected() const {
    return options_.decode ? "--decode takes id and tokens" : "give id and either text, a string, or messages";
  }

  const Options& options_;
  const Tokenizer& tokenizer_;
};

void tokenize(const Options& options, ToolRun& run) {
  if (options.model.empty()) throw Error(ErrorKind::Usage, "--model is missing; it names the checkpoint folder");
  if (options.decode && options.chat) throw Error(ErrorKind::Usage, "--decode and --chat exclude each other");
  if (options.no_special && (options.decode || options.chat))
    throw Error(ErrorKind::Usage, "--no-special goes with neither --decode nor --chat");
  const std::string source = options.jsonl.empty() ? options.file : options.jsonl;
  std::ifstream file;
  if (source != "-") file.open(source, std::ios::binary);
  if (!file || (source != "-" && std::filesystem::is_directory(source))) refuse(fmt::format("cannot read {}", source));
  std::istream& in = source == "-" ? std::cin : file;

  need_folder(options.model);
  const Tokenizer tokenizer = Tokenizer::load(options.model);
  run.receipt().add_subject("tokenizer", "tokenizer.json", tokenizer.file_bytes(),
                            make_fingerprint("file", "xxh3-128", tokenizer.fingerprint(), false));
  const Converter converter(options, tokenizer);
  std::vector<int32_t> all_ids;
  std::string line;
  uint64_t lines = 0, input_bytes = 0, special = 0;
  for (size_t number = 1; !run.stopping() && std::getline(in, line) && !cannot_read(in); ++number) {
    input_bytes += line.size() + (in.eof() ? 0 : 1);
    if (!options.jsonl.empty() && line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      const Line converted = converter.convert(line, number);
      for (const int32_t id : converted.ids) special += tokenizer.is_special(id);
      all_ids.insert(all_ids.end(), converted.ids.begin(), converted.ids.end());
      run.print(converter.print(converted));
    } catch (const Error& e) {
      if (e.kind() == ErrorKind::Output) throw;
      throw Error(e.kind(), fmt::format("{}, line {}: {}", source == "-" ? "stdin" : source, number, e.what()));
    }
    ++lines;
  }
  if (cannot_read(in) && !run.stopping()) refuse(fmt::format("cannot read {}", source == "-" ? "stdin" : source));

  Receipt& receipt = run.receipt();
  receipt.add_subject("prompts", source == "-" ? "stdin" : std::filesystem::path(source).filename().string(),
                      input_bytes);
  receipt.result = {{"lines", lines}, {"tokens", all_ids.size()}, {"token_hash", token_hash(all_ids)}};
  receipt.evidence = {{"input_bytes", input_bytes}, {"special_tokens", special}};
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{
      "fnx-tokenize",
      "Turns lines of text into token ids, or ids into text.",
      {"fnx-tokenize --model fixtures/flashnext-tiny prompts.txt",
       "echo '{\"id\": 1, \"tokens\": [64, 65]}' | fnx-tokenize --model fixtures/flashnext-tiny --decode --jsonl -"}};
  return run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("--model", options.model, "Folder that holds tokenizer.json")->type_name("DIR");
        auto* file = app.add_option("file", options.file, "One text a line, or one id list with --decode; - is stdin")
                         ->type_name("FILE")
                         ->capture_default_str();
        app.add_option("--jsonl", options.jsonl,
                       "One object a line: id and one of text, messages, or tokens with --decode; - is stdin")
            ->type_name("FILE")
            ->excludes(file);
        app.add_flag("--decode", options.decode,
                     "Ids to text; a text with line breaks needs --format json to stay on one line");
        app.add_flag("--chat", options.chat, "Wrap each text as one user message of the chat template");
        app.add_option("--thinking", options.thinking, "Whether the chat template opens a thinking part")
            ->check(CLI::IsMember({"on", "off"}))
            ->capture_default_str();
        app.add_flag("--no-special", options.no_special, "Read the text of special tokens as plain text");
        app.add_option("--format", options.format, "Of lines: plain, or JSON; --jsonl always prints objects")
            ->check(CLI::IsMember({"table", "json", "jsonl"}))
            ->capture_default_str();
      },
      [&](ToolRun& run) { tokenize(options, run); });
}
