// Summaries of repeated samples.
#pragma once

#include <cstdint>
#include <vector>

namespace fnx {

// The p-th percentile, p in [0, 100], linear between neighbours; `samples` must not be empty.
double percentile(std::vector<double> samples, double p);
inline double median(const std::vector<double>& samples) { return percentile(samples, 50); }

struct Interval {
  double low = 0, high = 0;
};

// 95 % interval of the median by resampling `resamples` times with a fixed seed: the same samples give the same
// interval.
Interval bootstrap_median(const std::vector<double>& samples, int resamples = 2000, uint64_t seed = 0);

inline constexpr int kFewestPairs = 4;  // that a claim of speed rests on

// Runs of two arms in the order A B B A: sample i of each belongs to pair i, A runs first in even pairs.
struct PairedRatio {
  std::vector<double> ratios;  // a[i] / b[i]
  double median = 0;
  Interval interval;                // of the median
  double a_first = 0, b_first = 0;  // medians of even and of odd pairs; NaN without any
};
PairedRatio paired_ratio(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace fnx
