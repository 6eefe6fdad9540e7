#include "libcore/base/path_text.h"

namespace fnx {
namespace {

bool is_delimiter(char c) { return std::string_view(" \t\n\r'\"`()[]{}<>,;:=").find(c) != std::string_view::npos; }

std::string last_component(std::string_view path) {
  while (path.size() > 1 && path.back() == '/') path.remove_suffix(1);
  const size_t slash = path.rfind('/');
  if (path.size() > 1 && slash != std::string_view::npos) path.remove_prefix(slash + 1);
  return std::string(path);
}

}  // namespace

std::string reduce_argument(std::string_view word) {
  if (!word.empty() && word.front() == '/') return last_component(word);
  const size_t equals = word.find('=');
  if (equals != std::string_view::npos && equals + 1 < word.size() && word[equals + 1] == '/')
    return std::string(word.substr(0, equals + 1)) + last_component(word.substr(equals + 1));
  return std::string(word);
}

std::string reduce_text(std::string_view text) {
  std::string out;
  for (size_t i = 0; i < text.size();) {
    const bool starts = text[i] == '/' && (i == 0 || is_delimiter(text[i - 1])) && i + 1 < text.size() &&
                        text[i + 1] != '/' && !is_delimiter(text[i + 1]);
    if (!starts) {
      out += text[i++];
      continue;
    }
    size_t end = i;
    while (end < text.size() && !is_delimiter(text[end])) ++end;
    out += last_component(text.substr(i, end - i));
    i = end;
  }
  return out;
}

std::string bare_name(const std::filesystem::path& path) {
  std::filesystem::path normal = path.lexically_normal();
  if (!normal.has_filename()) normal = normal.parent_path();
  if (normal.filename() != "." && normal.filename() != ".." && !normal.empty()) return normal.filename().string();
  std::error_code error;
  return std::filesystem::canonical(path, error).filename().string();
}

}  // namespace fnx
