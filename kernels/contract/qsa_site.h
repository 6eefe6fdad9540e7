// One layer's paged caches as the three sparse attention entries share them.
#pragma once

#include <string>
#include <vector>

#include "kernels/contract/device.h"
#include "kernels/ops.h"
#ifdef FNX_HAS_CUDA
#include "kernels/cuda/qsa.h"
#endif

namespace fnx::contract {

inline constexpr int64_t kHeadDim = 256, kIndexDim = 128, kRotary = 64;
inline constexpr float kQsaEps = 1e-6f;

struct QsaSizes {
  int64_t heads, kv_heads, index_heads, ratio, blocks, page_tokens, width, ring;  // ring: raw keys of a slot
  DType dtype;                                                                    // of keys and values
  explicit QsaSizes(const Problem& p);
  int64_t kv_width() const { return kv_heads * kHeadDim; }
  int64_t index_width() const { return (index_heads + 1) * kIndexDim; }
  int64_t per_page() const { return page_tokens / ratio; }
};

// Sequences begin near position `start`, which the block table's width follows; `ring` raw keys, a multiple of 4.
Shape qsa_shape(int64_t heads, int64_t kv_heads, int64_t blocks, DType dtype, int64_t start = 60, int64_t ring = 4);
// Adds "lanes", "block_table" and "kv_table": no two sequences share a page, nor two of the last 64 pages of one.
// Returns the number of pages.
int64_t add_pages(Problem& p, int64_t rows, Random& random);
// Adds one of keys and values: [pages, page_tokens, kv_heads, head_dim] of normal numbers.
void add_cache(Problem& p, const char* name, Role role, int64_t pages, Random& random);

// Place of a sequence's token in the operands of keys and values, of an index block in that of index keys.
int64_t token_place(const Problem& p, const QsaSizes& s, int32_t slot, int64_t token);
int64_t block_place(const Problem& p, const QsaSizes& s, int32_t slot, int64_t block);

struct QsaRow {
  int64_t row, position;
  int32_t slot;
};
std::vector<QsaRow> rows_of(const Problem& p);

void qsa_domain(const Problem& p);
std::vector<Refusal> qsa_refusals();
// The planted fault that takes every sequence's pages in reverse.
Control crossed_pages();

// Weights and caches as the cpu backend takes them, of those operands that the problem has.
QsaWeights qsa_weights(Problem& p);
KvCache qsa_cache(Problem& p);
QsaRows qsa_rows(Problem& p);
#ifdef FNX_HAS_CUDA
cuda::QsaShape device_shape(const Problem& p, DeviceProblem& d);
cuda::QsaCache device_cache(const Problem& p, DeviceProblem& d);
#endif

}  // namespace fnx::contract
