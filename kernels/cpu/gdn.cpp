// Gated delta rule (GDN): causal convolution, token-serial recurrence, gated norm. Rounding points: the convolved row,
// the normalised query and key, the decayed state, d and the updated state are fp32.
#include <algorithm>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/math.h"

namespace fnx::cpu {

namespace {

// S *= decay; m = S^T k.
FNX_CLONES void decay_and_read(float* state, float decay, const float* k, int64_t keys, int64_t values, double* m) {
  for (int64_t v = 0; v < values; ++v) m[v] = 0;
  for (int64_t i = 0; i < keys; ++i) {
    float* s = state + i * values;
    const double ki = k[i];
    for (int64_t v = 0; v < values; ++v) {
      s[v] *= decay;
      m[v] += s[v] * ki;
    }
  }
}

// S += k d^T; o = S^T q.
FNX_CLONES void write_and_query(float* state, const float* k, const float* q, const float* d, int64_t keys,
                                int64_t values, double* o) {
  for (int64_t v = 0; v < values; ++v) o[v] = 0;
  for (int64_t i = 0; i < keys; ++i) {
    float* s = state + i * values;
    const double ki = k[i], qi = q[i];
    for (int64_t v = 0; v < values; ++v) {
      s[v] = static_cast<float>(s[v] + ki * d[v]);
      o[v] += s[v] * qi;
    }
  }
}

}  // namespace

void CpuBackend::gdn(Stream& stream, const GdnWeights& w, const Batch& batch, View qkv, View z, View b, View a,
                     const GdnState& state, View out) {
  auto& s = static_cast<CpuStream&>(stream);
  const int64_t channels = w.conv.shape[0], history = w.taps - 1;
  const int64_t key_width = w.key_heads * w.key_dim, value_width = w.value_heads * w.value_dim;
  const int64_t depth = state.trials(), conv_rows = history + depth;

  // Rows to go through: of each lane the kept ones of its last call, then its own.
  struct Step {
    size_t lane;
    int64_t i;  // row of the lane; negative: kept
  };
  std::vector<Step> steps;
  std::vector<size_t> first_step;
  for (size_t l = 0; l < batch.lanes.size(); ++l) {
    first_step.push_back(steps.size());
    for (int64_t i = -trial_of(batch, l).kept; i < batch.lanes[l].rows; ++i) steps.push_back({l, i});
  }
  float* conv = s.scratch(0, static_cast<int64_t>(steps.size()) * channels);

  // Convolution of every row, then q and k of every key head normalised in place.
  each(static_cast<int64_t>(steps.size()), channels * 16, [&](int64_t step) {
    const auto [l, at] = steps[step];
    const Lane& lane = batch.lanes[l];
    const float* taps = w.conv.as<float>();
    const float* past = state.conv.as<float>() + lane.slot * conv_rows * channels;
    const int64_t old = history + trial_of(batch, l).kept;
    const auto row = [&, at = at](int64_t back) {  // the qkv row `back` rows before this one
      const int64_t i = at - back;
      return i >= 0 ? qkv.as<float>() + (lane.first_row + i) * channels : past + (old + i) * channels;
    };
    float* c = conv + step * channels;
    for (int64_t ch = 0; ch < channels; ++ch) {
      double sum = 0;
      for (int64_t t = 0; t < w.taps; ++t) sum += double{taps[ch * w.taps + t]} * row(history - t)[ch];
      c[ch] = static_cast<float>(silu(sum));
    }
    for (int64_t h = 0; h < 2 * w.key_heads; ++h) {
      float* x = c + h * w.key_dim;
      double scale = 1.0 / std::sqrt(dot(x, x, w.key_dim) + 1e-6);
      if (h < w.key_heads) scale /= std::sqrt(static_cast<double>(w.key_dim));
      for (int64_t i = 0; i < w.key_dim; ++i) x[i] = static_cast<float>(x[i] * scale);
    }
  });

  // Each lane's heads are independent; rows of a lane follow one another.
  const auto lanes = static_cast<int64_t>(batch.lanes.size());
  each(lanes * w.value_heads, w.key_dim * w.value_dim * 2, [&](int64_t i) {
    const size_t l = i / w.value_heads;
    const Lane& lane = batch.lanes[l];
    const Trial trial = trial_of(batch, l);
    const int64_t head = i % w.value_heads, key_head = head / (w.value_heads / w.key_heads);
    const int64_t state_size = w.key_dim * w.value_dim;
    float* S = state.delta.as<float>() + (lane.slot * w.value_heads + head) * state_size;
    thread_local std::vector<float> aside;  // tried rows go on from a copy
    thread_local std::vector<double> m, o;
    thread_local std::vector<float> d;
    m.resize(w.value_dim), o.resize(w.value_dim), d.resize(w.value_dim);
    for (int64_t at = -trial.kept; at < lane.rows; ++at) {
      if (trial.tried > 0 && at == lane.rows - trial.tried) {
        aside.assign(S, S + state_size);
        S = aside.data();
      }
      const float* c = conv + (static_cast<int64_t>(first_step[l]) + trial.kept + at) * channels;
      const int64_t r = lane.first_row + at;
      const float* tried =
          at < 0 ? state.tried.as<float>() + (lane.slot * depth + trial.kept + at) * 2 * w.value_heads : nullptr;
      const double b_row = at < 0 ? tried[head] : b.as<float>()[r * w.value_heads + head];
      const double a_row = at < 0 ? tried[w.value_heads + head] : a.as<float>()[r * w.value_heads + head];
      const float *q = c + key_head * w.key_dim, *k = c + key_width + key_head * w.key_dim;
      const float* v = c + 2 * key_width + head * w.value_dim;
      const double beta = sigmoid(b_row);
      const double g = -std::exp(double{w.a_log.as<float>()[head]}) * softplus(a_row + w.dt_bias.as<float>()[head]);
      decay_and_read(S, static_cast<float>(std::exp(g)), k, w.key_dim, w.value_dim, m.data());
      for (int64_t x = 0; x < w.value_dim; ++x) d[x] = static_cast<float>((v[x] - m[x]) * beta);
      write_and_query(S, k, q, d.data(), w.key_dim, w.value_dim, o.data());
      if (at < 0) continue;

      double squares = 0;
      for (int64_t x = 0; x < w.value_dim; ++x) squares += o[x] * o[x];
      const double scale = 1.0 / std::sqrt(squares / static_cast<double>(w.value_dim) + w.eps);
      for (int64_t x = 0; x < w.value_dim; ++x) {
        const int64_t at = r * value_width + head * w.value_dim + x;
        const double gate = z.as<float>()[at];
        out.as<float>()[at] = static_cast<float>(w.norm.as<float>()[x] * (o[x] * scale) *
                                                 (w.gate == Gate::Silu ? silu(gate) : sigmoid(gate)));
      }
    }
  });

  for (size_t l = 0; l < batch.lanes.size(); ++l) {
    const Lane& lane = batch.lanes[l];
    const Trial trial = trial_of(batch, l);
    keep_history(state.conv.as<float>() + lane.slot * conv_rows * channels, qkv.as<float>() + lane.first_row * channels,
                 channels, history, lane, trial);
    for (int64_t i = 0; i < trial.tried; ++i) {
      const int64_t r = lane.first_row + lane.rows - trial.tried + i;
      float* to = state.tried.as<float>() + (lane.slot * depth + i) * 2 * w.value_heads;
      std::copy_n(b.as<float>() + r * w.value_heads, w.value_heads, to);
      std::copy_n(a.as<float>() + r * w.value_heads, w.value_heads, to + w.value_heads);
    }
  }
}

}  // namespace fnx::cpu
