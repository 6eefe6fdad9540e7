#include "libcore/text/chat.h"

#include <doctest/doctest.h>

#include <fstream>

#include "kernels/error.h"

using namespace fnx;

namespace {

ErrorKind refusal_kind(const Json& messages, std::string& what) {
  try {
    render_chat(parse_messages(messages), false);
  } catch (const Error& e) {
    what = e.what();
    return e.kind();
  }
  what = "accepted";
  return ErrorKind::Internal;
}

}  // namespace

TEST_CASE("chat: renders the golden prompts when thinking is off") {
  const Json golden = Json::parse(std::ifstream(FNX_SOURCE_DIR "/fixtures/golden/golden-public.json"))["prompts"];
  CHECK(render_chat({{"user", "What is the capital of Paraguay?"}}, false) == golden["capital"]["text"]);
  CHECK(render_chat({{"user", "Where is Iceland located?"}}, false) == golden["location"]["text"]);
  CHECK(render_chat({{"user", "What is the capital of France?"},
                     {"assistant", "The capital of France is Paris."},
                     {"user", "Where is France?"}},
                    false) == golden["two-turns"]["text"]);
}

TEST_CASE("chat: opens the thinking part and trims contents when thinking is on") {
  CHECK(render_chat({{"system", " Be brief.\n"}, {"user", "\n Hi \u3000"}}, true) ==
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n");
}

TEST_CASE("chat: drops the thinking part of answers before the last user message and keeps it after") {
  const std::string answer = "<think>\nhidden\n</think>\n\nshown";
  CHECK(render_chat({{"user", "a"}, {"assistant", answer}, {"user", "b"}}, false) ==
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\nshown<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
  CHECK(render_chat({{"user", "a"}, {"assistant", answer}}, false) ==
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nhidden\n</think>\n\nshown<|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

TEST_CASE("chat: joins text parts when a content is a list") {
  const Json messages = {
      {{"role", "user"}, {"content", {{{"type", "text"}, {"text", "a"}}, {{"type", "text"}, {"text", " b"}}}}}};
  CHECK(parse_messages(messages).at(0).content == "a b");
}

TEST_CASE("chat: names the message and what is wrong with it when it is no plain conversation") {
  struct Case {
    Json messages;
    ErrorKind kind;
    std::string part;
  };
  const Json user = {{"role", "user"}, {"content", "a"}};
  const std::vector<Case> cases = {
      {Json::array(), ErrorKind::Input, "no user message"},
      {"text", ErrorKind::Input, "not a list"},
      {Json::array({user, {{"role", "tool"}, {"content", "a"}}}), ErrorKind::Unsupported, "messages[1]: role tool"},
      {Json::array({user, {{"role", "system"}, {"content", "a"}}}), ErrorKind::Input, "messages[1]"},
      {Json::array({{{"role", "assistant"}, {"content", "a"}}}), ErrorKind::Input, "no user message"},
      {Json::array({{{"role", "user"}, {"content", 1}}}), ErrorKind::Input, "messages[0]: content"},
      {Json::array({{{"role", "user"}}}), ErrorKind::Input, "no content"},
      {Json::array({{{"content", "a"}}}), ErrorKind::Input, "no role"},
      {Json::array({{{"role", "user"}, {"content", Json::array({{{"type", "image"}}})}}}), ErrorKind::Unsupported,
       "type image"},
      {Json::array({user, {{"role", "assistant"}, {"content", ""}, {"tool_calls", Json::array()}}}),
       ErrorKind::Unsupported, "messages[1]: key tool_calls"},
  };
  for (const Case& c : cases) {
    std::string what;
    CHECK(refusal_kind(c.messages, what) == c.kind);
    CAPTURE(what);
    CHECK(what.find(c.part) != std::string::npos);
  }
}
