// The inner product of the cpu backend. Every output is one fp64 chain over ascending inputs: a product of an fp32
// input and an fp16 or fp32 weight is exact in fp64, so the bits are the same with and without fused multiply-add, on
// every instruction set and for every number of rows.
#pragma once

#include <cstdint>

namespace fnx::cpu {

inline constexpr int kPanel = 32;    // outputs of a panel; weights are stored [out / kPanel][in][kPanel]
inline constexpr int kRowBlock = 4;  // most rows of one call

// acc[r * kPanel + c] = sum over k of x[r * stride + k] * panel[k * kPanel + c], for rows 1 .. kRowBlock.
using PanelFn = void (*)(const void* panel, int64_t in, const float* x, int64_t stride, int rows, double* acc);

struct DenseIsa {
  const char* name;
  PanelFn f16;  // null: this instruction set has no fast fp16 load, weights are kept as fp32
  PanelFn f32;
};

// The best instruction set of this processor.
const DenseIsa& dense_isa();
// Every instruction set this processor has, the plain one first; for tests.
const DenseIsa* const* dense_isas();  // null-terminated

}  // namespace fnx::cpu
