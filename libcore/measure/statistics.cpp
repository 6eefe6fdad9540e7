#include "libcore/measure/statistics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numbers>

#include "kernels/error.h"

namespace fnx {

double percentile(std::vector<double> samples, double p) {
  if (samples.empty()) throw Error(ErrorKind::Internal, "percentile of no samples");
  std::sort(samples.begin(), samples.end());
  const double at = p / 100 * static_cast<double>(samples.size() - 1);
  const size_t low = static_cast<size_t>(std::floor(at));
  const size_t high = std::min(low + 1, samples.size() - 1);
  return samples[low] + (samples[high] - samples[low]) * (at - static_cast<double>(low));
}

namespace {
// Of Student's t with n degrees of freedom, the share within +-tan(angle) sqrt(n); Abramowitz and Stegun, 26.7.3 and 4.
double share_within(double angle, int64_t n) {
  const double c = std::cos(angle), s = std::sin(angle);
  double term = n % 2 == 1 ? c : 1, sum = 0;
  for (int64_t i = n % 2 == 1 ? 3 : 2; i <= n; i += 2) {
    sum += term;
    term *= c * c * static_cast<double>(i - 1) / static_cast<double>(i);
  }
  return n % 2 == 1 ? (angle + s * sum) * 2 / std::numbers::pi : s * sum;
}

double t_quantile(double share, int64_t n) {
  double low = 0, high = std::numbers::pi / 2;
  for (int i = 0; i < 60; ++i) {
    const double middle = (low + high) / 2;
    (share_within(middle, n) < share ? low : high) = middle;
  }
  return std::tan(low) * std::sqrt(static_cast<double>(n));
}
}  // namespace

Interval mean_interval(const std::vector<double>& samples) {
  if (samples.empty()) throw Error(ErrorKind::Internal, "interval of no samples");
  const auto n = static_cast<double>(samples.size());
  if (samples.size() == 1) return {-std::numeric_limits<double>::infinity(), std::numeric_limits<double>::infinity()};
  double mean = 0, squares = 0;
  for (const double x : samples) mean += x / n;
  for (const double x : samples) squares += (x - mean) * (x - mean);
  const double half = t_quantile(0.95, static_cast<int64_t>(samples.size()) - 1) * std::sqrt(squares / (n - 1) / n);
  return {mean - half, mean + half};
}

PairedRatio paired_ratio(const std::vector<double>& a, const std::vector<double>& b) {
  if (a.size() != b.size() || a.empty()) throw Error(ErrorKind::Internal, "pairs need as many samples of either arm");
  PairedRatio out;
  std::vector<double> by_first[2];
  for (size_t i = 0; i < a.size(); ++i) {
    out.ratios.push_back(a[i] / b[i]);
    by_first[i % 2].push_back(out.ratios.back());
  }
  out.median = median(out.ratios);
  std::vector<double> logs;
  for (const double r : out.ratios) logs.push_back(std::log(r));
  const Interval of_logs = mean_interval(logs);
  out.interval = {std::exp(of_logs.low), std::exp(of_logs.high)};
  out.a_first = median(by_first[0]);
  out.b_first = by_first[1].empty() ? std::nan("") : median(by_first[1]);
  return out;
}

std::string few_pairs(int pairs) {
  return pairs >= kFewestPairs ? "" : fmt::format("{} pairs, a claim needs {}", pairs, kFewestPairs);
}

std::string interval_text(const PairedRatio& ratio) {
  if (ratio.ratios.size() < kFewestPairs) return "too few pairs";
  return fmt::format("{:.3f} .. {:.3f}", ratio.interval.low, ratio.interval.high);
}

}  // namespace fnx
