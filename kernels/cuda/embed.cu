#include "kernels/cuda/embed.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/device_math.cuh"

namespace fnx::cuda {

namespace {

template <class T>
__global__ void __launch_bounds__(256) embed_kernel(EmbedParams p) {
  wait_previous();
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.rows * p.copies * p.width) return;
  const int64_t row = i / (p.copies * p.width), h = i % p.width;
  p.out[i] = static_cast<float>(static_cast<const T*>(p.table)[int64_t{p.tokens[row]} * p.width + h]);
}

__global__ void __launch_bounds__(256) add_kernel(AddParams p) {
  wait_previous();
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.rows * p.width) return;
  p.out[i] = p.a[i] + p.b[i / p.width / p.repeat * p.width + i % p.width];
}

template <class T>
__global__ void __launch_bounds__(256) move_rows_kernel(MoveRowsParams p) {
  wait_previous();
  const int64_t words = p.row_bytes / static_cast<int64_t>(sizeof(T)), i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.rows * words) return;
  const int64_t row = i / words, other = p.ids[row], place = p.places != nullptr ? p.places[row] : -1;
  if (other < 0) return;
  const int64_t there = other * words + i % words;
  const T value = static_cast<const T*>(p.from)[p.scatter ? i : there];
  static_cast<T*>(p.to)[p.scatter ? there : i] = value;
  if (place >= 0) static_cast<T*>(p.copies)[place * words + i % words] = value;
}

}  // namespace

void embed(const EmbedParams& p, cudaStream_t stream) {
  require(p.rows >= 0 && p.copies > 0 && p.width > 0, "embed", "positive sizes (rows, copies, width)",
          {p.rows, p.copies, p.width});
  if (p.rows == 0) return;
  const unsigned blocks = blocks_of(p.rows * p.copies * p.width, 256);
  if (p.table_dtype == DType::BF16)
    launch("embed", embed_kernel<__nv_bfloat16>, blocks, 256, 0, stream, p);
  else if (p.table_dtype == DType::F16)
    launch("embed", embed_kernel<__half>, blocks, 256, 0, stream, p);
  else {
    require(p.table_dtype == DType::F32, "embed", "a table of F16, BF16 or F32 (bytes of an element)",
            {static_cast<int64_t>(dtype_size(p.table_dtype))});
    launch("embed", embed_kernel<float>, blocks, 256, 0, stream, p);
  }
}

void add(const AddParams& p, cudaStream_t stream) {
  require(p.rows >= 0 && p.width > 0 && p.repeat > 0 && p.rows % p.repeat == 0, "add",
          "rows a multiple of repeat (rows, width, repeat)", {p.rows, p.width, p.repeat});
  if (p.rows == 0) return;
  launch("add", add_kernel, blocks_of(p.rows * p.width, 256), 256, 0, stream, p);
}

void move_rows(const MoveRowsParams& p, cudaStream_t stream) {
  require(p.rows >= 0 && p.row_bytes > 0 && p.row_bytes % 4 == 0, "move_rows",
          "rows of a multiple of 4 bytes (rows, row bytes)", {p.rows, p.row_bytes});
  if (p.rows == 0) return;
  if (p.row_bytes % 16 == 0 && aligned16({p.from, p.to, p.copies}))
    launch("move_rows", move_rows_kernel<uint4>, blocks_of(p.rows * p.row_bytes / 16, 256), 256, 0, stream, p);
  else
    launch("move_rows", move_rows_kernel<uint32_t>, blocks_of(p.rows * p.row_bytes / 4, 256), 256, 0, stream, p);
}

}  // namespace fnx::cuda
