#define PCRE2_CODE_UNIT_WIDTH 8
#include "libcore/text/split_regex.h"

#include <fmt/format.h>
#include <pcre2.h>

#include <algorithm>

#include "kernels/error.h"
#include "libcore/text/newer_characters.h"

namespace fnx {
namespace {

std::string message_of(int code) {
  PCRE2_UCHAR text[256];
  pcre2_get_error_message(code, text, sizeof text);
  return reinterpret_cast<const char*>(text);
}

[[noreturn]] void refuse(std::string_view pattern, size_t offset, std::string_view why) {
  throw Error(ErrorKind::Input, fmt::format("split pattern: {} at offset {} of {}", why, offset, pattern));
}

// What a property at the front of `pattern` covers beyond PCRE2's own tables.
std::string_view newer_characters(std::string_view pattern) {
  if (pattern.starts_with("\\p{L}")) return kNewerLetters;
  if (pattern.starts_with("\\p{M}")) return kNewerMarks;
  if (pattern.starts_with("\\p{N}")) return kNewerNumbers;
  return {};
}

// The pattern in PCRE2's words: \s means White_Space to Oniguruma, and one character more to PCRE2.
std::string translate(std::string_view pattern) {
  constexpr std::string_view kSameMeaning = "pPrntfdDx";
  std::string out;
  bool in_class = false;
  for (size_t i = 0; i < pattern.size(); ++i) {
    const char c = pattern[i];
    if (const std::string_view newer = newer_characters(pattern.substr(i)); !newer.empty()) {
      out += fmt::format(fmt::runtime(in_class ? "{}{}" : "[{}{}]"), pattern.substr(i, 5), newer);
      i += 4;
      continue;
    }
    if (c == '\\' && i + 1 < pattern.size()) {
      const char escaped = pattern[++i];
      const bool letter = (escaped | 32) >= 'a' && (escaped | 32) <= 'z';
      if (escaped == 's' || escaped == 'S') {
        out += escaped == 's' ? "\\p{White_Space}" : "\\P{White_Space}";
      } else if (letter && kSameMeaning.find(escaped) == std::string_view::npos) {
        refuse(pattern, i - 1, fmt::format("\\{} is not supported", escaped));
      } else {
        out += {'\\', escaped};
      }
      continue;
    }
    if (in_class && (c == '[' || pattern.substr(i, 2) == "&&"))
      refuse(pattern, i, "a nested class or intersection is not supported");
    if (c == '[') in_class = true;
    if (c == ']') in_class = false;
    out += c;
  }
  return out;
}

pcre2_code* compile(std::string_view pattern) {
  int code = 0;
  size_t offset = 0;
  pcre2_code* compiled =
      pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(),
                    PCRE2_UTF | PCRE2_UCP | PCRE2_MULTILINE | PCRE2_NEVER_BACKSLASH_C, &code, &offset, nullptr);
  if (compiled == nullptr) refuse(pattern, offset, message_of(code));
  return compiled;
}

struct Matcher {
  std::unique_ptr<pcre2_match_context, decltype(&pcre2_match_context_free)> context{pcre2_match_context_create(nullptr),
                                                                                    pcre2_match_context_free};
  std::unique_ptr<pcre2_jit_stack, decltype(&pcre2_jit_stack_free)> stack{
      pcre2_jit_stack_create(32 << 10, 64 << 20, nullptr), pcre2_jit_stack_free};
  std::unique_ptr<pcre2_match_data, decltype(&pcre2_match_data_free)> data;

  Matcher(const pcre2_code* code, size_t text_bytes)
      : data(pcre2_match_data_create_from_pattern(code, nullptr), pcre2_match_data_free) {
    pcre2_jit_stack_assign(context.get(), nullptr, stack.get());
    // A repeat may give back every byte of a long run, so the limit grows with the text.
    pcre2_set_match_limit(context.get(),
                          static_cast<uint32_t>(std::clamp<size_t>(64 * text_bytes, 10'000'000, UINT32_MAX)));
  }
};

}  // namespace

SplitRegex::SplitRegex(std::string_view pattern) {
  // The pattern as given comes first, so that an error's offset is in what the file says.
  pcre2_code_free(compile(pattern));
  pcre2_code* compiled = compile(translate(pattern));
  // Without JIT the same matches are found, slower.
  pcre2_jit_compile(compiled, PCRE2_JIT_COMPLETE);
  code_ = std::shared_ptr<const void>(compiled, [compiled](const void*) { pcre2_code_free(compiled); });
}

void SplitRegex::split(std::string_view text, const std::function<void(std::string_view)>& piece) const {
  const auto* code = static_cast<const pcre2_code*>(code_.get());
  Matcher matcher(code, text.size());
  const auto* subject = reinterpret_cast<PCRE2_SPTR>(text.data());
  size_t done = 0;
  size_t from = 0;
  while (from < text.size()) {
    const int found =
        pcre2_match(code, subject, text.size(), from, PCRE2_NO_UTF_CHECK, matcher.data.get(), matcher.context.get());
    if (found == PCRE2_ERROR_NOMATCH) break;
    if (found < 0)
      throw Error(ErrorKind::Input,
                  fmt::format("split pattern: {} at byte {} of {}", message_of(found), from, text.size()));
    const size_t* range = pcre2_get_ovector_pointer(matcher.data.get());
    if (range[1] <= range[0]) {
      from = range[0] + 1;
      while (from < text.size() && (static_cast<uint8_t>(text[from]) & 0xC0) == 0x80) ++from;
      // An empty match cuts the text where it stands.
      if (range[0] > done) piece(text.substr(done, range[0] - done));
      done = std::max(done, range[0]);
      continue;
    }
    if (range[0] > done) piece(text.substr(done, range[0] - done));
    piece(text.substr(range[0], range[1] - range[0]));
    done = from = range[1];
  }
  if (done < text.size()) piece(text.substr(done));
}

}  // namespace fnx
