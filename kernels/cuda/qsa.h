// Sparse attention: cache writes, block selection, attention. A row's key list is its selected blocks ascending, then
// the tail; it is cut into parts of 64 keys by list place alone, the same for prompts and decode.
//
// Domain of all: head_dim = 256, index_dim = 128, rotary even and at most 128, heads a multiple of kv_heads with at
// most 16 query heads a KV head, index_heads 1 to 8, ratio 1 to 64, page_tokens a multiple of ratio, blocks at most
// 4096, fewer than 2^31 tokens in all pages.
#pragma once

#include "kernels/cuda/stream.h"

namespace fnx::cuda {

inline constexpr int kPartKeys = 64;

struct QsaShape {
  int64_t rows = 0, heads = 0, kv_heads = 0, head_dim = 0, index_heads = 0, index_dim = 0, ratio = 0, blocks = 0,
          rotary = 0;
  // Paged cache: page of a sequence's i-th run of page_tokens tokens is block_table[slot, i].
  int64_t page_tokens = 0, table_width = 0;
  const int32_t* block_table = nullptr;  // [slots, table_width]
  const int32_t* kv_table = nullptr;     // [slots, table_width], of keys and values
  Lanes lanes;
};

// [pages, page_tokens, kv_heads, head_dim]: those of the device, and from QsaCache::near_tokens on those behind `far`,
// which may be mapped host memory.
struct KvPages {
  KvPages() = default;
  KvPages(void* near_pages, void* far_pages = nullptr) : near(near_pages), far(far_pages) {}
  void *near = nullptr, *far = nullptr;
};

struct QsaCache {
  DType dtype = DType::BF16;  // of keys and values: BF16 or F32
  KvPages keys, values;
  float* index_keys = nullptr;      // [pages, page_tokens / ratio, index_dim]
  float* raw_keys = nullptr;        // [slots, ring, index_dim], at position % ring
  int64_t ring = 0;                 // a multiple of the ratio
  int64_t near_tokens = INT64_MAX;  // places of the device's pages of keys and values
};

// Norms and rotates query, key and index queries in place, stores key and value, pools each block that a row completes
// and keeps the raw index keys of the incomplete one. A pooled key is the fp32 sum of its raw keys, oldest first, over
// ratio. Squares: element lane, lane + 32, .. in one fma chain, then a butterfly of 32 lanes.
struct QsaWriteParams {
  QsaShape shape;
  QsaCache cache;
  float* query_gate = nullptr;                                   // [R, heads, 2, head_dim]
  float* key = nullptr;                                          // [R, kv_heads, head_dim]
  const float* value = nullptr;                                  // [R, kv_heads, head_dim]
  float* index = nullptr;                                        // [R, index_heads + 1, index_dim]
  const float* inv_freq = nullptr;                               // [rotary / 2]
  const float *q_norm = nullptr, *k_norm = nullptr;              // [head_dim], centred
  const float *index_q_norm = nullptr, *index_k_norm = nullptr;  // [index_dim], centred
  float q_eps = 0, k_eps = 0, index_q_eps = 0, index_k_eps = 0;
};
void qsa_write(const QsaWriteParams& p, cudaStream_t stream);

// Floats of a row of the workspace: a score each block, one each eight blocks.
constexpr int64_t qsa_score_width(int64_t max_complete) { return (max_complete + 31) / 32 * (32 + 4); }

// score(b) = sum over index heads ascending of relu(iq_h . key_b), times 1 / sqrt(index_dim). A dot product: 8 lanes
// each chain dims 4 i, .. 4 i + 3, 32 + 4 i, .. ascending, then a butterfly of 8 lanes. NaN scores rank last. Ties go
// to the lower block. Lanes, the block table, and index keys of blocks that end before a lane's start, are read before
// the previous launch has ended; that is qsa_write, which writes none of them.
struct QsaSelectParams {
  QsaShape shape;
  QsaCache cache;
  const float* index = nullptr;  // [R, index_heads + 1, index_dim], as qsa_write left it
  int32_t* selected = nullptr;   // [R, blocks], ascending, -1 after the last
  int64_t max_complete = 0;      // no row of the launch has more complete blocks
  float* scores = nullptr;       // workspace [score_rows, qsa_score_width]; rows are taken score_rows at a time
  int64_t score_rows = 0;
};
void qsa_select(const QsaSelectParams& p, cudaStream_t stream);
// The scores of rows [first, first + count) of the launch to scores[0 .. count); qsa_select without the selection.
void qsa_scores(const QsaSelectParams& p, int64_t first, int64_t count, cudaStream_t stream);

// BF16 pages: the query and the weights of a part are split into three bf16 numbers each (exact to 24 bits). A score is
// the sum, greatest first, of one mma.sync m16n8k16 chain over dims ascending for each of the query's three; weighted
// values are one chain over the part's keys ascending, the weight's three in descending size within a step. The parts'
// (max, sum, weighted values) are merged in ascending order in fp32; then the division by the sum, then sigmoid(gate).
// F32 pages: fp32 fma chains in the same parts, a dot product as 32 lanes of dims lane, lane + 32, .. and a butterfly.
// Must be the launch after qsa_select: queries, gates and lanes are read before that has ended.
struct QsaAttendParams {
  QsaShape shape;
  QsaCache cache;
  const float* query_gate = nullptr;  // [R, heads, 2, head_dim], as qsa_write left it
  const int32_t* selected = nullptr;  // [R, blocks]
  float* out = nullptr;               // [R, heads * head_dim]
  float* partials = nullptr;          // workspace: qsa_partials(shape) floats
};
int64_t qsa_partials(const QsaShape& shape);
void qsa_attend(const QsaAttendParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
