// EXL3 linear layers twice: in fp32 with the kernel's sum order, and in fp64 with a bound.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/contract/bound.h"
#include "kernels/contract/inputs.h"
#include "kernels/exl3.h"
#include "kernels/ops.h"

namespace fnx::contract {

// Bytes that one-row kernels of 2.5 to 4 bits, held to 64 registers, spill on sm_120; none on sm_90.
inline constexpr int64_t kSpill = 8;

struct Exl3Matrix {
  int64_t in = 0, out = 0;
  int splits = 1;
  exl3::Codebook codebook = exl3::Codebook::Mul1;
  int half_bits = 0;
  const uint16_t* trellis = nullptr;  // [in/16, out/16, 8 * half_bits]
  const uint16_t* suh = nullptr;      // F16 [in]
  const uint16_t* svh = nullptr;      // F16 [out]
  const float* bias = nullptr;        // [out] or null
};

// Decoded values [in, out].
std::vector<float> decode(const Exl3Matrix& m);

// The same matrix as kernels/cpu takes it; it keeps pointing at m's trellis.
LinearSource linear_source(const Exl3Matrix& m);

// Faults of a linear kernel that only its inside can show.
enum class Exl3Fault : uint8_t {
  None,
  DroppedTile,      // the last k-tile is not added
  RepeatedSplit,    // a stale split counter: split 0 is added twice
  ReversedSplits,   // splits are added in descending order
  TwoChains,        // a split's chain is cut in two
  ShiftedColumn,    // a lane holds its neighbour's column of a tile
  Bf16Rotation,     // the rotated input is rounded to bf16
  UnrotatedOutput,  // the output's Hadamard transform is left out
};

// xh of one 128-block with the kernel's arithmetic, as fp32 numbers; `bf16` rounds it to bf16 in place of fp16, a
// fault.
void rotate_block(const float* x, const uint16_t* suh, bool bf16, float* xh);

// One row with the kernel's arithmetic: the chain of a split is k-ascending in fp32, as a chain of exact products and
// rounded sums (the device's tensor cores round the sixteen sums of a step together), splits ascending.
void linear_row(const Exl3Matrix& m, const std::vector<float>& decoded, const float* x, float* y,
                Exl3Fault fault = Exl3Fault::None);

// A layer's fp64 reference with its bound. x may carry errors of its own, e_x.
//   rotation  rho = gamma_10 * B, B the scaled sum of the block's |x * suh|: a product, seven butterflies, the factor's
//             own rounding and its product. Then one rounding to fp16, which the reference makes too, so that an
//             element errs only where its interval holds a rounding boundary: e_r, from the interval's rounded ends.
//   product   fp32 sums: e_z = gamma_(K + splits) * sum_k (|xh| + e_r) |W|.
//   output    block sum of (e_z + gamma_9 (|z| + e_z)) * |svh| / sqrt(128): as the rotation without its first product;
//             2u |y| for svh and bias; and what the rotated input's errors become: sum_k e_r |W'|, W' = W H svh, or,
//             when it is less, e_x through the whole layer, sum_i e_x |suh H W'|, and rho and both roundings through
//             W'.
// Rotation::Exact leaves the rotated input unrounded and counts the kernel's rounding as an error, e_r = (rho + e_x) +
// 2^-11 (|xh| + rho + e_x): a reference for kernels/cpu, which does not round there, and for the kernel.
enum class Rotation : uint8_t { Fp16, Exact };

class Exl3Reference {
 public:
  // `carries` makes suh H W' too, without which the bound of rows with errors of their own is looser.
  explicit Exl3Reference(const Exl3Matrix& m, bool carries = false);
  std::vector<Bounded> row(const std::vector<Bounded>& x, Rotation rotation) const;

 private:
  Exl3Matrix m_;
  std::vector<float> decoded_;  // W [in, out]
  std::vector<float> after_;    // |W'| [in, out]
  std::vector<float> whole_;    // |suh H W'| [in, out], or empty
};

// Random trellis words, and scales of either sign around 1; `directed` makes the scales +-1 and every block's first
// tile row equal, so that block-constant inputs meet one weight.
void fill_trellis(uint16_t* words, int64_t in, int64_t out, int half_bits, Random& random, bool directed);
void fill_scales(uint16_t* scales, int64_t count, Random& random, bool directed);
// Rows whose rotated blocks are (value, 0, 0, ...): 2^12, -2^12 and small numbers in a random order of the blocks.
void fill_directed(float* x, int64_t rows, int64_t in, const uint16_t* suh, Random& random);

}  // namespace fnx::contract
