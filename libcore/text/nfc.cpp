#include "libcore/text/nfc.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <memory>

#include "kernels/error.h"
#include "libcore/text/utf8.h"

namespace fnx {
namespace {

struct Range {
  char32_t first, last;
};

// Combining marks, and one second half of a composite (U+11930), that Unicode 10 to 15 added. The reference library's
// tables are of Unicode 9, where nothing moves across these and nothing composes with them. U+11A7 is no Hangul final,
// but utf8proc takes it for one and loses it.
constexpr Range kInert[] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},
    {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x11A7, 0x11A7},   {0x1715, 0x1715},   {0x1ABF, 0x1ACE},
    {0x1DF6, 0x1DFA},   {0xA82C, 0xA82C},   {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF},
    {0x10F46, 0x10F50}, {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E},
    {0x11839, 0x1183A}, {0x11930, 0x11930}, {0x1193D, 0x1193E}, {0x11943, 0x11943}, {0x119E0, 0x119E0},
    {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42}, {0x11D44, 0x11D45},
    {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F}, {0x1E130, 0x1E136},
    {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF},
};

bool is_inert(char32_t c) {
  if (c < kInert[0].first) return false;
  const auto* after = std::upper_bound(std::begin(kInert), std::end(kInert), c,
                                       [](char32_t value, const Range& range) { return value < range.first; });
  return c <= std::prev(after)->last;
}

void append_nfc(std::string& out, std::string_view text) {
  if (text.empty()) return;
  uint8_t* composed = nullptr;
  const auto bytes =
      utf8proc_map(reinterpret_cast<const uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &composed,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | UTF8PROC_COMPOSE));
  if (bytes < 0) throw Error(ErrorKind::Internal, fmt::format("NFC: {}", utf8proc_errmsg(bytes)));
  const std::unique_ptr<uint8_t, decltype(&std::free)> owner(composed, std::free);
  out.append(reinterpret_cast<const char*>(composed), static_cast<size_t>(bytes));
}

}  // namespace

std::string to_nfc(std::string_view utf8) {
  std::string out;
  size_t done = 0;
  for (size_t i = 0; i < utf8.size();) {
    const uint32_t length = utf8_step(utf8.substr(i)).length;
    if (length > 1 && is_inert(utf8_code_point(utf8.substr(i)))) {
      append_nfc(out, utf8.substr(done, i - done));
      out.append(utf8.substr(i, length));
      done = i + length;
    }
    i += length;
  }
  append_nfc(out, utf8.substr(done));
  return out;
}

}  // namespace fnx
