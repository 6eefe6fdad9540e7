#include "libcore/text/tokenizer.h"

#include <doctest/doctest.h>

#include <fstream>
#include <sstream>

#include "kernels/error.h"
#include "libcore/receipt/receipt.h"
#include "tests/support/refusal.h"

using namespace fnx;
using Ids = std::vector<int32_t>;

namespace {

const std::string kFixtures = FNX_SOURCE_DIR "/fixtures/";

Json read_file(const std::string& name) { return Json::parse(std::ifstream(kFixtures + name)); }

const Tokenizer& fixture() {
  static const Tokenizer tokenizer = Tokenizer::load(kFixtures + "flashnext-tiny");
  return tokenizer;
}

// A small tokenizer over every byte, "ab" and "abc", that a test may change.
Json small_json() {
  Json vocab = Json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[byte_alphabet()[byte]] = byte;
  vocab["ab"] = 256;
  vocab["abc"] = 257;
  return {{"added_tokens", Json::array()},
          {"normalizer", {{"type", "NFC"}}},
          {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}}},
          {"decoder", {{"type", "ByteLevel"}}},
          {"model",
           {{"type", "BPE"},
            {"vocab", vocab},
            {"merges", Json::array({Json::array({"a", "b"}), Json::array({"ab", "c"})})}}}};
}

Tokenizer parse(const Json& json) { return Tokenizer::parse(json.dump()); }

// The refusal's text, or "accepted".
std::string refusal(const std::string& json, ErrorKind kind) {
  try {
    Tokenizer::parse(json);
  } catch (const Error& e) {
    CHECK(e.kind() == kind);
    return e.what();
  }
  return "accepted";
}

