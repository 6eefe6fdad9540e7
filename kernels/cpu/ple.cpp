// PLE: decoding of gathered n-gram rows, gates and the dilated convolution.
#include <algorithm>

#include "kernels/cpu/backend.h"
#include "kernels/cpu/math.h"
#include "kernels/float16.h"

namespace fnx::cpu {

void CpuBackend::ngram_decode(Stream&, int bits, View packed, View bias, View out) {
  const int64_t rows = packed.shape[0], heads = packed.shape[1], stride = packed.shape[2];
  const int64_t dim = out.size() / (rows * heads);
  each(rows * heads, dim * 32, [&](int64_t i) {
    float* to = out.as<float>() + i * dim;
    const float* add = bias ? bias.as<float>() + i % heads * dim : nullptr;
    if (bits == 0) {
      for (int64_t d = 0; d < dim; ++d) {
        const int64_t at = i * stride + d;
        const float v = packed.dtype == DType::F32    ? packed.as<float>()[at]
                        : packed.dtype == DType::BF16 ? bf16_to_f32(packed.as<uint16_t>()[at])
                                                      : f16_to_f32(packed.as<uint16_t>()[at]);
        to[d] = add != nullptr ? v + add[d] : v;
      }
      return;
    }
    const uint16_t* words = packed.as<uint16_t>() + i * stride;
    const float scale = f16_to_f32(words[0]);
    // Bit m of state d lies in the low bits of the value m / bits places before, around the ring.
    const auto low_bits = [&](int64_t value) {
      uint32_t v = 0;
      for (int b = 0; b < bits; ++b) {
        const int64_t bit = value * bits + b;
        v |= ((words[1 + bit / 16] >> (bit % 16)) & 1u) << b;
      }
      return v;
    };
    for (int64_t d = 0; d < dim; ++d) {
      uint32_t state = 0;
      for (int m = 0; m < 16; m += bits) state |= low_bits(((d - m / bits) % dim + dim) % dim) << m;
      const float value = f16_to_f32(exl3::decode_state(static_cast<uint16_t>(state), exl3::Codebook::Mul1));
      to[d] = value * scale + (add != nullptr ? add[d] : 0.0f);
    }
  });
}

void CpuBackend::ple_mix(Stream& stream, const PleWeights& w, const Batch& batch, View key, View value, View state,
                         View stack) {
  auto& s = static_cast<CpuStream&>(stream);
  const int64_t n = stack.shape[1], hidden = stack.shape[2], wide = n * hidden, history = (w.taps - 1) * w.dilation;
  float* gated = s.scratch(0, batch.rows * wide);
  float* c = s.scratch(1, batch.rows * wide);
  float* normed = s.scratch(2, batch.rows * 2 * wide);
  each(batch.rows, wide * 16, [&](int64_t r) {
    float *k = normed + r * 2 * wide, *q = k + wide;
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = t * hidden;
      const auto norm = [&](const NormWeights& nw, const float* x, float* to) {
        scale_centred(x, nw.weight.as<float>() + at, inverse_rms(x, hidden, nw.eps), hidden, to);
      };
      norm(w.norm_key, key.as<float>() + r * wide + at, k + at);
      norm(w.norm_query, stack.as<float>() + r * wide + at, q + at);
      const double raw = dot(k + at, q + at, hidden) / std::sqrt(static_cast<double>(hidden));
      const double root = std::sqrt(std::max(std::abs(raw), 1e-6));
      const double gate = sigmoid(raw > 0 ? root : raw < 0 ? -root : raw);
      for (int64_t h = 0; h < hidden; ++h)
        gated[r * wide + at + h] = static_cast<float>(gate * value.as<float>()[r * hidden + h]);
      norm(w.norm_conv, gated + r * wide + at, c + r * wide + at);
    }
  });
  for (size_t l = 0; l < batch.lanes.size(); ++l) {
    const Lane& lane = batch.lanes[l];
    const Trial trial = trial_of(batch, l);
    float* past = state.as<float>() + lane.slot * state.shape[1] * wide;
    each(lane.rows, wide * 16, [&](int64_t i) {
      const int64_t r = lane.first_row + i;
      const float* taps = w.conv.as<float>();
      for (int64_t ch = 0; ch < wide; ++ch) {
        double sum = 0;
        for (int64_t t = 0; t < w.taps; ++t) {
          const int64_t j = i - (w.taps - 1 - t) * w.dilation;  // row of this lane; negative: from the state
          const float* from = j >= 0 ? c + (lane.first_row + j) * wide : past + (history + trial.kept + j) * wide;
          sum += double{taps[ch * w.taps + t]} * from[ch];
        }
        float& to = stack.as<float>()[r * wide + ch];
        to = static_cast<float>(to + (gated[r * wide + ch] + silu(sum)));
      }
    });
    keep_history(past, c + lane.first_row * wide, wide, history, lane, trial);
  }
}

}  // namespace fnx::cpu
