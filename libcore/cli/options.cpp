#include "libcore/cli/options.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <optional>
#include <regex>

#include "kernels/error.h"
#include "libcore/base/path_text.h"

namespace fnx {
namespace {

bool is_flag(const CLI::Option& option) { return option.get_expected_max() == 0; }

// "[a,b]", as CLI11 writes a vector's default.
Json split_default(std::string text) {
  if (text.starts_with('[') && text.ends_with(']')) text = text.substr(1, text.size() - 2);
  Json out = Json::array();
  for (size_t start = 0; start < text.size();) {
    const size_t end = std::min(text.find(',', start), text.size());
    out.push_back(reduce_argument(text.substr(start, end - start)));
    start = end + 1;
  }
  return out;
}

Json option_value(const CLI::Option& option) {
  if (is_flag(option)) {
    const std::string text = option.count() > 0 ? option.results().back() : option.get_default_str();
    if (text.empty() || text == "false" || text == "0") return false;
    if (text == "true" || text == "1") return true;
    return text;
  }
  const bool list = option.get_items_expected_max() > 1;
  if (option.count() == 0) {
    if (list) return split_default(option.get_default_str());
    if (option.get_default_str().empty()) return Json();
    return reduce_argument(option.get_default_str());
  }
  if (!list) return reduce_argument(option.results().back());
  Json values = Json::array();
  for (const std::string& value : option.results()) values.push_back(reduce_argument(value));
  return values;
}

bool given_in(const std::vector<std::string>& argv, const std::string& name) {
  return std::any_of(argv.begin(), argv.end(),
                     [&](const std::string& word) { return word == name || word.starts_with(name + "="); });
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  for (size_t j = 0; j <= b.size(); ++j) row[j] = j;
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t above = row[j];
      row[j] = std::min({above + 1, row[j - 1] + 1, diagonal + (a[i - 1] != b[j - 1])});
      diagonal = above;
    }
  }
  return row[b.size()];
}

std::optional<std::string> closest_option(const CLI::App& app, const std::string& unknown) {
  std::optional<std::string> best;
  size_t best_distance = std::max<size_t>(2, unknown.size() / 3) + 1;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) {
      const std::string full = "--" + name;
      const size_t distance = full.starts_with(unknown) && unknown.size() > 3 ? 1 : edit_distance(unknown, full);
      if (distance < best_distance) {
        best = full;
        best_distance = distance;
      }
    }
  }
  return best;
}

}  // namespace

std::string option_key(const CLI::Option& option) {
  std::string key = option.get_lnames().empty() ? option.get_name(true) : option.get_lnames().front();
  if (key.empty()) key = option.get_snames().front();
  std::replace(key.begin(), key.end(), '-', '_');
  return key;
}

Json requested_block(const CLI::App& app) {
  Json out = Json::object();
  for (const CLI::Option* option : app.get_options())
    if (option->get_group() != kCommonGroup) out[option_key(*option)] = option_value(*option);
  return out;
}

Json invocation_block(const CLI::App& app, const std::vector<std::string>& argv, bool receipt_dir_used) {
  Json out = Json::object();
  out["argv"] = Json::array();
  for (size_t i = 0; i < argv.size(); ++i)
    out["argv"].push_back(i == 0 ? std::filesystem::path(argv[0]).filename().string() : reduce_argument(argv[i]));
  const CLI::Option* seed = app.get_option_no_throw("--seed");
  out["seed"] = seed ? option_value(*seed) : Json();
  out["env_defaults"] = Json::object();
  for (const CLI::Option* option : app.get_options()) {
    if (option->get_envname().empty() || option->count() == 0 || given_in(argv, option->get_name())) continue;
    out["env_defaults"][option->get_envname()] = option_value(*option);
  }
  if (receipt_dir_used) out["env_defaults"]["FNX_RECEIPT_DIR"] = reduce_argument(std::getenv("FNX_RECEIPT_DIR"));
  return out;
}

void add_count(CLI::App& app, const char* name, int64_t& value, const char* what) {
  app.add_option(name, value, what)->check(CLI::Range(int64_t{1}, int64_t{1} << 24))->capture_default_str();
}

void add_pairs(CLI::App& app, int& pairs) {
  app.add_option("--pairs", pairs, "Pairs of runs, one of each arm, in the order A B B A")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
}

namespace {

// Decimal digits that fit: the library reads 010 as 8, and what needs more than 64 bits as the last that does not.
template <class T>
bool is_decimal(std::string_view text) {
  if (text.starts_with('+')) text.remove_prefix(1);
  const std::string_view digits = text.substr(text.starts_with('-') ? 1 : 0);
  T value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  return error == std::errc() && end == text.data() + text.size() && (digits.size() == 1 || digits.front() != '0');
}

}  // namespace

void refuse_odd_numbers(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    for (const std::string& text : option->results()) {
      const bool odd = type.starts_with("FLOAT")  ? !std::isfinite(std::strtod(text.c_str(), nullptr))
                       : type.starts_with("UINT") ? !is_decimal<uint64_t>(text)
                       : type.starts_with("INT") || type.starts_with("N:") ? !is_decimal<int64_t>(text)
                                                                           : false;
      if (odd) throw Error(ErrorKind::Usage, option->get_name() + ": " + text + " is no number that it takes");
    }
  }
}

std::string usage_message(const CLI::App& app, const CLI::ParseError& error) {
  for (std::string word : app.remaining()) {
    if (word == "--") break;  // what follows are no options
    if (word.size() < 2 || word[0] != '-') continue;
    word = word.substr(0, word.find('='));
    const std::optional<std::string> closest = closest_option(app, word);
    return "unknown option " + word + (closest ? "; did you mean " + *closest + "?" : "; --help lists the options");
  }
  if (const std::vector<std::string> extra = app.remaining();
      !extra.empty() && dynamic_cast<const CLI::ExtrasError*>(&error))
    return "unexpected argument '" + extra.front() + "'; --help shows the usage";
  std::string text = std::regex_replace(error.what(), std::regex(" not in range \\S+ to 17976931348623157\\S+"),
                                        " is too small");  // the library writes out the largest double
  std::replace(text.begin(), text.end(), '\n', ' ');
  while (!text.empty() && text.back() == ' ') text.pop_back();
  return text + "; --help shows the usage";
}

}  // namespace fnx
