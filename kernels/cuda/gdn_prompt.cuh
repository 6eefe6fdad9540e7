// The recurrence of a prompt's lanes (kernels/cuda/gdn.h); inside the family only.
#pragma once

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/gdn.h"

namespace fnx::cuda::gdn_prompt {

inline constexpr int kDim = 128, kColumns = 16;  // value columns of a block in each of its heads, four a warp
inline constexpr int kTokens = 6, kStages = 4;   // tokens of a stage: a multiple of the three that a step sees
inline constexpr int kCopyAt = 2;                // token beside which a later stage is asked for
inline constexpr int kPieces = kDim / 4, kValuePieces = kColumns / 4;

// What a stage's tokens bring to a block. Keys and queries lie in pieces of four so that piece 8 e + i is the e-th of
// lane i, which has keys 8 i .. 8 i + 7 and 64 + 8 i .. 64 + 8 i + 7.
template <int Heads>
struct Stage {
  float4 keys[kTokens][kPieces], queries[kTokens][kPieces];
  float values[kTokens][Heads][kColumns];
  float2 gates[kTokens][Heads];
};

template <int Heads>
struct Token {
  float4 k[4], q[4];
  float v[Heads];
  float2 gates[Heads];
};

// One column of each of Heads value heads of a key head, from `head` on. Lane 4 i + j of a warp holds the 16 keys of i
// of column j.
template <int Heads>
__device__ __forceinline__ void recur(const GdnParams& p, int lane_index, int head, int chunk) {
  __shared__ __align__(16) Stage<Heads> stages[kStages];
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[lane_index];
  const int tid = threadIdx.x, lane = tid % 32, i = lane / 4, at = tid / 32 * 4 + lane % 4;
  const int key_heads = static_cast<int>(p.key_heads), value_heads = static_cast<int>(p.value_heads);
  const int channels = (2 * key_heads + value_heads) * kDim, key_head = head / (value_heads / key_heads);
  float* state = p.delta + (int64_t{l.x} * value_heads + head) * kDim * kDim + i * 8 * kDim + chunk * kColumns + at;
  const auto state_of = [&](int c, int n) -> float& { return state[(c * kDim + n / 8 * 64 + n % 8) * kDim]; };
  float s[Heads][16];
#pragma unroll
  for (int c = 0; c < Heads; ++c)
#pragma unroll
    for (int n = 0; n < 16; ++n) s[c][n] = state_of(c, n);

  // This thread copies one piece of queries or keys of every second token, and may copy one of values, or a gate.
  const int piece = tid % kPieces, swapped = (piece / 16 * 2 + piece % 2) * 8 + piece % 16 / 2, odd = tid / 64;
  const bool query = tid % 64 < kPieces;
  const int value = tid % (Heads * kValuePieces), value_token = tid / (Heads * kValuePieces);
  const int gate = (tid - 96) % Heads, gate_token = tid < 96 ? kTokens : (tid - 96) / Heads;
  const float* row = p.convolved + int64_t{l.y} * channels;
  const float* key_from = row + odd * channels + (query ? key_head : key_heads + key_head) * kDim + piece * 4;
  const float* value_from = row + int64_t{value_token} * channels +
                            (2 * key_heads + head + value / kValuePieces) * kDim + chunk * kColumns +
                            value % kValuePieces * 4;
  const float2* gate_from =
      reinterpret_cast<const float2*>(p.gates) + (int64_t{l.y} + gate_token) * value_heads + head + gate;
  const int key_step = 2 * channels, value_step = kTokens * channels, gate_step = kTokens * value_heads;
  int key_left = l.z - odd, value_left = value_token < kTokens ? l.z - value_token : 0;
  int gate_left = gate_token < kTokens ? l.z - gate_token : 0;
  const auto copy = [&](int stage) {
    Stage<Heads>& to = stages[stage];
    float4* keys = query ? &to.queries[odd][swapped] : &to.keys[odd][swapped];
#pragma unroll
    for (int j = 0; j < kTokens; j += 2, key_from += key_step)
      if (j < key_left) copy_async16(keys + j * kPieces, key_from);
    if (value_left > 0) copy_async16(&to.values[value_token][0][value * 4], value_from);
    if (gate_left > 0)
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(
                       static_cast<uint32_t>(__cvta_generic_to_shared(&to.gates[gate_token][gate]))),
                   "l"(gate_from)
                   : "memory");
    copy_commit();
    value_from += value_step, gate_from += gate_step;
    key_left -= kTokens, value_left -= kTokens, gate_left -= kTokens;
  };
  wait_for_previous();  // the state is not of the previous launch, which is gdn_conv
  let_next_start();
#pragma unroll
  for (int stage = 0; stage + 2 < kStages; ++stage) copy(stage);

