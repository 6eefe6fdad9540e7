#include "libcore/text/stream_decoder.h"

#include <doctest/doctest.h>

#include <random>

#include "libcore/text/utf8.h"

using namespace fnx;
using Ids = std::vector<int32_t>;

namespace {

const Tokenizer& fixture() {
  static const Tokenizer tokenizer = Tokenizer::load(FNX_SOURCE_DIR "/fixtures/flashnext-tiny");
  return tokenizer;
}

int32_t byte_token(uint8_t byte) { return fixture().token_id(byte_alphabet()[byte]).value(); }

// Every piece is whole UTF-8, and the pieces joined are the decoded list.
void check_stream(const Ids& ids) {
  StreamDecoder decoder(fixture());
  std::string joined;
  bool whole = true;
  for (const int32_t id : ids) {
    const std::string piece = decoder.push(id);
    whole &= find_invalid_utf8(piece) == std::string::npos;
    joined += piece;
  }
  joined += decoder.finish();
  CHECK(whole);
  CHECK(joined == fixture().decode(ids));
}

}  // namespace

TEST_CASE("stream decoder: holds a character back when its bytes come token by token") {
  for (const std::string& text : {std::string("\U0001F600"), std::string("\u4e2d"), std::string("\u00e9")}) {
    StreamDecoder decoder(fixture());
    std::string last;
    for (size_t i = 0; i < text.size(); ++i) {
      CHECK(last.empty());
      last = decoder.push(byte_token(static_cast<uint8_t>(text[i])));
    }
    CHECK(last == text);
    CHECK(decoder.finish().empty());
  }
}

TEST_CASE("stream decoder: replaces at once what no further byte can repair, the rest when finished") {
  StreamDecoder decoder(fixture());
  CHECK(decoder.push(byte_token(0xFF)) == "\uFFFD");
  CHECK(decoder.push(byte_token(0xF0)).empty());
  CHECK(decoder.push(byte_token(0x9F)).empty());
  CHECK(decoder.push(byte_token('a')) == "\uFFFDa");
  CHECK(decoder.push(byte_token(0xE4)).empty());
  CHECK(decoder.finish() == "\uFFFD");
  CHECK(decoder.finish().empty());
  CHECK(decoder.push(byte_token(0xAD)) == "\uFFFD");
}

TEST_CASE("stream decoder: joins to the decoded list when ids are random") {
  std::mt19937 random(7);
  const int32_t limit = fixture().vocab_limit();
  for (int round = 0; round < 400; ++round) {
    Ids ids(random() % 60);
    // Every other list is of single bytes, where characters break most often.
    for (int32_t& id : ids)
      id = round % 2 == 0 ? static_cast<int32_t>(random() % limit) : byte_token(static_cast<uint8_t>(random() % 256));
    check_stream(ids);
  }
  Ids all(limit);
  for (int32_t id = 0; id < limit; ++id) all[id] = id;
  check_stream(all);
  check_stream(fixture().encode("\U0001F469\u200D\U0001F680 \u4e2d\u6587 na\u00efve \uFFFD"));
}

TEST_CASE("stream decoder: leaves special tokens out when told to, and ids that are no token always") {
  StreamDecoder decoder(fixture(), true);
  CHECK(decoder.push(4002).empty());
  CHECK(decoder.push(4005) == "<think>");
  CHECK(decoder.push(fixture().vocab_limit()).empty());
  CHECK(StreamDecoder(fixture()).push(4002) == "<|im_end|>");
}
