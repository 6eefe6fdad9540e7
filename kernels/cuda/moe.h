// Router, activation and combination of the experts.
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

// p = softmax(logits); ids of the k largest p in descending order, ties to the lower id, NaN last; weights p, divided
// by their sum when normalise. The sum of exponentials: lane i of 32 adds experts i, i + 32, .. ascending, then a
// butterfly; the sum of the k weights in slot order. Domain: 1 <= k <= E <= 1024, k <= 32.
struct RouterParams {
  const float* logits = nullptr;  // [R, E]
  int32_t* ids = nullptr;         // [R, k]
  float* weights = nullptr;       // [R, k]
  int64_t rows = 0, experts = 0, k = 0;
  bool normalise = true;
  bool one_more = false;  // ids is [R, k + 1], the last E
};
void router(const RouterParams& p, cudaStream_t stream);

// out = silu(gate) * up; out may be gate or up.
struct SwigluParams {
  const float *gate = nullptr, *up = nullptr;  // [count]
  float* out = nullptr;                        // [count]
  int64_t count = 0;
};
void swiglu(const SwigluParams& p, cudaStream_t stream);

// slots[i, :] = parts[min(ids[i] / per_part, parts - 1), i, :]. Domain: H % 4 == 0, 16-byte alignment, ids not
// negative.
struct TakeSlotsParams {
  const int32_t* ids = nullptr;  // [N]
  const float* from = nullptr;   // [parts, N, H]
  float* slots = nullptr;        // [N, H]
  int64_t count = 0, hidden = 0, parts = 0, per_part = 0;
};
void take_slots(const TakeSlotsParams& p, cudaStream_t stream);

// y[r] = one fma chain from 0 over slots ascending, then the shared expert times sigmoid(shared_gate[r]).
// Domain: H % 4 == 0, 16-byte alignment.
struct CombineParams {
  const float* slots = nullptr;        // [R, k, H]
  const float* weights = nullptr;      // [R, k]
  const float* shared = nullptr;       // [R, H]
  const float* shared_gate = nullptr;  // [R]
  float* y = nullptr;                  // [R, H]
  int64_t rows = 0, k = 0, hidden = 0;
  bool one_more = false;  // slots is [R, k + 1, H]; its last is `shared`, which then is null
};
void combine(const CombineParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
