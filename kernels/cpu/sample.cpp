// Greedy and seeded sampling. Candidates are ranked by logit, ties to the lower id; NaN ranks last. Filters apply in
// the order temperature, top-k, top-p, min-p, then one uniform draw walks the ranked candidates.
#include <algorithm>
#include <numeric>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/math.h"
#include "kernels/random.h"

namespace fnx::cpu {

namespace {

int32_t sample_row(const float* logits, int64_t valid, const SampleParams& p) {
  const auto before = [&](int32_t a, int32_t b) {
    const bool nan_a = std::isnan(logits[a]), nan_b = std::isnan(logits[b]);
    if (nan_a != nan_b) return nan_b;
    return !nan_a && logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  if (p.temperature <= 0) {
    int32_t best = 0;
    for (int32_t i = 1; i < valid; ++i)
      if (before(i, best)) best = i;
    return best;
  }
  thread_local std::vector<int32_t> order;
  thread_local std::vector<double> weight;
  order.resize(valid);
  std::iota(order.begin(), order.end(), 0);
  const int64_t k = p.top_k > 0 ? std::min<int64_t>(p.top_k, valid) : valid;
  std::partial_sort(order.begin(), order.begin() + k, order.end(), before);
  weight.resize(k);
  double total = 0;
  for (int64_t i = 0; i < k; ++i)
    total += weight[i] = std::exp((double{logits[order[i]]} - logits[order[0]]) / p.temperature);
  int64_t kept = k;
  if (p.top_p < 1) {
    double mass = 0;
    for (kept = 0; kept < k && (kept == 0 || mass < p.top_p * total); ++kept) mass += weight[kept];
  }
  if (p.min_p > 0)
    while (kept > 1 && weight[kept - 1] < p.min_p * weight[0]) --kept;
  total = 0;
  for (int64_t i = 0; i < kept; ++i) total += weight[i];
  double left = uniform(p.seed, p.stream, static_cast<uint64_t>(p.position)) * total;
  for (int64_t i = 0; i < kept; ++i)
    if ((left -= weight[i]) < 0) return order[i];
  return order[kept - 1];
}

}  // namespace

void CpuBackend::sample(Stream&, int64_t valid, bool, View params, View logits, View ids) {
  const int64_t vocab = logits.shape[1];
  const auto* rows = reinterpret_cast<const SampleParams*>(params.data);
  each(logits.shape[0], vocab * 4,
       [&](int64_t r) { ids.as<int32_t>()[r] = sample_row(logits.as<float>() + r * vocab, valid, rows[r]); });
}

}  // namespace fnx::cpu
