// Many rows: weights of a chunk of outputs are decoded once to fp16 fragments in the workspace, then multiplied in
// tiles of 128 outputs x 128 rows, each output with the chain and order of the few-row kernel.
#pragma once

#include "kernels/cuda/exl3_chain.cuh"
#include "kernels/cuda/exl3_hadamard.cuh"
#include "kernels/cuda/exl3_linear.h"

namespace fnx::cuda {

// Decodes n-tiles [first, first + count) of every k-tile. fragments: [in/16, count, 32, 8] F16, or null; plain: F16
// [in, out] or null.
struct DecodeArgs {
  const uint16_t* trellis;
  uint16_t* fragments;
  uint16_t* plain;
  int64_t in, out;
  int first, count;
};

// Launches the kernel of one codebook and width; instantiated in the units exl3_few_*.cu.
template <exl3::Codebook Book, int HalfBits>
void launch_decode(const DecodeArgs& a, cudaStream_t stream);

struct ManyArgs {
  const uint16_t* weights;  // fragments [in/16, count, 32, 8] of n-tiles first .. first + count
  const uint16_t* xh;       // rotated [in/16, rows, 16]
  const uint16_t* svh;
  const float* bias;
  void* y;
  int64_t in, out, rows;
  int first, count, splits;
  bool bf16;
};
void launch_many(const ManyArgs& a, cudaStream_t stream);

}  // namespace fnx::cuda
