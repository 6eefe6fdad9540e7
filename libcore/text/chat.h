// Plain conversations as the ChatML text that the model family was trained on.
#pragma once

#include <string>
#include <vector>

#include "libcore/receipt/receipt.h"

namespace fnx {

struct ChatMessage {
  std::string role;     // system, user or assistant
  std::string content;  // an assistant's may begin with <think>...</think>
};

// [{"role", "content"}]: a content is a string or a list of {"type": "text", "text"} parts, which are joined. Throws
// Input for another form and Unsupported, naming it, for what is no plain conversation: tools, images, other roles.
std::vector<ChatMessage> parse_messages(const Json& messages);

// The conversation and the beginning of the next answer, with its thinking part opened when `thinking`, otherwise
// empty. The thinking part of answers before the last user message is left out. Throws Input for a system message that
// is not the first, a role that is not known and a conversation without a user message.
std::string render_chat(const std::vector<ChatMessage>& messages, bool thinking);

}  // namespace fnx
