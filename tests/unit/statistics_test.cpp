#include "libcore/measure/statistics.h"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <numbers>
#include <random>

#include "kernels/error.h"

using namespace fnx;

namespace {

using Random = std::mt19937_64;

double uniform(Random& random) { return (static_cast<double>(random() >> 11) + 0.5) * 0x1p-53; }

double normal(Random& random) {
  const double radius = std::sqrt(-2 * std::log(uniform(random)));
  return radius * std::cos(2 * std::numbers::pi * uniform(random));
}

Interval range(const std::vector<double>& samples) {
  const auto [low, high] = std::minmax_element(samples.begin(), samples.end());
  return {*low, *high};
}

// Share of intervals of `n` samples, around 0, that hold it.
double coverage(size_t n, const std::function<double(Random&, size_t)>& sample,
                const std::function<Interval(const std::vector<double>&)>& interval_of = mean_interval) {
  constexpr int kTrials = 20000;  // a standard error of 0.0015 at 0.95
  Random random(n);
  int held = 0;
  std::vector<double> samples(n);
  for (int trial = 0; trial < kTrials; ++trial) {
    for (size_t i = 0; i < n; ++i) samples[i] = sample(random, i);
    const Interval i = interval_of(samples);
    held += i.low <= 0 && 0 <= i.high;
  }
  return held / static_cast<double>(kTrials);
}

}  // namespace

TEST_CASE("statistics: interpolates percentiles between neighbours") {
  CHECK(percentile({4, 1, 3, 2}, 50) == 2.5);
  CHECK(percentile({1, 2, 3, 4, 5}, 5) == doctest::Approx(1.2));
  CHECK(percentile({7}, 95) == 7);
  CHECK_THROWS_AS(percentile({}, 50), Error);
}

TEST_CASE("statistics: the interval of a mean has the width of Student's t") {
  // Samples 0, 2, 4, ...: tables of the 97.5 % quantile give half the width in standard errors.
  const std::pair<size_t, double> quantiles[] = {{2, 12.7062}, {3, 4.30265}, {4, 3.18245},  {5, 2.77645},
                                                 {6, 2.57058}, {9, 2.30600}, {16, 2.13145}, {31, 2.04227}};
  for (const auto& [n, quantile] : quantiles) {
    CAPTURE(n);
    std::vector<double> samples;
    for (size_t i = 0; i < n; ++i) samples.push_back(2 * static_cast<double>(i));
    const double count = static_cast<double>(n), error = std::sqrt((count + 1) / 3);
    const Interval i = mean_interval(samples);
    CHECK((i.low + i.high) / 2 == doctest::Approx(count - 1));
    CHECK((i.high - i.low) / 2 / error == doctest::Approx(quantile).epsilon(1e-5));
  }
  const Interval same = mean_interval({3, 3, 3, 3});
  CHECK(same.low == 3);
  CHECK(same.high == 3);
  CHECK(std::isinf(mean_interval({3}).high));
  CHECK_THROWS_AS(mean_interval({}), Error);
}

TEST_CASE("statistics: intervals hold the truth in 95 of 100 cases however few the samples") {
  const auto plain = [](Random& r, size_t) { return normal(r); };
  const auto long_tailed = [](Random& r, size_t) { return normal(r) * (uniform(r) < 0.1 ? 10 : 1); };
  const auto by_order = [](Random& r, size_t i) { return normal(r) + (i % 2 == 0 ? 1 : -1); };
  for (const size_t n : {4, 6, 8, 16}) {
    CAPTURE(n);
    CHECK(coverage(n, plain) == doctest::Approx(0.95).epsilon(0.0055));
    CHECK(coverage(n, long_tailed) >= 0.945);
    CHECK(coverage(n, by_order) >= 0.945);
  }
  // What resampling four gives: this test can tell.
  CHECK(coverage(4, plain, range) == doctest::Approx(0.875).epsilon(0.0085));
}

TEST_CASE("statistics: pairs give the median of their ratios, an interval and both orders") {
  const PairedRatio r = paired_ratio({4, 6, 8, 3}, {2, 2, 2, 1});
  CHECK(r.ratios == std::vector<double>{2, 3, 4, 3});
  CHECK(r.median == 3);
  // exp of the mean of ln 2, ln 3, ln 4, ln 3, 3.18245 standard errors to either side.
  CHECK(r.interval.low == doctest::Approx(1.85086).epsilon(1e-4));
  CHECK(r.interval.high == doctest::Approx(4.58451).epsilon(1e-4));
  CHECK(r.a_first == 3);
  CHECK(r.b_first == 3);
  CHECK_THROWS_AS(paired_ratio({1}, {}), Error);
  CHECK(few_pairs(4).empty());
  CHECK(few_pairs(3) == "3 pairs, a claim needs 4");
}
