// Plain conversations as the ChatML text that the model family was trained on.
#pragma once

#include <string>
#include <vector>

#include "libcore/receipt/receipt.h"

namespace fnx {

struct ChatMessage {
  std::string role;  // system, user or assistant
  std::string content;
  std::string reasoning;  // an assistant's thinking, "reasoning_content" in JSON
};

// [{"role", "content", "reasoning_content"?}]: a content is a string or a list of {"type": "text", "text"} parts, which
// are joined. Throws Input for another form and Unsupported, naming it, for what is no plain conversation: tools,
// images, other roles.
std::vector<ChatMessage> parse_messages(const Json& messages);

// The conversation as Qwen3.8's template renders it, and the beginning of the next answer. When `thinking`, the system
// message opens with the template's line for its default effort and the answer's thinking part is left open; otherwise
// that part is empty. Earlier answers keep their thinking. Throws Input for a system message that is not the first, a
// role that is not known and a conversation without a user message.
std::string render_chat(const std::vector<ChatMessage>& messages, bool thinking);

}  // namespace fnx
