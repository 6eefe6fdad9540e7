#include "libcore/engine/profile_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "kernels/error.h"
#include "kernels/expert_planner.h"

namespace fnx {

namespace {

// Experts of a layer by count, ties to the lower id.
std::vector<int64_t> hottest(const ExpertProfile& p, int64_t l) {
  std::vector<int64_t> order(static_cast<size_t>(p.identity.experts));
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return p.layer(l)[a] > p.layer(l)[b]; });
  return order;
}

double share(const ExpertProfile& p, int64_t l, std::span<const int64_t> experts) {
  uint64_t sum = 0;
  for (const int64_t e : experts) sum += p.layer(l)[e];
  return p.total(l) == 0 ? 0 : static_cast<double>(sum) / static_cast<double>(p.total(l));
}

}  // namespace

void describe(const ExpertProfile& p, Json& result) {
  p.identity.write(result);
  result["decay_percent"] = p.decay_percent;
  result["runs"] = p.runs;
}

Json show_rows(const ExpertProfile& p) {
  const auto experts = static_cast<size_t>(p.identity.experts);
  Json rows = Json::array();
  for (int64_t l = 0; l < p.identity.all_layers(); ++l) {
    const std::vector<int64_t> order = hottest(p, l);
    const auto first = [&](size_t n) { return std::span(order).first(std::clamp<size_t>(n, 1, experts)); };
    const auto top = first(8);
    rows.push_back(
        Json{{"layer", l},
             {"draft", l >= p.identity.layers},
             {"choices", p.total(l)},
             {"experts_used", std::count_if(order.begin(), order.end(), [&](int64_t e) { return p.layer(l)[e] > 0; })},
             {"eighth_ratio", share(p, l, first(experts / 8))},
             {"quarter_ratio", share(p, l, first(experts / 4))},
             {"half_ratio", share(p, l, first(experts / 2))},
             {"hottest", std::vector<int64_t>(top.begin(), top.end())}});
  }
  return rows;
}

Json diff_rows(const ExpertProfile& a, const ExpertProfile& b, int64_t lines) {
  if (a.counts.size() != b.counts.size() || a.identity.experts != b.identity.experts)
    throw Error(ErrorKind::Input, "these profiles have other shapes: " + a.identity.difference(b.identity));
  if (lines < 1 || lines > a.identity.experts)
    throw Error(ErrorKind::Usage,
                fmt::format("{} lines: give 1 to {}, the layer's experts", lines, a.identity.experts));
  Json rows = Json::array();
  for (int64_t l = 0; l < a.identity.all_layers(); ++l) {
    double distance = 0;
    for (int64_t e = 0; e < a.identity.experts; ++e) {
      const int64_t one[] = {e};
      distance += std::abs(share(a, l, one) - share(b, l, one)) / 2;
    }
    const std::vector<int64_t> ours = hottest(a, l), theirs = hottest(b, l);
    const std::set<int64_t> top(ours.begin(), ours.begin() + lines);
    const auto common =
        std::count_if(theirs.begin(), theirs.begin() + lines, [&](int64_t e) { return top.contains(e); });
    rows.push_back(Json{{"layer", l}, {"lines", lines}, {"common_hottest", common}, {"distance_ratio", distance}});
  }
  return rows;
}

Json warm_rows(const ExpertProfile& p, const std::vector<int64_t>& lines) {
  const int64_t most = p.identity.experts;
  Json rows = Json::array();
  for (const int64_t n : lines)
    for (int64_t l = 0; l < p.identity.all_layers(); ++l) {
      // A number beyond the experts stays one, so that the planner refuses it.
      ExpertPlanner pool({static_cast<int32_t>(most), static_cast<int32_t>(std::clamp<int64_t>(n, 0, most + 1))});
      std::vector<int64_t> experts;
      for (const Placement& f : pool.warm_start(p.layer(l))) experts.push_back(f.expert);
      rows.push_back(Json{{"lines", n}, {"layer", l}, {"covered_ratio", share(p, l, experts)}, {"experts", experts}});
    }
  return rows;
}

Json count_matrix(const ExpertProfile& p) {
  Json out = Json::array();
  for (int64_t l = 0; l < p.identity.all_layers(); ++l)
    out.push_back(std::vector<uint64_t>(p.layer(l).begin(), p.layer(l).end()));
  return out;
}

Json count_rows(const Json& matrix, int64_t trunk_layers) {
  Json rows = Json::array();
  for (size_t l = 0; l < matrix.size(); ++l)
    for (size_t e = 0; e < matrix[l].size(); ++e)
      rows.push_back(Json{
          {"layer", l}, {"draft", static_cast<int64_t>(l) >= trunk_layers}, {"expert", e}, {"count", matrix[l][e]}});
  return rows;
}

}  // namespace fnx
