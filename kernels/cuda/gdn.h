// Gated delta rule: convolution, token-serial recurrence, gated norm. fp32 throughout; the state is read and written
// once a launch, so any chunking of a sequence gives the same bits.
//
// Sum orders. Convolution: one fma chain, oldest tap first. Squares of q and k: float4 of lane i, then a butterfly of
// 32 lanes. m = S^T k and o = S^T q: 16 lanes each chain 8 consecutive keys ascending, then a butterfly of 16 lanes.
// Squares of o: float4 of lane i, then a butterfly of 32 lanes.
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

// Domain: key_dim = value_dim = 128; value_heads a multiple of key_heads; 2 <= taps <= 8.
struct GdnParams {
  const float* qkv = nullptr;  // [R, channels], channels = (2 * key_heads + value_heads) * 128
  const float* z = nullptr;    // [R, value_heads * 128]
  const float* b = nullptr;    // [R, value_heads]
  const float* a = nullptr;    // [R, value_heads]
  float* out = nullptr;        // [R, value_heads * 128]

  const float* conv = nullptr;     // [channels, taps], last tap is the current row
  const float* a_log = nullptr;    // [value_heads]
  const float* dt_bias = nullptr;  // [value_heads]
  const float* norm = nullptr;     // [128], not centred
  float eps = 0;
  bool silu_gate = false;  // silu(z) in place of sigmoid(z)

  float* conv_state = nullptr;  // [slots, taps - 1 + trials, channels], oldest row first, tried rows last
  float* delta = nullptr;       // [slots, value_heads, 128, 128]
  float* tried = nullptr;       // [slots, trials, 2, value_heads]: b and a of tried rows; null when trials is 0
  int64_t trials = 0;           // most rows that a lane tries

  Lanes lanes;  // of one row or more each
  int64_t rows = 0, key_heads = 0, value_heads = 0, taps = 0;

  // Workspaces; after the R rows, those that each lane's last call tried.
  float* convolved = nullptr;  // [R + lanes * trials, channels]: q, k normalised, v
  float* gates = nullptr;      // [R + lanes * trials, value_heads, 2]: exp(g), beta
};
// The three launches in order; for a few lanes of one row, convolution and recurrence in one. The launch before must
// not be the gdn of the same state: the state is read before it has ended.
void gdn(const GdnParams& p, cudaStream_t stream);
// Fills convolved and gates; the state is only read.
void gdn_conv(const GdnParams& p, cudaStream_t stream);
// Updates delta and conv_state; out holds the heads' raw outputs. Must be the launch after gdn_conv.
void gdn_recurrence(const GdnParams& p, cudaStream_t stream);
// out = norm * out / rms(out) * gate(z), in place.
void gdn_norm(const GdnParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
