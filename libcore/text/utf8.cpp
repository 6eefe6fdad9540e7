#include "libcore/text/utf8.h"

#include <fmt/format.h>

#include "kernels/error.h"

namespace fnx {

Utf8Step utf8_step(std::string_view bytes) {
  const auto at = [&](size_t i) { return static_cast<uint8_t>(bytes[i]); };
  const uint8_t lead = at(0);
  if (lead < 0x80) return {Utf8State::Valid, 1};
  if (lead < 0xC2 || lead > 0xF4) return {Utf8State::Invalid, 1};
  const uint32_t length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and values above U+10FFFF.
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (uint32_t i = 1; i < length; ++i) {
    if (i == bytes.size()) return {Utf8State::Incomplete, i};
    if (at(i) < (i == 1 ? low : 0x80) || at(i) > (i == 1 ? high : 0xBF)) return {Utf8State::Invalid, i};
  }
  return {Utf8State::Valid, length};
}

size_t find_invalid_utf8(std::string_view bytes) {
  for (size_t i = 0; i < bytes.size();) {
    const Utf8Step step = utf8_step(bytes.substr(i));
    if (step.state != Utf8State::Valid) return i;
    i += step.length;
  }
  return std::string_view::npos;
}

void require_utf8(std::string_view bytes, std::string_view what) {
  const size_t offset = find_invalid_utf8(bytes);
  if (offset == std::string_view::npos) return;
  throw Error(ErrorKind::Input, fmt::format("{} is not UTF-8: byte 0x{:02X} at offset {} of {}", what,
                                            static_cast<uint8_t>(bytes[offset]), offset, bytes.size()));
}

size_t append_utf8_lossy(std::string& out, std::string_view bytes, bool last) {
  size_t done = 0;
  while (done < bytes.size()) {
    const Utf8Step step = utf8_step(bytes.substr(done));
    if (step.state == Utf8State::Incomplete && !last) break;
    if (step.state == Utf8State::Valid)
      out.append(bytes.substr(done, step.length));
    else
      out.append("\xEF\xBF\xBD");
    done += step.length;
  }
  return done;
}

char32_t utf8_code_point(std::string_view bytes) {
  const auto tail = [&](size_t i) { return static_cast<char32_t>(static_cast<uint8_t>(bytes[i]) & 0x3F); };
  const uint8_t lead = static_cast<uint8_t>(bytes[0]);
  if (lead < 0x80) return lead;
  if (lead < 0xE0) return (lead & 0x1Fu) << 6 | tail(1);
  if (lead < 0xF0) return (lead & 0x0Fu) << 12 | tail(1) << 6 | tail(2);
  return (lead & 0x07u) << 18 | tail(1) << 12 | tail(2) << 6 | tail(3);
}

bool is_white_space(char32_t c) {
  return (c >= 9 && c <= 13) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 || (c >= 0x2000 && c <= 0x200A) ||
         c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F || c == 0x3000;
}

size_t skip_white_space(std::string_view utf8) {
  size_t i = 0;
  while (i < utf8.size() && is_white_space(utf8_code_point(utf8.substr(i)))) i += utf8_step(utf8.substr(i)).length;
  return i;
}

size_t trim_white_space_end(std::string_view utf8) {
  size_t end = utf8.size();
  while (end > 0) {
    size_t start = end - 1;
    while (start > 0 && (static_cast<uint8_t>(utf8[start]) & 0xC0) == 0x80) --start;
    if (!is_white_space(utf8_code_point(utf8.substr(start)))) break;
    end = start;
  }
  return end;
}

std::string_view trim_white_space(std::string_view utf8) {
  utf8.remove_suffix(utf8.size() - trim_white_space_end(utf8));
  utf8.remove_prefix(skip_white_space(utf8));
  return utf8;
}

}  // namespace fnx
