// UTF-8 validity, character by character (Unicode Standard, table 3-7).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace fnx {

enum class Utf8State {
  Valid,       // a whole character of `length` bytes
  Invalid,     // `length` bytes that begin no character: the longest cut-off beginning of one, or one byte
  Incomplete,  // all `length` bytes that are left begin a character that more bytes could finish
};

struct Utf8Step {
  Utf8State state;
  uint32_t length;  // 1 to 4 bytes
};

// What the first bytes of `bytes` are; `bytes` is not empty.
Utf8Step utf8_step(std::string_view bytes);

// Byte offset of the first sequence that is not UTF-8, or npos.
size_t find_invalid_utf8(std::string_view bytes);

// Throws Input with `what` and the byte offset when `bytes` is not UTF-8.
void require_utf8(std::string_view bytes, std::string_view what);

// Appends `bytes` to `out`, each invalid sequence as one U+FFFD. A character that the end cuts off is handled the
// same way when `last`, otherwise left; returns how many bytes were consumed.
size_t append_utf8_lossy(std::string& out, std::string_view bytes, bool last);

// The code point of a valid character that utf8_step found at the front of `bytes`.
char32_t utf8_code_point(std::string_view bytes);

// Unicode property White_Space.
bool is_white_space(char32_t c);

// Offsets of what is left after white space is taken off at the front and at the end.
size_t skip_white_space(std::string_view utf8);
size_t trim_white_space_end(std::string_view utf8);
std::string_view trim_white_space(std::string_view utf8);

}  // namespace fnx
