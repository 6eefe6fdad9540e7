// Tokens that are found in the text itself, before it is cut into pieces.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace fnx {

struct AddedToken {
  std::string content;  // what is searched for, as it stands after normalisation when `normalized`
  int32_t id = 0;
  bool special = false;      // a control token: left out by a decode that skips such tokens
  bool normalized = false;   // searched for in normalised text, otherwise in the text as given
  bool single_word = false;  // only where no word character touches it
  bool lstrip = false;       // takes the white space before it along
  bool rstrip = false;       // takes the white space after it along
};

class AddedTokenSet {
 public:
  void add(AddedToken token);

  // Cuts `text` at the leftmost, then longest occurrences. Calls `plain` for what is between them and `token` for each.
  // Tokens that are special count as plain text when not `parse_special`.
  void split(std::string_view text, bool parse_special, const std::function<void(std::string_view)>& plain,
             const std::function<void(int32_t)>& token) const;

 private:
  const AddedToken* longest_at(std::string_view text, size_t position) const;

  std::array<std::vector<AddedToken>, 256> by_first_byte_;  // longest first
};

}  // namespace fnx
