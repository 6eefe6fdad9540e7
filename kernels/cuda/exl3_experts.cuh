// Routed experts: the kernels' arguments and what the kernels of few and of many rows share.
#pragma once

#include "kernels/cuda/exl3_experts.h"
#include "kernels/cuda/exl3_few.cuh"

namespace fnx::cuda {

// A run of the pairs sorted by expert.
struct ExpertUnit {
  int32_t expert, begin, count;
};

struct ExpertArgs {
  const Exl3Expert* table;
  const int32_t* ids;  // [rows * slots_per_row]
  int64_t hidden, width, pairs;
  int experts, slots_per_row, gate_splits, down_splits;
  int known;  // few: rows whose last id is experts - 1, before ids says so: all or none
  SplitBegins gate_begins, down_begins;
  const float* x;           // [pairs / slots_per_row, hidden]
  const uint16_t* gate_xh;  // many: rotated [hidden/16, pairs, 16]
  const uint16_t* up_xh;
  float* gate;                // many: [pairs, width]
  uint16_t* down_xh;          // rotated [width/16, pairs, 16]
  float* slots;               // [pairs, hidden]
  uint32_t* gate_exchange;    // few: [pairs, width/128, 2 * gate_splits - 1, 128], empty between launches
  uint32_t* down_exchange;    // few: [pairs, hidden/128, down_splits - 1, 128]
  uint32_t* ready;            // few, or null: [pairs] columns of down_xh there, plus readers; 0 between launches
  const int32_t* order;       // many: pair of each sorted place
  const ExpertUnit* units;    // many
  const int32_t* unit_count;  // many
};

// silu(g) * u.
__device__ __forceinline__ float activate(float g, float u) {
  return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
}
__device__ __forceinline__ float4 activate(float4 g, float4 u) {
  return {activate(g.x, u.x), activate(g.y, u.y), activate(g.z, u.z), activate(g.w, u.w)};
}

// The expert of an id, or null when it is not held here.
__device__ __forceinline__ const Exl3Expert* find_expert(const ExpertArgs& a, int32_t id) {
  if (id < 0 || id >= a.experts) return nullptr;
  const Exl3Expert* e = a.table + id;
  return e->gate.trellis == nullptr ? nullptr : e;
}

// Most pairs of one expert that a block of the many-row kernels takes: when experts have few pairs each, and else.
inline constexpr int kSmallUnitPairs = 32, kUnitPairs = 96;

// Launch the projections of one codebook; instantiated in the units exl3_experts_*.cu.
template <exl3::Codebook Book>
void launch_experts_few(const ExpertArgs& a, cudaStream_t stream);
template <exl3::Codebook Book>
void launch_experts_many(const ExpertArgs& a, int unit_pairs, int most_units, cudaStream_t stream);

}  // namespace fnx::cuda
