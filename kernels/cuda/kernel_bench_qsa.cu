// Measurements of sparse attention: a row each of several sequences, all pages in device memory.
#include "kernels/cuda/kernel_bench_run.h"
#include "kernels/cuda/qsa.h"

namespace fnx::cuda {

BenchSeries bench_qsa(BenchRun& run, const BenchOperation& op) {
  constexpr BenchModel m;
  constexpr int64_t page = 64;
  const int64_t R = op.rows, pages = op.context / page, complete = op.context / m.index_ratio, blocks = m.index_blocks;
  const bool attends = op.kind == BenchKind::QsaAttend, writes = op.kind == BenchKind::QsaWrite;

  // Attention takes every `apart`-th block; first others of the same cache, then those of another one.
  const int64_t apart = complete / blocks, row_bytes = 4 * m.kv_heads * m.head_dim * m.index_ratio * blocks;
  const int64_t index_cache = R * complete * m.index_dim, cache = R * op.context * m.kv_heads * m.head_dim;
  const int copies = writes ? 1 : run.copies_of(attends ? R * row_bytes : 4 * index_cache);
  const int64_t caches = attends ? (copies + apart - 1) / apart : writes, indexes = attends ? 0 : copies;

  BenchArena arena;
  std::vector<int32_t> lanes, table(R * pages), choices(apart * R * blocks);
  for (int32_t i = 0; i < R; ++i) lanes.insert(lanes.end(), {i, i, 1, static_cast<int32_t>(op.context - 1)});
  for (int64_t i = 0; i < R * pages; ++i) table[i] = static_cast<int32_t>(i % pages * R + i / pages);
  for (int64_t c = 0; c < apart; ++c)
    for (int64_t i = 0; i < R * blocks; ++i) choices[c * R * blocks + i] = static_cast<int32_t>(i % blocks * apart + c);
  const int32_t *device_table = arena.put(table), *chosen = arena.put(choices);

  QsaShape shape;
  shape.rows = R, shape.heads = m.heads, shape.kv_heads = m.kv_heads, shape.head_dim = m.head_dim;
  shape.index_heads = m.index_heads, shape.index_dim = m.index_dim, shape.ratio = m.index_ratio, shape.blocks = blocks;
  shape.rotary = m.rotary, shape.page_tokens = page, shape.table_width = pages;
  shape.block_table = shape.kv_table = device_table, shape.lanes = {arena.put(lanes), R};
  uint16_t *keys = arena.scales(caches * cache, 1), *values = arena.scales(caches * cache, 2);
  float *index_keys = arena.rows(indexes * index_cache, 3), *raw = arena.rows(R * m.index_ratio * m.index_dim, 4);
  const auto cache_at = [&](int64_t kv, int64_t index) {
    return QsaCache{DType::BF16, keys + kv * cache, values + kv * cache, index_keys + index * index_cache,
                    raw,         m.index_ratio};
  };
  float* query_gate = arena.rows(R * m.heads * 2 * m.head_dim, 5);
  float* index = arena.rows(R * (m.index_heads + 1) * m.index_dim, 6);
  const cudaStream_t s = run.stream();

  if (attends) {
    QsaAttendParams p{shape, {}, query_gate, nullptr, arena.take<float>(R * m.heads * m.head_dim)};
    p.partials = arena.take<float>(qsa_partials(shape));
    return run.rotate(copies, [&](int copy) {
      p.cache = cache_at(copy / apart, 0), p.selected = chosen + copy % apart * R * blocks;
      qsa_attend(p, s);
    });
  }
  if (writes) {
    QsaWriteParams p{shape, cache_at(0, 0), query_gate, arena.rows(R * m.kv_heads * m.head_dim, 7)};
    p.value = arena.rows(R * m.kv_heads * m.head_dim, 8), p.index = index, p.inv_freq = arena.rows(m.rotary / 2, 9);
    p.q_norm = p.k_norm = arena.rows(m.head_dim, 10);
    p.index_q_norm = p.index_k_norm = arena.rows(m.index_dim, 11);
    p.q_eps = p.k_eps = p.index_q_eps = p.index_k_eps = 1e-6f;
    return run.rotate(copies, [&](int) { qsa_write(p, s); });
  }
  QsaSelectParams p{shape, {}, index, arena.take<int32_t>(R * blocks), complete};
  p.scores = arena.take<float>(R * qsa_score_width(complete)), p.score_rows = R;
  return run.rotate(copies, [&](int copy) {
    p.cache = cache_at(0, copy);
    op.kind == BenchKind::QsaScores ? qsa_scores(p, 0, R, s) : qsa_select(p, s);
  });
}

}  // namespace fnx::cuda
