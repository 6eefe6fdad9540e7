#include "tests/fuzz/mutator.h"

#include <algorithm>
#include <cctype>
#include <iterator>

namespace fnx::fuzz {
namespace {

constexpr size_t kMaxInput = 1 << 16;

constexpr const char* kValues[] = {"0",
                                   "1",
                                   "-1",
                                   "-0",
                                   "2",
                                   "4",
                                   "7",
                                   "8",
                                   "16",
                                   "127",
                                   "128",
                                   "256",
                                   "4095",
                                   "65536",
                                   "2147483647",
                                   "2147483648",
                                   "4294967295",
                                   "4294967296",
                                   "1099511627776",
                                   "1099511627777",
                                   "4611686018427387904",
                                   "9223372036854775807",
                                   "9223372036854775808",
                                   "18446744073709551615",
                                   "18446744073709551616",
                                   "1e3",
                                   "8.0",
                                   "1e308",
                                   "1e999",
                                   "1e-400",
                                   "0.25",
                                   "true",
                                   "false",
                                   "null",
                                   "\"\"",
                                   "\"a\"",
                                   "[]",
                                   "{}",
                                   "[0]",
                                   "[0,0]",
                                   "[2,2]",
                                   "[1099511627776,1099511627776]",
                                   "\"F16\"",
                                   "\"F32\"",
                                   "\"U8\"",
                                   "\"I64\"",
                                   "\"X\"",
                                   "\"\\u0000\"",
                                   "\"\\ud800\"",
                                   "\"silu\"",
                                   "\"sigmoid\"",
                                   "\"default\"",
                                   "\"..\"",
                                   "\"m/../x\"",
                                   "\"linear_attention\"",
                                   "\"full_attention\"",
                                   "\"__metadata__\"",
                                   "\"weight_map\"",
                                   "\"shape\"",
                                   "\"dtype\"",
                                   "\"data_offsets\"",
                                   "\"text_config\"",
                                   "\"eos_token_id\"",
                                   "\"\xff\"",
                                   "\"\xe2\x82\"",
                                   "[[[[[[[[[[[[[[[[[[[["};

// Length of the value at `i`, 1 where none starts.
size_t value_length(const std::string& s, size_t i) {
  if (s[i] == '"') {
    size_t j = i + 1;
    while (j < s.size() && s[j] != '"') j += s[j] == '\\' ? 2 : 1;
    return std::min(j + 1, s.size()) - i;
  }
  if (s[i] == '{' || s[i] == '[') {
    int depth = 0;
    for (size_t j = i; j < s.size(); ++j) {
      if (s[j] == '"') j += value_length(s, j) - 1;
      if (j < s.size() && (s[j] == '{' || s[j] == '[')) ++depth;
      if (j < s.size() && (s[j] == '}' || s[j] == ']') && --depth == 0) return j + 1 - i;
    }
    return s.size() - i;
  }
  size_t j = i;
  while (j < s.size() && (std::isalnum(static_cast<unsigned char>(s[j])) || s[j] == '-' || s[j] == '+' || s[j] == '.'))
    ++j;
  return j > i ? j - i : 1;
}

bool starts_value(const std::string& s, size_t i) {
  const auto c = static_cast<unsigned char>(s[i]);
  const bool word = std::isalnum(c) || c == '-';
  return c == '"' || c == '{' || c == '[' || (word && (i == 0 || !std::isalnum(static_cast<unsigned char>(s[i - 1]))));
}

}  // namespace

Mutator::Span Mutator::value(const std::string& s) {
  if (s.size() < 2) return {0, 0};
  const size_t from = 1 + below(s.size() - 1);
  for (size_t k = 0; k < s.size() - 1; ++k) {
    const size_t i = 1 + (from - 1 + k) % (s.size() - 1);
    if (starts_value(s, i)) return {i, value_length(s, i)};
  }
  return {0, 0};
}

void Mutator::mutate(std::string& s, const std::vector<std::string>& corpus) {
  const size_t at = s.size() > 1 ? 1 + below(s.size() - 1) : s.size();
  const size_t length = below(std::min<size_t>(s.size() - std::min(at, s.size()), 32) + 1);
  switch (below(12)) {
    case 0:
      if (at < s.size()) s[at] = static_cast<char>(s[at] ^ (1 << below(8)));
      break;
    case 1:
      if (at < s.size()) s[at] = "{}[],:\"\\ 019-e.tn\0\xff"[below(19)];
      break;
    case 2:
      s.erase(at, length);
      break;
    case 3:
      s.insert(at, s.substr(at, length));
      break;
    case 4:
      s.insert(at, 1, static_cast<char>(random_()));
      break;
    case 5: {  // splice
      const std::string& other = pick(corpus);
      s = s.substr(0, at) + other.substr(below(other.size()));
      break;
    }
    case 6:
    case 7:
    case 8:  // another value in place of one
      if (const auto [i, n] = value(s); n > 0) s.replace(i, n, kValues[below(std::size(kValues))]);
      break;
    case 9: {  // a value from elsewhere
      const std::string& other = pick(corpus);
      const auto [i, n] = value(s);
      const auto [j, m] = value(other);
      if (n > 0 && m > 0) s.replace(i, n, other.substr(j, m));
      break;
    }
    case 10: {  // an entry or element twice
      const auto [i, n] = value(s);
      size_t end = i + n;
      if (n > 0 && end < s.size() && s[end] == ':' && end + 1 < s.size()) end += 1 + value_length(s, end + 1);
      if (n > 0) s.insert(end, "," + s.substr(i, end - i));
      break;
    }
    default: {  // an entry or element less
      const auto [i, n] = value(s);
      size_t end = i + n;
      if (n > 0 && end + 1 < s.size() && s[end] == ':') end += 1 + value_length(s, end + 1);
      if (end < s.size() && s[end] == ',') ++end;
      if (n > 0) s.erase(i, end - i);
    }
  }
}

std::string Mutator::next(const std::vector<std::string>& corpus) {
  std::string s = pick(corpus);
  // The length in front of a whole file is cut off while its JSON is edited, and mostly put back right.
  const bool file = s[0] % 4 == 0 && s.size() > 9;
  const std::string prefix = file ? s.substr(1, 8) : "";
  if (file) s.erase(1, 8);
  for (size_t n = 1 + below(4); n > 0; --n) mutate(s, corpus);
  if (s.empty()) s = "\1";
  if (s.size() > kMaxInput) s.resize(kMaxInput);
  if (file) {
    std::string length = prefix;
    const uint64_t end = below(8) == 0 ? s.size() - 1 : s.rfind('}');
    if (below(16) != 0)
      for (size_t i = 0; i < 8; ++i) length[i] = static_cast<char>(end >> (8 * i));
    s.insert(1, length);
  }
  return s;
}

}  // namespace fnx::fuzz
