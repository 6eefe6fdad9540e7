// Embedding rows, sums of rows and gathers of rows. Every output element is one load or one rounded fp32 addition.
// Pointers are device memory; errors are Unsupported (outside the domain) and Device (a failed launch).
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

// out[r, c, :] = table[tokens[r], :]. Domain: any shape; tokens are not checked.
struct EmbedParams {
  const int32_t* tokens = nullptr;  // [R]
  const void* table = nullptr;      // [V, H] of F16, BF16 or F32
  DType table_dtype = DType::BF16;
  float* out = nullptr;  // [R, copies, H]
  int64_t rows = 0, copies = 0, width = 0;
};
void embed(const EmbedParams& p, cudaStream_t stream);

// out[r, :] = a[r, :] + b[r / repeat, :]; out may be a.
struct AddParams {
  const float* a = nullptr;  // [R, W]
  const float* b = nullptr;  // [R / repeat, W]
  float* out = nullptr;      // [R, W]
  int64_t rows = 0, width = 0, repeat = 1;
};
void add(const AddParams& p, cudaStream_t stream);

// to[i, :] = from[ids[i], :], or to[ids[i], :] = from[i, :] when `scatter`; ids below 0 are skipped. copies[places[i],
// :] is the row that was moved for i, unless places[i] is below 0. Domain: row_bytes a multiple of 4; rows do not
// overlap.
struct MoveRowsParams {
  const int32_t* ids = nullptr;  // [R]
  const void* from = nullptr;
  void* to = nullptr;
  int64_t rows = 0, row_bytes = 0;
  bool scatter = false;
  const int32_t* places = nullptr;  // [R]; null: no copies
  void* copies = nullptr;
};
void move_rows(const MoveRowsParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
