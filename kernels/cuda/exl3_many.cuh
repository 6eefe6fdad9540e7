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

template <exl3::Codebook Book, int HalfBits>
__global__ void __launch_bounds__(256) exl3_decode_kernel(const DecodeArgs a) {
  const int lane = threadIdx.x % 32;
  const LaneBits<HalfBits> bits(lane);
  const int64_t warps = int64_t{gridDim.x} * 8, tiles = a.in / 16 * a.count;
  for (int64_t i = int64_t{blockIdx.x} * 8 + threadIdx.x / 32; i < tiles; i += warps) {
    const int64_t k = i / a.count, n = a.first + i % a.count;
    uint32_t f[4];
    decode_tile<Book, HalfBits>(reinterpret_cast<const uint32_t*>(a.trellis + (k * (a.out / 16) + n) * (8 * HalfBits)),
                                bits, f);
    if (a.fragments != nullptr) reinterpret_cast<uint4*>(a.fragments)[i * 32 + lane] = {f[0], f[1], f[2], f[3]};
    if (a.plain != nullptr)
      for (int j = 0; j < 8; ++j) {
        const uint32_t pair = f[(j / 4) + 2 * (j / 2 % 2)];
        const int64_t row = k * 16 + lane % 4 * 2 + j % 2 + j / 2 % 2 * 8, column = n * 16 + lane / 4 + j / 4 * 8;
        a.plain[row * a.out + column] = static_cast<uint16_t>(pair >> (16 * (j % 2)));
      }
  }
}

// Launches the kernel of one codebook and width; defined in the units exl3_few_*.cu.
template <exl3::Codebook Book, int HalfBits>
void launch_decode(const DecodeArgs& a, cudaStream_t stream);

template <exl3::Codebook Book, int HalfBits>
void launch_decode_here(const DecodeArgs& a, cudaStream_t stream) {
  const int64_t blocks = (a.in / 16 * a.count + 31) / 32;
  launch("exl3_decode_kernel", exl3_decode_kernel<Book, HalfBits>, dim3(static_cast<unsigned>(blocks)), 256, 0, false,
         stream, a);
}

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
