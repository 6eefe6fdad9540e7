#include "kernels/cuda/qsa_device.cuh"

namespace fnx::cuda {

namespace {

constexpr int kKeys = 2, kBlockKeys = 8 * 4 * kKeys;  // blocks scored by eight lanes, by one thread block
static_assert(kEight == 4 * kKeys);

constexpr float kIndexScale = 0.08838834764831845f;  // 1 / sqrt(128)

// Adds one index head's part of the scores of a lane's keys.
__device__ __forceinline__ void add_head(const float4* query, const float4 (&key)[kKeys][4], float (&sum)[kKeys]) {
  float dot[kKeys] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float4 q = query[j * 8 + threadIdx.x % 8];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) dot[i] = dot4(q, key[i][j], dot[i]);
  }
#pragma unroll
  for (int i = 0; i < kKeys; ++i) sum[i] += fmaxf(0.0f, warp_sum<8>(dot[i]));
}

// blockIdx: run of index blocks, row. Eight lanes a key. Blocks that were complete before this forward are read before
// the previous launch has ended: it may be the qsa_write of this forward, which writes the others.
__global__ void __launch_bounds__(256) qsa_scores_kernel(QsaSelectParams p, int64_t first) {
  extern __shared__ float4 query[];  // [index_heads][32]
  const QsaShape& s = p.shape;
  const int r = static_cast<int>(first + blockIdx.y), ih = static_cast<int>(s.index_heads);
  const int ratio = static_cast<int>(s.ratio), lane = threadIdx.x % 32, sub = lane % 8;
  const LaneRow l = find_lane(s.lanes, r);
  const int complete = l.slot < 0 ? 0 : (l.start + r - l.first_row + 1) / ratio;
  const int base = blockIdx.x * kBlockKeys + threadIdx.x / 32 * 4 * kKeys + lane / 8;
  const float4* from[kKeys];
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
    if (base + 4 * i < complete)
      from[i] =
          reinterpret_cast<const float4*>(p.cache.index_keys + block_place(s, l.slot, base + 4 * i) * kIndexDim) + sub;
  float4 key[kKeys][4] = {};
  const auto load = [&](int begin, int end) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      if (base + 4 * i < begin || base + 4 * i >= end) continue;
#pragma unroll
      for (int j = 0; j < 4; ++j) key[i][j] = from[i][j * 8];
    }
  };
  const int old = min(complete, l.start / ratio);
  load(0, old);
  wait_previous();
  if (complete <= s.blocks || static_cast<int>(blockIdx.x) * kBlockKeys >= complete) return;
  load(old, complete);
  const float4* index = reinterpret_cast<const float4*>(p.index + int64_t{r} * (ih + 1) * kIndexDim);
  static_assert(kMostIndexHeads * 32 <= 256);
  if (static_cast<int>(threadIdx.x) < ih * 32) query[threadIdx.x] = index[threadIdx.x];
  __syncthreads();
  float sum[kKeys] = {};
  for (int h = 0; h < ih; ++h) add_head(query + h * 32, key, sum);
  uint32_t top = 0;
  float* scores = row_scores(p, blockIdx.y);
#pragma unroll
  for (int i = 0; i < kKeys; ++i) {
    if (sub != 0 || base + 4 * i >= complete) continue;
    const float score = sum[i] * kIndexScale;
    top = max(top, rank_of(score));
    scores[base + 4 * i] = score;
  }
  top = __reduce_max_sync(kFullWarp, top);
  if (lane == 0 && base < complete) row_tops(p, blockIdx.y)[base / kEight] = top;
}

constexpr int kPromptRows = 8;                   // rows of a block that share its index keys
constexpr int kPromptKeys = 4;                   // blocks scored by eight lanes
constexpr int kPromptRun = 8 * 4 * kPromptKeys;  // and by one thread block