  const auto fetch = [&](int stage, int token) {
    const Stage<Heads>& from = stages[stage];
    Token<Heads> x;
#pragma unroll
    for (int e = 0; e < 4; ++e) x.k[e] = from.keys[token][e * 8 + i], x.q[e] = from.queries[token][e * 8 + i];
#pragma unroll
    for (int c = 0; c < Heads; ++c) x.v[c] = from.values[token][c][at], x.gates[c] = from.gates[token][c];
    return x;
  };
  const auto part = [](const float4(&v)[4], int n) { return reinterpret_cast<const float*>(v)[n]; };
  // S^T k of a token and S^T q of the one before it, to be summed over the lanes.
  float m[Heads] = {}, o[Heads] = {};
  const auto add_lanes = [&](int c, int width) {
    m[c] += __shfl_xor_sync(0xFFFFFFFFu, m[c], width);
    o[c] += __shfl_xor_sync(0xFFFFFFFFu, o[c], width);
  };
  float* out = p.out + ((int64_t{l.y} - 2) * value_heads + head) * kDim + chunk * kColumns + at;
  // v, but not before `after` is there: else the compiler takes all columns' sums at once.
  const int zero = static_cast<int>(p.key_heads >> 32);
  const auto late = [&](float v, float after) {
    return __int_as_float(__float_as_int(v) ^ (__float_as_int(after) & zero));
  };
  constexpr int kTurn = 3;  // the pair of products from which on the next column may begin
  float turn = 0;           // of the column before
  // The state takes in the token before and decays for `now`, a column's sums over lanes beside the next one's
  // products.
  const auto step = [&](const Token<Heads>& before, const Token<Heads>& now, bool put) {
#pragma unroll
    for (int c = 0; c < Heads; ++c) {
      if (put && i == 0) out[c * kDim] = o[c];
      const float d = (late(before.v[c], turn) - m[c]) * (c == 0 ? late(before.gates[c].y, o[c]) : before.gates[c].y);
      float products[2] = {0, 0}, sum[2] = {0, 0};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        if (Heads > 1 && n % 3 == 0) add_lanes((c + Heads - 1) % Heads, 16 >> n / 3);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& to = s[c][8 * e + n];
          to = fmaf(part(before.k, 8 * e + n), d, to);
          sum[e] = fmaf(to, part(before.q, 8 * e + n), sum[e]);
          to *= now.gates[c].x;
          products[e] = fmaf(to, part(now.k, 8 * e + n), products[e]);
        }
        if (n == kTurn) turn = products[0];
      }
      m[c] = products[0] + products[1], o[c] = sum[0] + sum[1];
      if (Heads == 1)
#pragma unroll
        for (int width = 16; width >= 4; width /= 2) add_lanes(c, width);
    }
    out += value_heads * kDim;
  };

  Token<Heads> none{}, before, now;  // none: leaves every state as it is, to the sign of a zero
#pragma unroll
  for (int e = 0; e < 4; ++e) none.k[e] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
#pragma unroll
  for (int c = 0; c < Heads; ++c) none.gates[c].x = 1;
  before = none;
  copy_wait<kStages - 3>();
  __syncthreads();
  now = fetch(0, 0);
  int first = 0, stage = 0, free = kStages - 2;
  for (; first + kTokens <= l.z; first += kTokens) {
    const int following = stage + 1 == kStages ? 0 : stage + 1;
#pragma unroll
    for (int token = 0; token < kTokens; ++token) {
      if (token == kTokens - 2) {
        copy_wait<kStages - 3>();
        __syncthreads();
      }
      const Token<Heads> next = token + 1 < kTokens ? fetch(stage, token + 1) : fetch(following, 0);
      if (token == kCopyAt) copy(free);
      step(before, now, token >= 2 || first > 0);
      before = now, now = next;
    }
    stage = following, free = free + 1 == kStages ? 0 : free + 1;
  }
  for (int token = 0; first + token <= l.z; ++token) {
    now = first + token < l.z ? fetch(stage, token) : none;
    step(before, now, first + token >= 2);
    before = now;
  }
  if (Heads > 1)
#pragma unroll
    for (int width = 16; width >= 4; width /= 2) add_lanes(Heads - 1, width);
#pragma unroll
  for (int c = 0; c < Heads; ++c) {
    if (l.z > 0 && i == 0) out[c * kDim] = o[c];
#pragma unroll
    for (int n = 0; n < 16; ++n) state_of(c, n) = s[c][n];
  }
}

}  // namespace fnx::cuda::gdn_prompt
