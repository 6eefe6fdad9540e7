// Domain checks and page addressing shared by the sparse attention kernels.
#pragma once

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/qsa.h"

namespace fnx::cuda {

inline constexpr int kHeadDim = 256, kIndexDim = 128, kMostGroup = 16, kMostIndexHeads = 8;

inline void check_qsa(const QsaShape& s, const char* kernel) {
  require(s.head_dim == kHeadDim && s.index_dim == kIndexDim && s.rotary % 2 == 0 && s.rotary >= 0 &&
              s.rotary <= kIndexDim && s.kv_heads > 0 && s.heads % s.kv_heads == 0 &&
              s.heads <= kMostGroup * s.kv_heads && s.index_heads >= 1 && s.index_heads <= kMostIndexHeads,
          kernel,
          "heads of 256, index heads of 128, at most 16 query heads a KV head (head dim, index dim, rotary, "
          "heads, KV heads, index heads)",
          {s.head_dim, s.index_dim, s.rotary, s.heads, s.kv_heads, s.index_heads});
  require(s.ratio >= 1 && s.ratio <= 64 && s.page_tokens > 0 && s.page_tokens % s.ratio == 0 && s.blocks >= 1 &&
              s.blocks <= 4096 && s.blocks * s.ratio <= 65536 && s.rows >= 0 && s.lanes.count < 65536,
          kernel, "ratio up to 64, pages of whole blocks, 1 to 4096 selected blocks (ratio, page tokens, blocks, rows)",
          {s.ratio, s.page_tokens, s.blocks, s.rows});
}

// Place of a sequence's token, or index block, among all pages of keys and values, or of index keys.
__device__ __forceinline__ int64_t token_place(const QsaShape& s, int slot, int token) {
  const int page_tokens = static_cast<int>(s.page_tokens);
  return s.kv_table[slot * s.table_width + token / page_tokens] * s.page_tokens + token % page_tokens;
}
__device__ __forceinline__ int64_t block_place(const QsaShape& s, int slot, int block) {
  const int per_page = static_cast<int>(s.page_tokens) / static_cast<int>(s.ratio), page = block / per_page;
  return s.block_table[slot * s.table_width + page] * int64_t{per_page} + (block - page * per_page);
}

// The keys or values of a KV head at a token's place.
template <class T>
__device__ __forceinline__ T* kv_at(const QsaCache& c, const KvPages& pages, int64_t place, int64_t kv_heads, int kv) {
  const bool far = place >= c.near_tokens;
  T* base = static_cast<T*>(far ? pages.far : pages.near);
  return base + ((far ? place - c.near_tokens : place) * kv_heads + kv) * kHeadDim;
}

inline constexpr int kEight = 8;  // neighbouring index blocks, scored by a warp
// Complete blocks up to which the rows of a prompt are selected by warps, which read no highest ranks.
inline constexpr int kMostWarpBlocks = 32768;
inline bool selects_by_warps(const QsaSelectParams& p, int64_t rows) {
  return rows > kSpreadRows && p.max_complete <= kMostWarpBlocks;
}

// Scores are not negative: their bits are in their order; NaN below them all.
__device__ __forceinline__ uint32_t rank_of(float score) { return isnan(score) ? 0u : __float_as_uint(score) + 1u; }

// A row of the workspace: scores, then the highest rank of each eight, which selection by warps goes without.
__device__ __forceinline__ float* row_scores(const QsaSelectParams& p, int64_t row) {
  return p.scores + row * qsa_score_width(p.max_complete);
}
__device__ __forceinline__ uint32_t* row_tops(const QsaSelectParams& p, int64_t row) {
  return reinterpret_cast<uint32_t*>(row_scores(p, row) + (p.max_complete + 31) / 32 * 32);
}

}  // namespace fnx::cuda
