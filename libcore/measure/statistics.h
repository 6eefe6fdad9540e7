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

}  // namespace fnx
