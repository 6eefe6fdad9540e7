// Few rows: a block owns 128 outputs and one K split; warp w decodes n-tile w of them. The block of a column's last
// split adds the splits in ascending order and transforms the output.
#pragma once

#include "kernels/cuda/exl3_chain.cuh"
#include "kernels/cuda/exl3_exchange.cuh"
#include "kernels/cuda/exl3_linear.h"
#include "kernels/cuda/exl3_plan.h"

namespace fnx::cuda {

inline constexpr int kFewThreads = 256;
// Stride of a row of 128 outputs in shared memory: rows of one store fall into different banks.
inline constexpr int kColumnStride = 132;

// Four sums of an mma to z[row][column], from the first one's place on.
__device__ __forceinline__ void store_sums(float* z, const float (&sum)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) z[i % 2 * kColumnStride + i / 2 * 8] = sum[i];
}

// First k-tiles of the splits, and the end: among the arguments, so that no block divides before its first copies.
struct SplitBegins {
  uint16_t at[kMostSplits + 1];
};
inline SplitBegins split_begins(int64_t in, int splits) {
  SplitBegins b = {};
  for (int s = 0; s <= splits; ++s) b.at[s] = static_cast<uint16_t>(exl3_split_begin(in, splits, s));
  return b;
}

struct FewArgs {
  const uint16_t* trellis;
  const float* x;  // [rows, in] to be rotated with suh here, or null when xh is given
  const uint16_t* suh;
  const uint16_t* xh;  // rotated [in/16, rows, 16]
  const uint16_t* svh;
  const float* bias;
  void* y;             // [rows, out]
  uint32_t* exchange;  // [out/128, rows, splits - 1, 128], empty between launches
  int64_t in, out;
  int rows, splits;
  SplitBegins begins;
  bool bf16;
  bool beside;  // x or xh is of the launch before the previous one, beside which this one may run
};

// Launches the kernel of one codebook and width; instantiated in the units exl3_few_*.cu.
template <exl3::Codebook Book, int HalfBits>
void launch_few(const FewArgs& a, cudaStream_t stream);

// Writes a warp's accumulators, 16 outputs from column `first` on, as z[row][column].
template <int Groups>
__device__ __forceinline__ void store_columns(float* z, int first, int lane, int rows, const float (&acc)[Groups][4]) {
  const int column = first + lane / 4;
#pragma unroll
  for (int g = 0; g < Groups; ++g) {
    const int row = g * 8 + lane % 4 * 2;
    if (row < rows) {
      z[row * kColumnStride + column] = acc[g][0];
      z[row * kColumnStride + column + 8] = acc[g][2];
    }
    if (row + 1 < rows) {
      z[(row + 1) * kColumnStride + column] = acc[g][1];
      z[(row + 1) * kColumnStride + column + 8] = acc[g][3];
    }
  }
}

}  // namespace fnx::cuda
