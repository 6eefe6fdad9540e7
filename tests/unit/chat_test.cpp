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

TEST_CASE("chat: opens the thinking part, states the effort and trims contents when thinking is on") {
  const std::string with = render_chat({{"system", " Be brief.\n"}, {"user", "\n Hi \u3000"}}, true);
  const std::string without = render_chat({{"user", "Hi"}}, true);
  const std::string line = without.substr(0, without.find("<|im_end|>"));
  CHECK(line.starts_with("<|im_start|>system\nReasoning effort is set to xhigh. "));
  const std::string rest = "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n";
  CHECK(without == line + rest);
  CHECK(with == line + "\n\nBe brief." + rest);
}

TEST_CASE("chat: leaves out an empty system message when thinking is off") {
  CHECK(render_chat({{"system", " "}, {"user", "Hi"}}, false) == render_chat({{"user", "Hi"}}, false));
  CHECK(render_chat({{"system", "Be brief."}, {"user", "Hi"}}, false)
            .starts_with("<|im_start|>system\nBe brief.<|im_end|>\n"));
}

TEST_CASE("chat: earlier answers keep the thinking that they came with and no other") {
  CHECK(render_chat({{"user", "a"}, {"assistant", "shown", " why\n"}, {"user", "b"}}, false) ==
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>\nwhy\n</think>\n\nshown<|im_end|>\n"
        "<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n");
  const Json messages = {{{"role", "user"}, {"content", "a"}},
                         {{"role", "assistant"}, {"content", "b"}, {"reasoning_content", "c"}}};
  CHECK(parse_messages(messages).at(1).reasoning == "c");
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
