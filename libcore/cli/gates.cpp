#include "libcore/cli/gates.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cmath>

#include "kernels/error.h"

namespace fnx {
namespace {

bool names(std::string_view gate, std::string_view figure) {
  if (!figure.ends_with(gate)) return false;
  return figure.size() == gate.size() || figure[figure.size() - gate.size() - 1] == '/';
}

GateLimit parse_gate(const std::string& text) {
  const size_t at = text.find_first_of("<>=");
  const size_t value = at == std::string::npos ? at : text.find_first_not_of("<>=", at);
  GateLimit gate;
  if (value != std::string::npos && at > 0) {
    gate = {text.substr(0, at), text.substr(at, value - at), 0};
    const auto [end, error] = std::from_chars(text.data() + value, text.data() + text.size(), gate.limit);
    const bool known = gate.comparator == "<=" || gate.comparator == ">=" || gate.comparator == "==" ||
                       gate.comparator == "<" || gate.comparator == ">";
    if (error == std::errc() && end == text.data() + text.size() && known && std::isfinite(gate.limit)) return gate;
  }
  throw Error(ErrorKind::Usage, fmt::format("--gate {}: give NAME>=VALUE, with one of <= >= == < >", text));
}

}  // namespace

std::vector<GateLimit> parse_gates(const std::vector<std::string>& texts, const std::vector<std::string>& figures) {
  std::vector<GateLimit> gates;
  for (const std::string& text : texts) {
    gates.push_back(parse_gate(text));
    if (std::none_of(figures.begin(), figures.end(), [&](const auto& f) { return names(gates.back().name, f); }))
      throw Error(ErrorKind::Usage,
                  fmt::format("--gate {}: this run has no such figure; it has {}", text,
                              figures.empty() ? "none" : fmt::format("{}", fmt::join(figures, ", "))));
  }
  return gates;
}

void judge_gates(const std::vector<GateLimit>& gates, const std::vector<Figure>& figures, Receipt& receipt) {
  for (const GateLimit& g : gates)
    for (const Figure& f : figures) {
      if (!names(g.name, f.name)) continue;
      if (f.missing.empty())
        receipt.add_gate(f.name, f.value, g.comparator, g.limit, f.unit);
      else
        receipt.add_gate_not_run(f.name, g.comparator, g.limit, f.unit, f.missing);
    }
}

}  // namespace fnx
