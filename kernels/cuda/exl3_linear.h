// EXL3 linear layers on the GPU: y = ((((x * suh) H) Wq) H) * svh + bias. Format: kernels/exl3.h.
//
// The arithmetic, the same for every row count, kernel and card:
//   rotation  v = x * suh in fp32; butterflies (a + b, a - b) over strides 1, 2, 4, ... 64 in fp32; times the fp32
//   number
//             nearest 1/sqrt(128); rounded to fp16 (nearest even) as xh. Ten fp32 roundings at most, then one fp16.
//   products  exl3_splits(in, out) = S splits cut the in/16 k-tiles: split s owns tiles [exl3_split_begin(s),
//             exl3_split_begin(s + 1)). p_s = one chain of mma.m16n8k16 (fp16 operands, fp32 sums) from zero over the
//             split's tiles in ascending order; z = ((p_0 + p_1) + p_2) + ... in fp32.
//   output    butterflies over z as above, times 1/sqrt(128) in fp32, times svh in fp32, plus bias in fp32; stored as
//             fp32 or rounded once to bf16.
// A row's bits therefore depend on that row and the weight alone. Nothing here allocates or synchronises.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kernels/dtype.h"
#include "kernels/exl3.h"

struct CUstream_st;

namespace fnx::cuda {

using CudaStream = CUstream_st*;

// Rows that exl3_linear_few takes.
inline constexpr int kExl3FewRows = 16;

// Number of K splits of a full matrix: a pure function of its shape. A shard by outputs keeps the full matrix' number.
int exl3_splits(int64_t in, int64_t out);

// First k-tile of split s of `splits` over in/16 tiles; splits end at multiples of two tiles.
constexpr int exl3_split_begin(int64_t in, int splits, int s) { return 2 * static_cast<int>((in / 32) * s / splits); }

// Device pointers of one quantized matrix. Packed signs of older files are unpacked to +1 and -1 when loading.
struct Exl3Weight {
  int64_t in = 0, out = 0;  // multiples of 128; in at most 65536, out at most 524288
  int splits = 0;           // exl3_splits of the full shape
  exl3::Codebook codebook = exl3::Codebook::Mul1;
  int half_bits = 0;
  const uint16_t* trellis = nullptr;  // [in/16, out/16, 8 * half_bits], 16-byte aligned
  const uint16_t* suh = nullptr;      // F16 [in], 8-byte aligned
  const uint16_t* svh = nullptr;      // F16 [out], 8-byte aligned
  const float* bias = nullptr;        // F32 [out] or null, 16-byte aligned
};

// y [rows, out] of F32 or BF16, dense and 16-byte aligned; x F32 [rows, in], dense and 16-byte aligned; y is not x.
// The workspace is exl3_workspace_bytes long, 256-byte aligned and zero before its first use; a launch leaves its first
// 32 MiB zero again and keeps nothing in the rest, so one workspace serves all launches of linears and experts that
// follow each other on one stream.
struct Exl3Linear {
  Exl3Weight weight;
  int64_t rows = 0;
  const float* x = nullptr;
  void* y = nullptr;
  DType y_dtype = DType::F32;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
};

// Enough for any row count up to `rows`, whatever the splits.
size_t exl3_workspace_bytes(int64_t in, int64_t out, int64_t rows);

// All throw Internal, naming the numbers, when the operands lie outside the domain stated above, and Device when the
// launch fails. rows is at least 1.
void exl3_linear(const Exl3Linear& p, CudaStream stream);       // few or many, by rows
void exl3_linear_few(const Exl3Linear& p, CudaStream stream);   // rows 1 to 16
void exl3_linear_many(const Exl3Linear& p, CudaStream stream);  // any rows

// Linears of the same x, to the bits of exl3_linear; they share the first one's workspace, of
// exl3_linears_workspace_bytes. Few rows: each is launched as soon as the blocks of the one before it have started.
inline constexpr int kExl3Linears = 8;  // most of them
size_t exl3_linears_workspace_bytes(std::span<const Exl3Weight> weights, int64_t rows);
void exl3_linears(std::span<const Exl3Linear> list, CudaStream stream);

// Where row r's input k lies in a rotated array of `rows` rows: [in/16, rows, 16], the 16 in the order in which a lane
// of mma.m16n8k16 takes them (2q, 2q+1, 2q+8, 2q+9 for q = 0..3).
constexpr int64_t exl3_rotated_index(int64_t rows, int64_t r, int64_t k) {
  const int64_t i = k % 16;
  return (k / 16 * rows + r) * 16 + (i % 8) / 2 * 4 + i / 8 * 2 + i % 2;
}

// xh = fp16 of H(x * suh) / sqrt(128): x F32 [rows, in] dense, suh F16 [in], xh F16 [in/16, rows, 16] as above.
struct Exl3Rotate {
  int64_t rows = 0, in = 0;
  const float* x = nullptr;
  const uint16_t* suh = nullptr;
  uint16_t* xh = nullptr;
};
void exl3_rotate(const Exl3Rotate& p, CudaStream stream);

// Decoded weights, F16 [in, out]: every value exactly as kernels/exl3.h defines it. For tests and tools.
void exl3_decode(const Exl3Weight& weight, uint16_t* out, CudaStream stream);

}  // namespace fnx::cuda
