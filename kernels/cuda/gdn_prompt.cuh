// The recurrence of a prompt's lanes (kernels/cuda/gdn.h); inside the family only.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/gdn.h"

namespace fnx::cuda::gdn_prompt {

inline constexpr int kDim = 128, kColumns = 16;  // value columns of a block, four a warp
inline constexpr int kTokens = 8, kStages = 4;   // tokens of a stage
inline constexpr int kPieces = kDim / 4;

// What a stage's tokens bring to a block. Keys and queries lie in pieces of four so that piece 8 e + i is the e-th of
// lane i, which has keys 8 i .. 8 i + 7 and 64 + 8 i .. 64 + 8 i + 7.
struct Stage {
  float4 keys[kTokens][kPieces], queries[kTokens][kPieces];
  float values[kTokens][kColumns];
  float2 gates[kTokens];
};

struct Token {
  float4 k[4], q[4];
  float v;
  float2 gates;
};

// Lane 4 i + j of a warp holds the 16 keys of i of column j.
__device__ __forceinline__ void recur(const GdnParams& p, int lane_index, int head, int chunk) {
  __shared__ __align__(16) Stage stages[kStages];
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[lane_index];
  const int tid = threadIdx.x, lane = tid % 32, i = lane / 4, at = tid / 32 * 4 + lane % 4;
  const int64_t channels = (2 * p.key_heads + p.value_heads) * kDim;
  const int64_t key_head = head / (p.value_heads / p.key_heads);
  const auto key_of = [&](int n) { return (n / 8) * 64 + 8 * i + n % 8; };
  float* state = p.delta + (int64_t{l.x} * p.value_heads + head) * kDim * kDim + chunk * kColumns + at;
  float s[16];
#pragma unroll
  for (int n = 0; n < 16; ++n) s[n] = state[key_of(n) * kDim];

  // This thread copies one piece of queries or keys of every second token, and may copy one of values, and a gate.
  const int piece = tid % kPieces, swapped = (piece / 16 * 2 + piece % 2) * 8 + piece % 16 / 2, odd = tid / 64;
  const bool query = tid % 64 < kPieces;
  const float* row = p.convolved + l.y * channels;
  const float* key_from = row + odd * channels + (query ? key_head : p.key_heads + key_head) * kDim + piece * 4;
  const float* value_from = row + tid / 4 * channels + (2 * p.key_heads + head) * kDim + chunk * kColumns + tid % 4 * 4;
  const float* gate_from = p.gates + ((l.y + tid - 64) * p.value_heads + head) * 2;
  int left = l.z, to = 0;  // tokens to copy; the stage that takes the next
  const auto copy = [&] {
    Stage& stage = stages[to];
    float4* keys = query ? &stage.queries[odd][swapped] : &stage.keys[odd][swapped];
#pragma unroll
    for (int j = 0; j < kTokens; j += 2)
      if (j + odd < left) copy_async16(keys + j * kPieces, key_from + j * channels);
    if (tid < kTokens * kColumns / 4 && tid / 4 < left) copy_async16(&stage.values[tid / 4][tid % 4 * 4], value_from);
    if (tid >= 64 && tid < 64 + kTokens && tid - 64 < left)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                       static_cast<uint32_t>(__cvta_generic_to_shared(&stage.gates[tid - 64]))),
                   "l"(gate_from)
                   : "memory");
    copy_commit();
    key_from += kTokens * channels, value_from += kTokens * channels, gate_from += kTokens * p.value_heads * 2;
    left -= kTokens, to = to + 1 == kStages ? 0 : to + 1;
  };
  wait_for_previous();  // the state is not of the previous launch, which is gdn_conv
  let_next_start();
#pragma unroll
  for (int stage = 0; stage + 1 < kStages; ++stage) copy();

  const auto fetch = [&](const Stage& from, int token) {
    Token x;
#pragma unroll
    for (int e = 0; e < 4; ++e) x.k[e] = from.keys[token][e * 8 + i], x.q[e] = from.queries[token][e * 8 + i];
    x.v = from.values[token][at], x.gates = from.gates[token];
    return x;
  };
  const auto part = [](const float4(&v)[4], int n) { return reinterpret_cast<const float*>(v)[n]; };
  float* out = p.out + (l.y * p.value_heads + head) * kDim + chunk * kColumns + at;
  // A token's output is summed over the lanes beside the next token's products of keys.
  float o = 0;
  const auto put = [&] {
    if (i == 0) *out = o;
    out += p.value_heads * kDim;
  };
  const auto step = [&](const Token& x, bool first) {
    float m[2] = {0, 0}, sum[2] = {0, 0};
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        s[8 * e + n] *= x.gates.x;
        m[e] = fmaf(s[8 * e + n], part(x.k, 8 * e + n), m[e]);
      }
    float d = m[0] + m[1];
#pragma unroll
    for (int width = 16; width >= 4; width /= 2) {
      d += __shfl_xor_sync(0xFFFFFFFFu, d, width);
      o += __shfl_xor_sync(0xFFFFFFFFu, o, width);
    }
    if (!first) put();
    d = (x.v - d) * x.gates.y;
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& to = s[8 * e + n];
        to = fmaf(part(x.k, 8 * e + n), d, to);
        sum[e] = fmaf(to, part(x.q, 8 * e + n), sum[e]);
      }
    o = sum[0] + sum[1];
  };
  for (int first = 0, stage = 0; first < l.z; first += kTokens, stage = stage + 1 == kStages ? 0 : stage + 1) {
    copy_wait<kStages - 2>();
    __syncthreads();
    copy();
    const Stage& from = stages[stage];
    if (first + kTokens <= l.z) {
      Token now = fetch(from, 0);
#pragma unroll
      for (int token = 0; token < kTokens; ++token) {
        const Token next = fetch(from, min(token + 1, kTokens - 1));
        step(now, first + token == 0);
        now = next;
      }
    } else {
      for (int token = 0; first + token < l.z; ++token) step(fetch(from, token), first + token == 0);
    }
  }
  if (l.z > 0) {
#pragma unroll
    for (int width = 16; width >= 4; width /= 2) o += __shfl_xor_sync(0xFFFFFFFFu, o, width);
    put();
  }
#pragma unroll
  for (int n = 0; n < 16; ++n) state[key_of(n) * kDim] = s[n];
}

}  // namespace fnx::cuda::gdn_prompt
