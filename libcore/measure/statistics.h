// Summaries of repeated samples.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fnx {

// The p-th percentile, p in [0, 100], linear between neighbours; `samples` must not be empty.
double percentile(std::vector<double> samples, double p);
inline double median(const std::vector<double>& samples) { return percentile(samples, 50); }

struct Interval {
  double low = 0, high = 0;
};

// 95 % interval of the mean of independent samples, by Student's t: right for normal ones however few they are. A
// bootstrap of four is no more than their range, which holds what they estimate in 7 of 8 cases. Without bounds for
// one.
Interval mean_interval(const std::vector<double>& samples);

inline constexpr int kFewestPairs = 4;  // that a claim of speed rests on
std::string few_pairs(int pairs);       // why these allow none; empty when they do

// Runs of two arms in the order A B B A: sample i of each belongs to pair i, A runs first in even pairs.
struct PairedRatio {
  std::vector<double> ratios;  // a[i] / b[i]
  double median = 0;
  Interval interval;                // of their geometric mean
  double a_first = 0, b_first = 0;  // medians of even and of odd pairs; NaN without any
};
std::string interval_text(const PairedRatio& ratio);  // as tools print it: "0.998 .. 1.004", or why there is none
PairedRatio paired_ratio(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace fnx
