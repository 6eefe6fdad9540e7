#include "libcore/text/chat.h"

#include <fmt/format.h>

#include <string_view>

#include "kernels/error.h"
#include "libcore/text/utf8.h"

namespace fnx {
namespace {

[[noreturn]] void refuse(ErrorKind kind, size_t index, std::string_view why) {
  throw Error(kind, fmt::format("messages[{}]: {}", index, why));
}

std::string parse_content(const Json& content, size_t index) {
  if (content.is_string()) return content.get<std::string>();
  if (!content.is_array()) refuse(ErrorKind::Input, index, "content is neither a string nor a list of text parts");
  std::string text;
  for (const Json& part : content) {
    const std::string type =
        part.is_object() && part.contains("type") && part["type"].is_string() ? part["type"].get<std::string>() : "";
    if (type.empty()) refuse(ErrorKind::Input, index, "a content part has no type");
    if (type != "text") refuse(ErrorKind::Unsupported, index, fmt::format("content of type {} is not supported", type));
    if (!part.contains("text") || !part["text"].is_string()) refuse(ErrorKind::Input, index, "a text part has no text");
    text += part["text"].get<std::string>();
  }
  return text;
}

bool is_plain_role(std::string_view role) { return role == "system" || role == "user" || role == "assistant"; }

// The template's own words: a model was trained on them, so they are data and not ours to change.
constexpr std::string_view kEffortLine =
    "Reasoning effort is set to xhigh. Please think carefully through the task, validate key assumptions, consider "
    "plausible alternatives, and prioritize correctness, consistency, and clarity in the final answer.";

}  // namespace

std::vector<ChatMessage> parse_messages(const Json& messages) {
  if (!messages.is_array()) throw Error(ErrorKind::Input, "messages is not a list");
  std::vector<ChatMessage> out;
  for (size_t i = 0; i < messages.size(); ++i) {
    const Json& message = messages[i];
    if (!message.is_object() || !message.contains("role") || !message["role"].is_string())
      refuse(ErrorKind::Input, i, "has no role");
    const std::string role = message["role"].get<std::string>();
    if (!is_plain_role(role))
      refuse(ErrorKind::Unsupported, i, fmt::format("role {} is not supported; system, user and assistant are", role));
    std::string reasoning;
    for (const auto& [key, value] : message.items()) {
      if (key == "role" || key == "content" || value.is_null()) continue;
      if (key != "reasoning_content" || role != "assistant")
        refuse(ErrorKind::Unsupported, i,
               fmt::format("key {} is not supported; role, content and an assistant's reasoning_content are", key));
      if (!value.is_string()) refuse(ErrorKind::Input, i, "reasoning_content is no string");
      reasoning = value.get<std::string>();
    }
    if (!message.contains("content")) refuse(ErrorKind::Input, i, "has no content");
    out.push_back({role, parse_content(message["content"], i), reasoning});
  }
  return out;
}

std::string render_chat(const std::vector<ChatMessage>& messages, bool thinking) {
  bool asked = false;
  std::string text;
  const auto turn = [&](std::string_view role, std::string_view body) {
    text += fmt::format("<|im_start|>{}\n{}<|im_end|>\n", role, body);
  };
  const std::string_view effort = thinking ? kEffortLine : "";
  if (!effort.empty() && (messages.empty() || messages[0].role != "system")) turn("system", effort);
  for (size_t i = 0; i < messages.size(); ++i) {
    const ChatMessage& m = messages[i];
    const std::string_view content = trim_white_space(m.content);
    if (m.role == "system") {
      if (i > 0) refuse(ErrorKind::Input, i, "a system message must be the first");
      if (!effort.empty() || !content.empty())
        turn(m.role, fmt::format("{}{}{}", effort, effort.empty() || content.empty() ? "" : "\n\n", content));
    } else if (m.role == "assistant") {
      turn(m.role, fmt::format("<think>\n{}\n</think>\n\n{}", trim_white_space(m.reasoning), content));
    } else if (m.role == "user") {
      turn(m.role, content);
      asked = true;
    } else {
      refuse(ErrorKind::Input, i, fmt::format("role {} is unknown", m.role));
    }
  }
  if (!asked) throw Error(ErrorKind::Input, "messages hold no user message");
  return text + (thinking ? "<|im_start|>assistant\n<think>\n" : "<|im_start|>assistant\n<think>\n\n</think>\n\n");
}

}  // namespace fnx
