// n-gram rows and the PLE site: decode, gates, dilated convolution.
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

// out = decoded row * scale + bias. Domain: bits 0 to 8 (16 % bits == 0 is not needed); dim * bits % 16 == 0.
struct NgramDecodeParams {
  const void* packed = nullptr;  // I16 [R, heads, 1 + dim * bits / 16], or [R, heads, dim] of `dtype` when bits is 0
  DType dtype = DType::I16;      // F16, BF16 or F32 when bits is 0
  const float* bias = nullptr;   // [heads, dim] or null
  float* out = nullptr;          // [R, heads * dim]
  int64_t rows = 0, heads = 0, dim = 0;
  int bits = 0;
};
void ngram_decode(const NgramDecodeParams& p, cudaStream_t stream);

// stack += w + silu(conv c), see PleWeights in kernels/ops.h. Sums over H: thread t of 256 adds elements t, t + 256, ..
// in one fma chain, then a butterfly of 32 lanes, then warps in ascending order. The convolution is one fma chain,
// oldest tap first. Domain: any n and H; 2 <= taps, 1 <= dilation.
struct PleMixParams {
  const float *norm_key = nullptr, *norm_query = nullptr, *norm_conv = nullptr;  // [n * H]
  float key_eps = 0, query_eps = 0, conv_eps = 0;
  const float* conv = nullptr;   // [n * H, taps]
  const float* key = nullptr;    // [R, n * H]
  const float* value = nullptr;  // [R, H]
  float* state = nullptr;        // [slots, (taps - 1) * dilation + trials, n * H], oldest row first, tried rows last
  float* stack = nullptr;        // [R, n, H]
  Lanes lanes;
  int64_t rows = 0, streams = 0, hidden = 0, taps = 0, dilation = 0, trials = 0;
  float* gate = nullptr;    // workspace [R, n]: the gates
  float* normed = nullptr;  // workspace [R, n * H]: c
};
void ple_mix(const PleMixParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
