#include "libcore/text/tokenizer.h"

#include <fmt/format.h>

#include <fstream>

#include "kernels/error.h"
#include "libcore/receipt/receipt.h"
#include "libcore/text/nfc.h"
#include "libcore/text/tokenizer_json.h"
#include "libcore/text/utf8.h"

namespace fnx {
namespace {

using nlohmann::json;

// The split of a ByteLevel step that is told to use its own.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

[[noreturn]] void refuse(const std::string& what) { throw Error(ErrorKind::Input, what); }
[[noreturn]] void unsupported(const std::string& what) { throw Error(ErrorKind::Unsupported, what); }

const json& member(const json& object, const char* key) {
  static const json kNull;
  const auto found = object.find(key);
  return found == object.end() ? kNull : *found;
}

std::string type_of(const json& step, std::string_view where) {
  if (!step.is_object() || !member(step, "type").is_string()) refuse(fmt::format("{} has no type", where));
  return step["type"].get<std::string>();
}

bool flag(const json& object, const char* key, bool when_absent, std::string_view where) {
  const json& value = member(object, key);
  if (value.is_null()) return when_absent;
  if (!value.is_boolean()) refuse(fmt::format("{}.{} is not true or false", where, key));
  return value.get<bool>();
}

const json& list(const json& object, const char* key, std::string_view where) {
  const json& value = member(object, key);
  if (!value.is_array()) refuse(fmt::format("{}.{} is not a list", where, key));
  return value;
}

bool read_normalizer(const json& step) {
  if (step.is_null()) return false;
  const std::string type = type_of(step, "normalizer");
  if (type == "NFC") return true;
  if (type != "Sequence") unsupported(fmt::format("normalizer {} is not supported; NFC is", type));
  bool nfc = false;
  for (const json& part : list(step, "normalizers", "normalizer")) nfc |= read_normalizer(part);
  return nfc;
}

// Appends the patterns of a pre_tokenizer; returns whether it ends in the byte-level alphabet.
bool read_pre_tokenizer(const json& step, std::vector<SplitRegex>& splitters) {
  const std::string type = type_of(step, "pre_tokenizer");
  if (type == "Sequence") {
    bool byte_level = false;
    for (const json& part : list(step, "pretokenizers", "pre_tokenizer")) {
      if (byte_level) unsupported("pre_tokenizer ByteLevel is not the last of its Sequence");
      byte_level = read_pre_tokenizer(part, splitters);
    }
    return byte_level;
  }
  if (type == "Split") {
    const json& pattern = member(step, "pattern");
    if (!pattern.is_object() || !member(pattern, "Regex").is_string())
      unsupported("pre_tokenizer Split without a Regex is not supported");
    if (member(step, "behavior") != "Isolated" || flag(step, "invert", false, "pre_tokenizer Split"))
      unsupported("pre_tokenizer Split other than behavior Isolated, invert false is not supported");
    splitters.emplace_back(pattern["Regex"].get<std::string>());
    return false;
  }
  if (type == "ByteLevel") {
    if (flag(step, "add_prefix_space", true, "pre_tokenizer ByteLevel"))
      unsupported("pre_tokenizer ByteLevel with add_prefix_space is not supported");
    if (flag(step, "use_regex", true, "pre_tokenizer ByteLevel")) splitters.emplace_back(kByteLevelPattern);
    return true;
  }
  unsupported(fmt::format("pre_tokenizer {} is not supported; Split and ByteLevel are", type));
}

void check_model(const json& model) {
  const std::string type = type_of(model, "model");
  if (type != "BPE") unsupported(fmt::format("model {} is not supported; BPE is", type));
  if (flag(model, "byte_fallback", false, "model")) unsupported("model.byte_fallback is not supported");
  if (!member(model, "unk_token").is_null()) unsupported("model.unk_token is not supported");
  for (const char* affix : {"continuing_subword_prefix", "end_of_word_suffix"})
    if (!member(model, affix).is_null() && member(model, affix) != "")
      unsupported(fmt::format("model.{} is not supported", affix));
  if (!member(model, "dropout").is_null() && member(model, "dropout") != 0)
    unsupported("model.dropout is not supported");
}

AddedToken read_added_token(const json& entry, size_t index) {
  const std::string where = fmt::format("added_tokens[{}]", index);
  if (!entry.is_object() || !member(entry, "content").is_string() || !member(entry, "id").is_number_unsigned() ||
      entry["id"].get<uint64_t>() >= (1u << 24))
    refuse(where + " lacks an id or content");
  AddedToken token;
  token.content = entry["content"].get<std::string>();
  token.id = entry["id"].get<int32_t>();
  token.special = flag(entry, "special", false, where);
  token.normalized = flag(entry, "normalized", !token.special, where);
  token.single_word = flag(entry, "single_word", false, where);
  token.lstrip = flag(entry, "lstrip", false, where);
  token.rstrip = flag(entry, "rstrip", false, where);
  return token;
}

bool is_ascii(std::string_view text) {
  for (const char c : text)
    if (static_cast<uint8_t>(c) >= 0x80) return false;
  return true;
}

}  // namespace

Tokenizer Tokenizer::load(const std::filesystem::path& path) {
  std::error_code error;
  const auto file = std::filesystem::is_directory(path, error) ? path / "tokenizer.json" : path;
  std::ifstream in(file, std::ios::binary);
  std::string text;
  const auto bytes = std::filesystem::file_size(file, error);
  if (!error && in) {
    text.resize(bytes);
    in.read(text.data(), static_cast<std::streamsize>(bytes));
  }
  if (error || !in) refuse(fmt::format("{} cannot be read; --model names a folder that holds it", file.string()));
  try {
    return parse(text);
  } catch (const Error& e) {
    throw Error(e.kind(), fmt::format("{}: {}", file.string(), e.what()));
  }
}

Tokenizer Tokenizer::parse(std::string_view text) {
  TokenizerJson parsed = parse_tokenizer_json(text);
  const json& rest = parsed.rest;
  check_model(member(rest, "model"));
  if (!parsed.has_vocab) refuse("model.vocab is missing or no object");
  if (!parsed.has_merges) refuse("model.merges is missing or no list");
  for (const char* part : {"truncation", "padding"})
    if (!member(rest, part).is_null()) unsupported(fmt::format("{} is not supported", part));
  const json& post = member(rest, "post_processor");
  if (!post.is_null() && type_of(post, "post_processor") != "ByteLevel")
    unsupported(fmt::format("post_processor {} is not supported", type_of(post, "post_processor")));
  if (type_of(member(rest, "decoder"), "decoder") != "ByteLevel")
    unsupported(fmt::format("decoder {} is not supported; ByteLevel is", type_of(rest["decoder"], "decoder")));

  Vocabulary vocabulary;
  vocabulary.reserve(parsed.vocab.size());
  for (auto& [spelling, id] : parsed.vocab) vocabulary.add(std::move(spelling), id);
  Bpe bpe(vocabulary, parsed.merges);
  Tokenizer out(std::move(vocabulary), std::move(bpe));

  out.nfc_ = read_normalizer(member(rest, "normalizer"));
  if (!read_pre_tokenizer(member(rest, "pre_tokenizer"), out.splitters_))
    unsupported("pre_tokenizer without ByteLevel is not supported");
  out.ignore_merges_ = flag(rest["model"], "ignore_merges", false, "model");

  const json& added = member(rest, "added_tokens");
  for (size_t i = 0; i < added.size(); ++i) {
    AddedToken token = read_added_token(added[i], i);
    out.vocabulary_.add(token.content, token.id);
    if (out.special_.size() < static_cast<size_t>(out.vocab_limit())) out.special_.resize(out.vocab_limit());
    out.special_[token.id] = token.special;
    if (token.normalized && out.nfc_) token.content = to_nfc(token.content);
    (token.normalized ? out.added_normalized_ : out.added_).add(std::move(token));
  }
  out.special_.resize(out.vocab_limit());
  out.fingerprint_ = xxh3_hex(text.data(), text.size());
  out.file_bytes_ = text.size();
  return out;
}

std::vector<int32_t> Tokenizer::encode(std::string_view utf8, bool parse_special) const {
  require_utf8(utf8, "text");
  if (utf8.size() > INT32_MAX)
    refuse(fmt::format("text of {} bytes is too long; the limit is {}", utf8.size(), INT32_MAX));
  std::vector<int32_t> ids;
  added_.split(
      utf8, parse_special, [&](std::string_view plain) { encode_plain(plain, parse_special, ids); },
      [&](int32_t id) { ids.push_back(id); });
  return ids;
}

void Tokenizer::encode_plain(std::string_view text, bool parse_special, std::vector<int32_t>& ids) const {
  std::string composed;
  if (nfc_ && !is_ascii(text)) text = composed = to_nfc(text);
  added_normalized_.split(
      text, parse_special, [&](std::string_view plain) { encode_pieces(plain, 0, ids); },
      [&](int32_t id) { ids.push_back(id); });
}

void Tokenizer::encode_pieces(std::string_view text, size_t splitter, std::vector<int32_t>& ids) const {
  if (splitter < splitters_.size()) {
    splitters_[splitter].split(text, [&](std::string_view piece) { encode_pieces(piece, splitter + 1, ids); });
    return;
  }
  if (ignore_merges_) {
    std::string spelling;
    for (const char c : text) spelling += byte_alphabet()[static_cast<uint8_t>(c)];
    if (const auto id = vocabulary_.find(spelling)) {
      ids.push_back(*id);
      return;
    }
  }
  bpe_.encode(text, ids);
}

std::string Tokenizer::decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string bytes;
  for (const int32_t id : ids) {
    if (!is_token(id)) refuse(fmt::format("id {} is no token; ids are 0 to {}", id, vocab_limit() - 1));
    if (!skip_special || !is_special(id)) bytes += token_bytes(id);
  }
  std::string text;
  append_utf8_lossy(text, bytes, true);
  return text;
}

}  // namespace fnx
