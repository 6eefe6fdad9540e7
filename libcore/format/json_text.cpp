#include "libcore/format/json_text.h"

#include <fmt/format.h>
#include <utf8proc.h>

#include <algorithm>
#include <unordered_set>
#include <vector>

#include "kernels/error.h"
#include "libcore/format/mapped_file.h"

namespace fnx {
namespace {

constexpr size_t kMaxConfigBytes = size_t{64} << 20;
constexpr int kMaxDepth = 64;
constexpr size_t kMaxKeys = 10000;  // of one object: the DOM looks keys up linearly

[[noreturn]] void fail_input(std::string_view name, std::string_view what) {
  throw Error(ErrorKind::Input, fmt::format("{}: {}", name, what));
}

// The library takes a NUL for the end of the text and would leave the rest unread.
void refuse_nul(std::string_view text, std::string_view name) {
  if (const size_t at = text.find('\0'); at != std::string_view::npos)
    fail_input(name, fmt::format("not valid JSON: NUL byte at {}", at));
}

}  // namespace

std::string printable(std::string_view text) {
  constexpr size_t kLimit = 300;
  std::string out;
  const auto* data = reinterpret_cast<const utf8proc_uint8_t*>(text.data());
  for (size_t i = 0; i < text.size();) {
    if (out.size() >= kLimit) return out + "...";
    utf8proc_int32_t code = -1;
    const auto left = static_cast<utf8proc_ssize_t>(std::min<size_t>(text.size() - i, 4));
    const utf8proc_ssize_t n = utf8proc_iterate(data + i, left, &code);
    const bool shown = n > 0 && code >= 0x20 && !(code >= 0x7F && code < 0xA0);
    out += shown ? std::string(text.substr(i, static_cast<size_t>(n))) : "?";
    i += n > 0 ? static_cast<size_t>(n) : 1;
  }
  return out;
}

nlohmann::ordered_json parse_json(std::string_view text, std::string_view name) {
  using nlohmann::ordered_json;
  refuse_nul(text, name);
  std::vector<std::unordered_set<std::string>> open;
  const auto check = [&](int depth, ordered_json::parse_event_t event, ordered_json& value) {
    if (depth > kMaxDepth) fail_input(name, fmt::format("JSON nested deeper than {} levels", kMaxDepth));
    if (event == ordered_json::parse_event_t::object_start) open.emplace_back();
    if (event == ordered_json::parse_event_t::object_end) open.pop_back();
    if (event == ordered_json::parse_event_t::key) {
      const auto& key = value.get_ref<const std::string&>();
      if (!open.back().insert(key).second) fail_input(name, fmt::format("key \"{}\" appears twice", printable(key)));
      if (open.back().size() > kMaxKeys) fail_input(name, fmt::format("an object of more than {} keys", kMaxKeys));
    }
    return true;
  };
  try {
    return ordered_json::parse(text, check);
  } catch (const nlohmann::detail::exception& e) {
    fail_input(name, "not valid JSON: " + printable(e.what()));
  }
}

nlohmann::ordered_json read_json(const std::filesystem::path& path) {
  const auto file = MappedFile::open(path);
  const auto bytes = file->bytes();
  if (bytes.size() > kMaxConfigBytes)
    fail_input(path.string(), fmt::format("{} bytes; at most {} are read", bytes.size(), kMaxConfigBytes));
  return parse_json({reinterpret_cast<const char*>(bytes.data()), bytes.size()}, path.string());
}

void JsonEvents::parse(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  refuse_nul(text, name_);
  nlohmann::json::sax_parse(text.begin(), text.end(), this);
}

bool JsonEvents::parse_error(size_t, const std::string&, const nlohmann::detail::exception& e) {
  fail("not valid JSON: " + printable(e.what()));
}

void JsonEvents::refuse(std::string_view found) const {
  fail(fmt::format("{}, found {}", expectation(), printable(found)));
}

void JsonEvents::fail(std::string_view what) const { fail_input(name_, what); }

}  // namespace fnx