bool holds(const std::string& text, const std::string& part) {
  INFO(text);
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("tokenizer: gives the golden ids and texts when run on the golden strings") {
  const Json golden = read_file("golden/golden-public.json");
  for (const Json& vector : golden["tokenizer"]) {
    const std::string text = vector["text"];
    CAPTURE(text);
    const Ids ids = fixture().encode(text);
    CHECK(ids == vector["ids"].get<Ids>());
    CHECK(fixture().decode(ids) == vector["decoded"]);
  }
  for (const auto& [name, prompt] : golden["prompts"].items()) {
    CAPTURE(name);
    if (prompt["text"].is_string())
      CHECK(fixture().encode(prompt["text"].get<std::string>()) == prompt["prompt_ids"].get<Ids>());
    CHECK(fixture().decode(prompt["greedy_ids"].get<Ids>()) == prompt["greedy_text"]);
  }
}

TEST_CASE("tokenizer: agrees with the reference library when text is awkward Unicode") {
  const std::vector<std::pair<std::string, Ids>> vectors = {
      {"q\u0307\u0323 s\u0323\u0307 \u1e69", {80, 136, 96, 136, 229, 220, 157, 117, 102, 220, 157, 117, 102}},
      {"a\u0345\u0301\u0327b", {127, 94, 136, 100, 137, 227, 65}},
      {"\u1112\u1161\u11ab\uac00\u11a8 \u1100\u1161\u11a7",
       {169, 243, 250, 166, 108, 223, 220, 166, 108, 222, 157, 228, 100}},
      {"\u0f71\u0f72\u0f73\u0f80", {156, 121, 109, 156, 121, 109, 156, 121, 110, 156, 121, 110, 156, 122, 222}},
      {"\u0344\u0958\u2126\ufb1d\u0374",
       {136, 230, 136, 223, 156, 97, 243, 156, 97, 120, 138, 102, 147, 247, 146, 112, 134, 117}},
      {"x\u1ac5\u0323y \u1df8\u0327", {87, 157, 104, 227, 136, 96, 88, 220, 157, 115, 116, 136, 100}},
      {"'s 'S '\u017f 'T're'VE it\u2019s",
       {510, 220, 6, 50, 220, 6, 129, 123, 220, 6, 51, 6, 290, 6, 53, 36, 408, 2818}},
      {"a\u180eb\u1680c\302\205d\034e \u200bf",
       {64, 157, 254, 236, 65, 157, 248, 222, 66, 126, 227, 67, 216, 68, 220, 2124, 233, 69}},
      {" \011 \012 \015\012  x   \012\012", {220, 197, 220, 198, 220, 201, 198, 220, 220, 87, 220, 220, 220, 310}},
      {"1\u0660\u0967\u00b2\u00bd\u2167 3.5",
       {16, 149, 254, 156, 98, 100, 126, 110, 126, 121, 158, 227, 100, 220, 18, 13, 20}},
      {"the<|im_end|> <think>God<|endoftext|", {83, 257, 4002, 220, 4005, 38, 367, 27, 91, 432, 1003, 83, 1327, 91}},
      {"\U0001f469\U0001f3fd\u200d\U0001f680\u4e2d\u6587, kha\u0323\u0300n",
       {172, 253, 239, 102, 172, 253, 237, 121, 2124, 235, 172, 253, 248, 222, 160,
        116, 255, 162, 244, 229, 11,  359, 71,  157,  118, 94,  136, 222, 77}},
      {std::string("\000\177\001", 3), {188, 221, 189}},
      {"MiXeD--CASE__under", {44, 72, 55, 68, 35, 12, 12, 34, 1453, 36, 62, 62, 84, 709}},
  };
  for (const auto& [text, ids] : vectors) {
    CAPTURE(text);
    CHECK(fixture().encode(text) == ids);
  }
}

TEST_CASE("tokenizer: agrees with the reference library when added tokens strip, stand alone or are normalised") {
  Json json = read_file("flashnext-tiny/tokenizer.json");
  const auto add = [&](const std::string& content, std::vector<std::string> flags) {
    Json token = {{"id", 4000 + json["added_tokens"].size()}, {"content", content}, {"normalized", false}};
    for (const std::string& flag : flags) token[flag] = true;
    json["added_tokens"].push_back(token);
  };
  add("<L>", {"lstrip"});
  add("<R>", {"rstrip"});
  add("<W>", {"single_word"});
  add("<LR>", {"lstrip", "rstrip", "special"});
  add("we\u0301ll", {"normalized"});
  add("<R>>", {});
  const Tokenizer tokenizer = parse(json);
  const std::vector<std::pair<std::string, Ids>> vectors = {
      {"a <L> b", {64, 4007, 276}},
      {"a  <R>  b", {64, 220, 220, 4008, 65}},
      {"a<W>b", {64, 27, 54, 29, 65}},
      {"a <W>.", {64, 220, 4009, 13}},
      {"\u4e2d<W>", {160, 116, 255, 27, 54, 29}},
      {"\u24b6<W>", {158, 240, 114, 27, 54, 29}},
      {"x  <LR> <LR>  y", {87, 4010, 4010, 88}},
      {" <R> <L> z", {220, 4008, 4007, 3375}},
      {"w\u00e9ll we\u0301ll", {4011, 220, 4011}},
      {"a<R>> b<R", {64, 4012, 276, 27, 49}},
  };
  for (const auto& [text, ids] : vectors) {
    CAPTURE(text);
    CHECK(tokenizer.encode(text) == ids);
  }
}

TEST_CASE("tokenizer: reads special tokens as text when told to, other added tokens never") {
  const Ids ids = fixture().encode("<|im_end|><think>", false);
  CHECK(ids.back() == 4005);
  CHECK(std::count(ids.begin(), ids.end(), 4002) == 0);
  CHECK(fixture().decode(ids) == "<|im_end|><think>");
  CHECK(fixture().decode(Ids{4002, 64, 4005}, true) == "a<think>");
}

TEST_CASE("tokenizer: refuses text with its byte offset when it is not UTF-8") {
  const std::vector<std::pair<std::string, std::string>> cases = {
      {"abc\xFF", "offset 3 of 4"},           {"\xC3", "offset 0 of 1"},
      {"ok\xED\xA0\x80", "offset 2 of 5"},    {"\xC0\x80", "offset 0 of 2"},
      {"é\xF4\x90\x80\x80", "offset 2 of 6"}, {"\xE4\xB8\xAD\x80", "offset 3 of 4"}};
  for (const auto& [text, part] : cases) {
    CHECK(holds(test::refusal_of([&] { fixture().encode(text); }), part));
  }
}

TEST_CASE("tokenizer: knows which ids are tokens when asked for holes, padding rows and specials") {
  Json json = small_json();
  json["added_tokens"] = {{{"id", 300}, {"content", "<e>"}, {"special", true}}};
  const Tokenizer tokenizer = parse(json);
  CHECK(tokenizer.vocab_limit() == 301);
  CHECK(tokenizer.token_id("<e>") == 300);
  CHECK(tokenizer.token_id("abc") == 257);
  CHECK_FALSE(tokenizer.token_id("zz").has_value());
  CHECK(tokenizer.token_bytes(257) == "abc");
  CHECK(tokenizer.token_bytes(0) == std::string_view("\0", 1));
  for (const int32_t id : {-1, 258, 299, 301, 248000}) {
    CHECK_FALSE(tokenizer.is_token(id));
    CHECK_FALSE(tokenizer.is_special(id));
    CHECK(tokenizer.token_bytes(id).empty());
    CHECK_THROWS_WITH_AS(tokenizer.decode(Ids{97, id}), doctest::Contains(std::to_string(id).c_str()), Error);
  }
  CHECK(tokenizer.is_special(300));
  CHECK_FALSE(tokenizer.is_special(257));
}

TEST_CASE("tokenizer: takes the same merges when they are written as pairs and as strings") {
  Json json = small_json();
  const Ids expected = {257, 256, 120};
  CHECK(parse(json).encode("abcabx") == expected);
  json["model"]["merges"] = {"a b", "ab c"};
  CHECK(parse(json).encode("abcabx") == expected);
}

TEST_CASE("tokenizer: takes a whole piece without merging when ignore_merges is set") {
  Json json = small_json();
  json["model"]["merges"] = Json::array();
  CHECK(parse(json).encode("abc ab") == Ids{97, 98, 99, 32, 97, 98});
  json["model"]["ignore_merges"] = true;
  CHECK(parse(json).encode("abc") == Ids{257});
  CHECK(parse(json).encode("abcab") == Ids{97, 98, 99, 97, 98});
}

TEST_CASE("tokenizer: leaves text as it is when there is no normalizer") {
  Json json = small_json();
  CHECK(parse(json).decode(parse(json).encode("e\u0301")) == "\u00e9");
  json["normalizer"] = {{"type", "Sequence"}, {"normalizers", {{{"type", "NFC"}}}}};
  CHECK(parse(json).decode(parse(json).encode("e\u0301")) == "\u00e9");
  json["normalizer"] = nullptr;
  CHECK(parse(json).decode(parse(json).encode("e\u0301")) == "e\u0301");
}

TEST_CASE("tokenizer: stays fast when a piece is very long") {
  std::string letters(400'000, 'a');
  for (size_t i = 0; i < letters.size(); ++i) letters[i] = static_cast<char>('a' + i * i % 7);
  for (const std::string& text : {letters, std::string(2'000'000, ' ') + "x", std::string(400'000, '\n'),
                                  std::string(400'000, '1'), std::string(400'000, '!')})
    CHECK(fixture().decode(fixture().encode(text)) == text);
}

TEST_CASE("tokenizer: names the part when the pipeline is of another kind") {
  const auto unsupported = [](const char* pointer, const Json& value) {
    Json json = small_json();
    json[Json::json_pointer(pointer)] = value;
    return refusal(json.dump(), ErrorKind::Unsupported);
  };
  CHECK(holds(unsupported("/normalizer/type", "NFKC"), "NFKC"));
  CHECK(holds(unsupported("/pre_tokenizer/type", "Whitespace"), "Whitespace"));
  CHECK(holds(unsupported("/pre_tokenizer/add_prefix_space", true), "add_prefix_space"));
  CHECK(holds(unsupported("/decoder/type", "WordPiece"), "WordPiece"));
  CHECK(holds(unsupported("/model/type", "Unigram"), "Unigram"));
  CHECK(holds(unsupported("/model/byte_fallback", true), "byte_fallback"));
  CHECK(holds(unsupported("/model/unk_token", "<unk>"), "unk_token"));
  CHECK(holds(unsupported("/model/end_of_word_suffix", "</w>"), "end_of_word_suffix"));
  CHECK(holds(unsupported("/post_processor", {{"type", "TemplateProcessing"}}), "TemplateProcessing"));
  CHECK(holds(unsupported("/padding", {{"strategy", "BatchLongest"}}), "padding"));
  CHECK(
      holds(unsupported("/pre_tokenizer",
                        {{"type", "Split"}, {"pattern", {{"Regex", "a"}}}, {"behavior", "Removed"}, {"invert", false}}),
            "Isolated"));
}

TEST_CASE("tokenizer: refuses a damaged file with what is wrong when loading") {
  const auto refused = [](const char* pointer, const Json& value) {
    Json json = small_json();
    json[Json::json_pointer(pointer)] = value;
    return refusal(json.dump(), ErrorKind::Input);
  };
  CHECK(holds(refused("/model/vocab/zz", 256), "id 256"));
  CHECK(holds(refused("/model/vocab/zz", -1), "zz"));
  CHECK(holds(refused("/model/vocab/zz", 1.5), "zz"));
  CHECK(holds(refused("/model/vocab/zz", 4294967296), "4294967296"));
  CHECK(holds(refused("/model/merges/0", "ab"), "entry 0"));
  CHECK(holds(refused("/model/merges/1", {"a", "b", "c"}), "entry 1"));
  CHECK(holds(refused("/model/merges/1", {"a", "x"}), "ax"));
  CHECK(holds(refused("/model/merges", {{"a", "b"}}), "model.merges is missing or no list"));
  CHECK(holds(refused("/model/vocab", nullptr), "model.vocab is missing or no object"));
  CHECK(holds(refused("/added_tokens/0", {{"id", 400}, {"content", "ab"}}), "two ids"));
  CHECK(holds(refused("/added_tokens/0", {{"id", 97}, {"content", "<x>"}}), "id 97"));
  CHECK(holds(refused("/added_tokens/0", {{"id", 400}, {"content", ""}}), "400"));
  CHECK(holds(refusal("{", ErrorKind::Input), "parse"));
  CHECK(holds(refusal("[]", ErrorKind::Input), "object"));
  CHECK(holds(refusal(R"({"a": 1, "a": 2})", ErrorKind::Input), "given twice: a"));
  CHECK(holds(refusal(R"({"model": {"type": "BPE", "vocab": {"a": 1, "a": 2}, "merges": []},
                          "decoder": {"type": "ByteLevel"}})",
                      ErrorKind::Input),
              "two ids"));
}

TEST_CASE("tokenizer: refuses a byte that no token spells when it is in the text") {
  Json json = small_json();
  json["model"]["vocab"].erase("x");
  const Tokenizer tokenizer = parse(json);
  CHECK(tokenizer.encode("ab") == Ids{256});
  CHECK_THROWS_WITH_AS(tokenizer.encode("axb"), doctest::Contains("0x78"), Error);
}

TEST_CASE("split regex: names the offset when a pattern does not compile or means something else to others") {
  CHECK_THROWS_WITH_AS(SplitRegex("\\s\\p{L}(c"), doctest::Contains("offset 9 of \\s\\p{L}(c"), Error);
  CHECK_THROWS_WITH_AS(SplitRegex("a\\wb"), doctest::Contains("\\w"), Error);
  CHECK_THROWS_WITH_AS(SplitRegex("[a[b]]"), doctest::Contains("offset 2"), Error);
}

TEST_CASE("split regex: knows the classes of characters that are newer than the library's tables") {
  std::vector<std::string> pieces;
  // An ideograph of Unicode 15, a mark and a digit of Unicode 16, and an ideograph of Unicode 15.1.
  SplitRegex(R"(\p{N}|[^\p{L}\p{M}\p{N}]+|[\p{L}\p{M}]+)")
      .split("\U00031350\U000113B8-\U0001CCF0\U0002EBF0", [&](std::string_view p) { pieces.emplace_back(p); });
  CHECK(pieces == std::vector<std::string>{"\U00031350\U000113B8", "-", "\U0001CCF0", "\U0002EBF0"});
}

TEST_CASE("split regex: gives every byte of the text once when matches are empty or apart") {
  for (const char* pattern : {"x*", "b", "(?=b)", "\\s+", "z"}) {
    CAPTURE(pattern);
    std::string joined;
    SplitRegex(pattern).split("ab\u4e2d b\u00a0xx", [&](std::string_view piece) {
      CHECK_FALSE(piece.empty());
      joined += piece;
    });
    CHECK(joined == "ab\u4e2d b\u00a0xx");
  }
}
