#include "libcore/cli/rows.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "libcore/receipt/document.h"

namespace fnx {
namespace {

constexpr size_t kMostListItems = 8;

std::string cell(const Json& v, bool short_form) {
  if (v.is_null()) return short_form ? "-" : "";
  if (v.is_string()) return v.get<std::string>();
  if (v.is_number_float()) {
    const double d = v.get<double>();
    return short_form ? (std::abs(d) >= 1000 ? fmt::format("{:.0f}", d) : fmt::format("{:.4g}", d)) : v.dump();
  }
  if (!v.is_array()) return v.dump();
  std::string out;
  for (size_t i = 0; i < v.size() && !(short_form && i == kMostListItems); ++i) out += (i > 0 ? " " : "") + v[i].dump();
  return short_form && v.size() > kMostListItems ? out + " ..." : out;
}

}  // namespace

std::string rows_text(const Json& rows, const std::string& format) {
  if (rows.empty()) return "";
  const bool csv = format == "csv";
  std::vector<std::vector<std::string>> lines(1);
  for (const auto& [key, ignored] : rows.front().items()) lines[0].push_back(key);
  for (const Json& row : rows) {
    lines.emplace_back();
    for (const auto& [ignored, value] : row.items()) lines.back().push_back(cell(value, !csv));
  }
  std::vector<size_t> width(lines[0].size(), 0);
  for (const auto& line : lines)
    for (size_t i = 0; i < line.size(); ++i) width[i] = std::max(width[i], line[i].size());
  std::string out;
  for (const auto& line : lines) {
    for (size_t i = 0; i < line.size(); ++i)
      out += csv ? (i > 0 ? "," : "") + line[i] : fmt::format("{}{:>{}}", i > 0 ? "  " : "", line[i], width[i]);
    out += '\n';
  }
  return out;
}

std::string result_text(const Json& result, const std::string& format) {
  if (format == "json") return pretty_json(result);
  std::string out;
  for (const auto& [key, value] : result.items())
    if (format == "table" && key != "rows")
      out += fmt::format("{}: {}\n", key,
                         value.is_string()         ? value.get<std::string>()
                         : value.is_number_float() ? fmt::format("{:.6g}", value.get<double>())
                                                   : value.dump());
  return out + rows_text(result.value("rows", Json::array()), format);
}

}  // namespace fnx
