#include <doctest/doctest.h>

#include <fstream>
#include <sstream>

#include "tests/support/run_tool.h"

using namespace fnx;

namespace {

const std::string kModel = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";

RunResult tokenize(std::vector<std::string> words, const std::string& in) {
  words.insert(words.begin(), {tool_path("fnx-tokenize"), "--model", kModel});
  return run_command(words, in);
}

}  // namespace

TEST_CASE("fnx-tokenize: prints one line of ids a line when given text") {
  const RunResult run = tokenize({}, "a\n\n  two  spaces  \nx<|endoftext|>y");
  CHECK(run.exit_code == 0);
  CHECK(run.out == "64\n\n220 858 220 604 2678 220 220\n87 4000 88\n");
  const Json receipt = read_receipt(run, "fnx-tokenize");
  CHECK(receipt["subjects"][0]["role"] == "tokenizer");
  CHECK(receipt["subjects"][0]["fingerprint"]["kind"] == "file");
  CHECK(receipt["result"]["lines"] == 4);
  CHECK(receipt["result"]["tokens"] == 11);
  CHECK(receipt["result"]["token_hash"] == token_hash({64, 220, 858, 220, 604, 2678, 220, 220, 87, 4000, 88}));
  CHECK(receipt["evidence"]["special_tokens"] == 1);
  CHECK(tokenize({"--format", "json"}, "a\n").out == "[64]\n");
  CHECK(tokenize({"--no-special"}, "<|im_end|>\n").out == "27 91 317 62 432 91 29\n");
}

TEST_CASE("fnx-tokenize: turns ids back into text when decoding") {
  const RunResult run = tokenize({"--decode"}, "87 4000 88\n[83,399,82]\n64,65\n");
  CHECK(run.exit_code == 0);
  CHECK(run.out == "x<|endoftext|>y\ntabs\nab\n");
  CHECK(tokenize({"--decode", "--format", "json"}, "64 198 65\n").out == "\"a\\nb\"\n");
}

TEST_CASE("fnx-tokenize: answers every object in order when given JSONL") {
  const RunResult run = tokenize({"--jsonl", "-"}, "{\"id\": \"b\", \"text\": \"a\"}\n\n{\"text\": \"cafe\u0301\"}\n");
  CHECK(run.exit_code == 0);
  CHECK(run.out ==
        "{\"id\":\"b\",\"tokens\":[64],\"decoded\":\"a\"}\n"
        "{\"id\":3,\"tokens\":[66,3556,127,102],\"decoded\":\"caf\u00e9\"}\n");
  CHECK(tokenize({"--jsonl", "-", "--decode"}, "{\"id\": 5, \"tokens\": [64, 198]}\n").out ==
        "{\"id\":5,\"tokens\":[64,198],\"decoded\":\"a\\n\"}\n");
}

TEST_CASE("fnx-tokenize: makes the golden chat prompts when given --chat or messages") {
  const Json golden = Json::parse(std::ifstream(FNX_SOURCE_DIR "/fixtures/golden/golden-public.json"))["prompts"];
  const RunResult run =
      tokenize({"--chat", "--thinking", "off", "--format", "json"}, "What is the capital of Paraguay?\n");
  CHECK(Json::parse(run.out) == golden["capital"]["prompt_ids"]);
  const RunResult turns =
      tokenize({"--jsonl", "-", "--thinking", "off"},
               R"({"messages": [{"role": "user", "content": "What is the capital of France?"}, {"role": "assistant",)"
               R"( "content": "The capital of France is Paris."}, {"role": "user", "content": "Where is France?"}]})");
  CHECK(Json::parse(turns.out)["tokens"] == golden["two-turns"]["prompt_ids"]);
}

TEST_CASE("fnx-tokenize: exits 3 with line and offset when input is wrong, with the answers before it printed") {
  struct Case {
    std::vector<std::string> words;
    std::string in, out, part;
  };
  const std::vector<Case> cases = {
      {{}, "a\nb\xFFz\n", "64\n", "stdin, line 2: text is not UTF-8: byte 0xFF at offset 1 of 3"},
      {{"--jsonl", "-"}, "{\"text\": \"b\xC3\"}\n", "", "line 1: the line is not UTF-8: byte 0xC3 at offset 11"},
      {{"--jsonl", "-"}, "{\"text\": 1}\n", "", "text"},
      {{"--jsonl", "-"}, "{\"tokens\": [1]}\n", "", "tokens"},
      {{"--jsonl", "-"}, "{\"id\": 1}\n", "", "0 sources"},
      {{"--decode"}, "64\n64 4007\n", "a\n", "line 2: id 4007 is no token"},
      {{"--decode"}, "64 -1\n", "", "id -1"},
      {{"--decode"}, "6x\n", "", "\"6x\""},
      {{"/nowhere/prompts.txt"}, "", "", "cannot read"},
  };
  for (const Case& c : cases) {
    CAPTURE(c.part);
    const RunResult run = tokenize(c.words, c.in);
    CAPTURE(run.err);
    CHECK(run.exit_code == 3);
    CHECK(run.out == c.out);
    CHECK(run.err.find(c.part) != std::string::npos);
    CHECK(read_receipt(run, "fnx-tokenize")["run"]["outcome"] == "error");
  }
}

TEST_CASE("fnx-tokenize: exits 3 when stdin cannot be read to its end, or the folder not at all") {
  const std::string line = "exec \"$0\" --model " + kModel + " < /";
  const RunResult run = run_command({"/bin/sh", "-c", line, tool_path("fnx-tokenize")});
  CHECK(run.exit_code == 3);
  CHECK(run.err == "fnx-tokenize: error: cannot read stdin\n");
  const std::string too_long(300, 'x');
  CHECK(run_command({tool_path("fnx-tokenize"), "--model", too_long}, "a\n").exit_code == 3);
}

TEST_CASE("fnx-tokenize: exits 2 when flags exclude each other or no model is named") {
  CHECK(tokenize({"--decode", "--chat"}, "").exit_code == 2);
  CHECK(tokenize({"--decode", "--no-special"}, "").exit_code == 2);
  CHECK(tokenize({"--jsonl", "-", "other"}, "").exit_code == 2);
  CHECK(run_command({tool_path("fnx-tokenize")}).exit_code == 2);
  const RunResult run = run_command({tool_path("fnx-tokenize")}, "a\n", {"FNX_MODEL=" + kModel});
  CHECK(run.out == "64\n");
}
