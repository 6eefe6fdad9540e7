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

std::string_view strip_newlines(std::string_view text) {
  while (text.starts_with('\n')) text.remove_prefix(1);
  return text;
}

struct Answer {
  std::string_view thinking, content;
};

Answer split_thinking(std::string_view content) {
  constexpr std::string_view kOpen = "<think>", kClose = "</think>";
  const size_t first_close = content.find(kClose);
  if (first_close == std::string_view::npos) return {"", content};
  std::string_view thinking = content.substr(0, first_close);
  const size_t open = thinking.rfind(kOpen);
  if (open != std::string_view::npos) thinking.remove_prefix(open + kOpen.size());
  return {trim_white_space(thinking), strip_newlines(content.substr(content.rfind(kClose) + kClose.size()))};
}

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
    for (const auto& [key, value] : message.items())
      if (key != "role" && key != "content" && !value.is_null())
        refuse(ErrorKind::Unsupported, i, fmt::format("key {} is not supported; role and content are", key));
    if (!message.contains("content")) refuse(ErrorKind::Input, i, "has no content");
    out.push_back({role, parse_content(message["content"], i)});
  }
  return out;
}

std::string render_chat(const std::vector<ChatMessage>& messages, bool thinking) {
  size_t last_user = messages.size();
  for (size_t i = 0; i < messages.size(); ++i)
    if (messages[i].role == "user") last_user = i;
  if (last_user == messages.size()) throw Error(ErrorKind::Input, "messages hold no user message");

  std::string text;
  for (size_t i = 0; i < messages.size(); ++i) {
    const auto& [role, content] = messages[i];
    if (!is_plain_role(role)) refuse(ErrorKind::Input, i, fmt::format("role {} is unknown", role));
    if (role == "system" && i > 0) refuse(ErrorKind::Input, i, "a system message must be the first");
    const std::string_view trimmed = trim_white_space(content);
    text += fmt::format("<|im_start|>{}\n", role);
    if (role == "assistant") {
      const Answer answer = split_thinking(trimmed);
      text += fmt::format("<think>\n{}\n</think>\n\n{}", i > last_user ? answer.thinking : "", answer.content);
    } else {
      text += trimmed;
    }
    text += "<|im_end|>\n";
  }
  text += thinking ? "<|im_start|>assistant\n<think>\n" : "<|im_start|>assistant\n<think>\n\n</think>\n\n";
  return text;
}

}  // namespace fnx
