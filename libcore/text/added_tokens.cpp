#include "libcore/text/added_tokens.h"

#include <utf8proc.h>

#include <algorithm>

#include "libcore/text/utf8.h"

namespace fnx {
namespace {

bool is_word_character(char32_t c) {
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(c))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      // Join controls, and the circled and squared letters, which are alphabetic without being letters.
      return c == 0x200C || c == 0x200D || (c >= 0x24B6 && c <= 0x24E9) || (c >= 0x1F130 && c <= 0x1F149) ||
             (c >= 0x1F150 && c <= 0x1F169) || (c >= 0x1F170 && c <= 0x1F189);
  }
}

bool ends_with_word(std::string_view text) {
  if (text.empty()) return false;
  size_t start = text.size() - 1;
  while (start > 0 && (static_cast<uint8_t>(text[start]) & 0xC0) == 0x80) --start;
  return is_word_character(utf8_code_point(text.substr(start)));
}

bool starts_with_word(std::string_view text) { return !text.empty() && is_word_character(utf8_code_point(text)); }

}  // namespace

void AddedTokenSet::add(AddedToken token) {
  auto& tokens = by_first_byte_[static_cast<uint8_t>(token.content[0])];
  tokens.push_back(std::move(token));
  std::stable_sort(tokens.begin(), tokens.end(),
                   [](const AddedToken& a, const AddedToken& b) { return a.content.size() > b.content.size(); });
}

const AddedToken* AddedTokenSet::longest_at(std::string_view text, size_t position) const {
  for (const AddedToken& token : by_first_byte_[static_cast<uint8_t>(text[position])])
    if (text.substr(position).starts_with(token.content)) return &token;
  return nullptr;
}

void AddedTokenSet::split(std::string_view text, bool parse_special, const std::function<void(std::string_view)>& plain,
                          const std::function<void(int32_t)>& token) const {
  size_t done = 0;
  size_t next = 0;
  for (size_t at = 0; at < text.size(); at = next) {
    const AddedToken* found = longest_at(text, at);
    next = at + (found == nullptr ? 1 : found->content.size());
    if (found == nullptr || (found->special && !parse_special)) continue;
    if (found->single_word && (ends_with_word(text.substr(0, at)) || starts_with_word(text.substr(next)))) continue;
    size_t start = at;
    size_t stop = next;
    if (found->lstrip) start = std::max(trim_white_space_end(text.substr(0, start)), done);
    if (found->rstrip) stop += skip_white_space(text.substr(stop));
    if (start > done) plain(text.substr(done, start - done));
    token(found->id);
    done = stop;
  }
  if (done < text.size()) plain(text.substr(done));
}

}  // namespace fnx
