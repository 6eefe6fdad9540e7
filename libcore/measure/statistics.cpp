#include "libcore/measure/statistics.h"

#include <algorithm>
#include <cmath>
#include <random>

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

Interval bootstrap_median(const std::vector<double>& samples, int resamples, uint64_t seed) {
  if (samples.empty()) throw Error(ErrorKind::Internal, "bootstrap of no samples");
  std::mt19937_64 random(seed);  // its sequence is fixed by the standard; the modulo bias is below 2^-50
  std::vector<double> medians, draw(samples.size());
  for (int i = 0; i < resamples; ++i) {
    for (double& d : draw) d = samples[random() % samples.size()];
    medians.push_back(percentile(draw, 50));
  }
  return {percentile(medians, 2.5), percentile(medians, 97.5)};
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
  out.interval = bootstrap_median(out.ratios);
  out.a_first = median(by_first[0]);
  out.b_first = by_first[1].empty() ? std::nan("") : median(by_first[1]);
  return out;
}

}  // namespace fnx
