// Sampling against the reference: the same ids for every setting, ties, both zeros, NaN.
#include <algorithm>

#include "kernels/cuda/sample.h"
#include "ops_check.h"

namespace fnx::check {

namespace {

void compare(Backend& cpu, Stream& stream, const std::string& name, int64_t valid, int64_t vocabulary,
             std::vector<float> logits, const std::vector<SampleParams>& params) {
  const auto rows = static_cast<int64_t>(params.size());
  std::vector<int32_t> ids(rows);
  cpu.sample(stream, valid, false, params_view(params), view(logits, {rows, vocabulary}),
             view(ids, DType::I32, {rows}));
  std::vector<cuda::SampleRow> device_rows;
  bool greedy = true;
  for (const SampleParams& p : params) {
    device_rows.push_back({p.temperature, p.top_p, p.min_p, p.top_k, p.seed, p.stream, p.position});
    greedy = greedy && p.temperature <= 0;
  }
  Device<float> dl(logits);
  Device<cuda::SampleRow> dr(device_rows);
  Device<int32_t> di(rows), alone(1);
  Device<uint64_t> masses(rows * valid), best(rows * cuda::sample_chunks(valid)), bins(rows * 4096);
  cuda::sample({dl, dr, di, rows, valid, vocabulary, greedy, masses, best, bins}, nullptr);
  same(name, di.take(), ids);
  cuda::sample({dl + 2 * vocabulary, dr + 2, alone, 1, valid, vocabulary, greedy, masses, best, bins}, nullptr);
  same(name + " row alone", alone.take(), slice(di.take(), 2, 1));
}

}  // namespace

void check_sample(Backend& cpu) {
  auto stream = cpu.make_stream();
  for (auto [valid, vocabulary] : {std::pair<int64_t, int64_t>{4007, 4096}, {248320, 248320}}) {
    const std::string size = std::to_string(valid);
    std::vector<float> logits = normal(4 * vocabulary, 3);
    for (int64_t i = 0; i < vocabulary; ++i) logits[i] = NAN;
    logits[5 * 7] = -0.0f, logits[5 * 7 + 900] = 0.0f;
    for (int64_t i = 0; i < vocabulary; ++i) logits[vocabulary + i] = static_cast<float>(i % 13);
    for (int64_t i = 0; i < vocabulary; ++i) logits[2 * vocabulary + i] = -INFINITY;
    compare(cpu, *stream, "argmax of " + size, valid, vocabulary, logits, std::vector<SampleParams>(4));

    std::vector<SampleParams> params;
    for (int i = 0; i < 24; ++i) {
      SampleParams p;
      p.temperature = i % 6 == 5 ? 0.0f : 0.5f + 0.25f * static_cast<float>(i % 4);
      p.top_k = i % 3 == 0 ? 0 : i % 3 == 1 ? 40 : 1500;
      p.top_p = i % 4 < 2 ? 0.9f : 1.0f;
      p.min_p = i % 5 == 0 ? 0.05f : 0.0f;
      p.seed = 11 + i, p.stream = 3 * i, p.position = 100 + i;
      params.push_back(p);
    }
    logits = normal(24 * vocabulary, 2);
    for (int64_t i = 0; i < vocabulary; ++i) logits[7 * vocabulary + i] = static_cast<float>(i % 7);  // ties
    for (int64_t i = 0; i < vocabulary; i += 3) logits[8 * vocabulary + i] = NAN;
    compare(cpu, *stream, "draws of " + size, valid, vocabulary, logits, params);
  }
}

}  // namespace fnx::check