// blockIdx: run of index blocks, kPromptRows rows. The same sums; keys are loaded once for neighbouring rows of a lane.
// Lanes i, i + 4, .. of a warp score the same keys, in an order that leaves each lane's first to it when the four are
// summed over the lanes. A half of a warp then holds the scores of one eight.
__global__ void __launch_bounds__(256) qsa_scores_prompt_kernel(QsaSelectParams p, int64_t first, int64_t count) {
  extern __shared__ float4 query[];  // [kPromptRows][index_heads][32]
  wait_previous();
  const QsaShape& s = p.shape;
  const int ih = static_cast<int>(s.index_heads), ratio = static_cast<int>(s.ratio);
  const int at = blockIdx.y * kPromptRows, rows = min(kPromptRows, static_cast<int>(count) - at);
  const int r0 = static_cast<int>(first) + at, lane = threadIdx.x % 32, sub = lane / 4;
  const auto complete_of = [&](const LaneRow& l, int r) { return (l.start + r - l.first_row + 1) / ratio; };
  const float4* index = reinterpret_cast<const float4*>(p.index + int64_t{r0} * (ih + 1) * kIndexDim);
  for (int i = threadIdx.x; i < rows * ih * 32; i += 256)
    query[i] = index[i / (ih * 32) * (ih + 1) * 32 + i % (ih * 32)];
  __syncthreads();
  const int run = blockIdx.x * kPromptRun, base = run + threadIdx.x / 32 * 4 * kPromptKeys + lane % 4;
  const int own = sub / 2;  // of the keys base, base + 4, ..
  float4 key[kPromptKeys][4] = {};
  int slot = -1;
  for (int row = 0; row < rows; ++row) {
    const int r = r0 + row;
    const LaneRow l = find_lane(s.lanes, r);
    const int complete = l.slot < 0 ? 0 : complete_of(l, r);
    if (complete <= s.blocks || run >= complete) continue;
    if (l.slot != slot) {
      slot = l.slot;
      const int most = complete_of(l, min(r0 + rows, l.first_row + l.rows) - 1);
#pragma unroll
      for (int i = 0; i < kPromptKeys; ++i) {
        const int b = base + 4 * (own ^ i);
        if (b >= most) continue;
        const float4* from = reinterpret_cast<const float4*>(p.cache.index_keys + block_place(s, slot, b) * kIndexDim);
#pragma unroll
        for (int j = 0; j < 4; ++j) key[i][j] = from[j * 8 + sub];
      }
    }
    float sum = 0;
#pragma unroll 2
    for (int h = 0; h < ih; ++h) {
      float dot[kPromptKeys] = {};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float4 q = query[(row * ih + h) * 32 + j * 8 + sub];
#pragma unroll
        for (int i = 0; i < kPromptKeys; ++i) dot[i] = dot4(q, key[i][j], dot[i]);
      }
      const auto other = [](float v, int width) { return __shfl_xor_sync(kFullWarp, v, width); };
      const float a = dot[0] + other(dot[2], 16), b = dot[1] + other(dot[3], 16);
      float mine = a + other(b, 8);
      mine += other(mine, 4);
      sum += fmaxf(0.0f, mine);
    }
    const bool mine = sub % 2 == 0 && base + 4 * own < complete;
    const float score = sum * kIndexScale;
    if (mine) row_scores(p, at + row)[base + 4 * own] = score;
    if (p.max_complete <= kMostWarpBlocks) continue;
    uint32_t top = mine ? rank_of(score) : 0;
#pragma unroll
    for (int d = 1; d < 16; d *= 2) top = max(top, __shfl_xor_sync(kFullWarp, top, d));
    if (lane % 16 == 0 && mine) row_tops(p, at + row)[(base + 4 * own) / kEight] = top;
  }
}

}  // namespace

void qsa_scores(const QsaSelectParams& p, int64_t first, int64_t count, cudaStream_t stream) {
  check_qsa(p.shape, "qsa_scores");
  require(count <= p.score_rows && count < 65536 && first >= 0 && first + count <= p.shape.rows, "qsa_scores",
          "a workspace of the rows asked for (first, count, workspace rows, rows)",
          {first, count, p.score_rows, p.shape.rows});
  require(aligned16({p.index, p.cache.index_keys, p.scores}), "qsa_scores",
          "index queries, index keys and workspace aligned to 16 bytes (first row, rows)", {first, count});
  if (count == 0 || p.max_complete <= p.shape.blocks) return;
  const unsigned runs = blocks_of(p.max_complete, kBlockKeys);
  const size_t query_bytes = p.shape.index_heads * kIndexDim * sizeof(float);
  if (count > kSpreadRows) {
    const dim3 grid(blocks_of(p.max_complete, kPromptRun), blocks_of(count, kPromptRows));
    launch("qsa_scores", qsa_scores_prompt_kernel, grid, 256, kPromptRows * query_bytes, stream, p, first, count);
    return;
  }
  const dim3 grid(runs, static_cast<unsigned>(count));
  launch("qsa_scores", qsa_scores_kernel, grid, 256, query_bytes, stream, p, first);
}

}  // namespace fnx::cuda
