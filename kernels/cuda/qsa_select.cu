#include <algorithm>

#include "kernels/cuda/qsa_device.cuh"

namespace fnx::cuda {

namespace {

constexpr int kKeys = 2, kBlockKeys = 8 * 4 * kKeys;  // blocks scored by eight lanes, by one thread block
constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kBatch = 8;      // scores in flight a thread
constexpr int kGather = 1024;  // candidates for the last place that are compared with one another

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
  float4 key[kKeys][4] = {};
  const auto load = [&](int from, int to) {
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int b = base + 4 * i;
      if (b < from || b >= to) continue;
      const float4* at = reinterpret_cast<const float4*>(p.cache.index_keys + block_place(s, l.slot, b) * kIndexDim);
#pragma unroll
      for (int j = 0; j < 4; ++j) key[i][j] = at[j * 8 + sub];
    }
  };
  const int old = min(complete, l.start / ratio);
  load(0, old);
  wait_previous();
  if (complete <= s.blocks || static_cast<int>(blockIdx.x) * kBlockKeys >= complete) return;
  load(old, complete);
  const float4* index = reinterpret_cast<const float4*>(p.index + int64_t{r} * (ih + 1) * kIndexDim);
  for (int i = threadIdx.x; i < ih * 32; i += 256) query[i] = index[i];
  __syncthreads();
  float sum[kKeys] = {};
  for (int h = 0; h < ih; ++h) add_head(query + h * 32, key, sum);
#pragma unroll
  for (int i = 0; i < kKeys; ++i)
    if (sub == 0 && base + 4 * i < complete)
      p.scores[blockIdx.y * p.max_complete + base + 4 * i] = sum[i] * kIndexScale;
}

constexpr int kPromptRows = 8;  // rows of a block that share its index keys

// blockIdx: run of index blocks, kPromptRows rows. The same sums; keys are loaded once for neighbouring rows of a lane.
__global__ void __launch_bounds__(256) qsa_scores_prompt_kernel(QsaSelectParams p, int64_t first, int64_t count) {
  extern __shared__ float4 query[];  // [kPromptRows][index_heads][32]
  wait_previous();
  const QsaShape& s = p.shape;
  const int ih = static_cast<int>(s.index_heads), ratio = static_cast<int>(s.ratio);
  const int at = blockIdx.y * kPromptRows, rows = min(kPromptRows, static_cast<int>(count) - at);
  const int r0 = static_cast<int>(first) + at, lane = threadIdx.x % 32, sub = lane % 8;
  const auto complete_of = [&](const LaneRow& l, int r) { return (l.start + r - l.first_row + 1) / ratio; };
  const float4* index = reinterpret_cast<const float4*>(p.index + int64_t{r0} * (ih + 1) * kIndexDim);
  for (int i = threadIdx.x; i < rows * ih * 32; i += 256)
    query[i] = index[i / (ih * 32) * (ih + 1) * 32 + i % (ih * 32)];
  __syncthreads();
  const int base = blockIdx.x * kBlockKeys + threadIdx.x / 32 * 4 * kKeys + lane / 8;
  float4 key[kKeys][4] = {};
  int slot = -1;
  for (int row = 0; row < rows; ++row) {
    const int r = r0 + row;
    const LaneRow l = find_lane(s.lanes, r);
    const int complete = l.slot < 0 ? 0 : complete_of(l, r);
    if (complete <= s.blocks || static_cast<int>(blockIdx.x) * kBlockKeys >= complete) continue;
    if (l.slot != slot) {
      slot = l.slot;
      const int most = complete_of(l, min(r0 + rows, l.first_row + l.rows) - 1);
#pragma unroll
      for (int i = 0; i < kKeys; ++i) {
        if (base + 4 * i >= most) continue;
        const float4* from =
            reinterpret_cast<const float4*>(p.cache.index_keys + block_place(s, slot, base + 4 * i) * kIndexDim);
#pragma unroll
        for (int j = 0; j < 4; ++j) key[i][j] = from[j * 8 + sub];
      }
    }
    float sum[kKeys] = {};
    for (int h = 0; h < ih; ++h) add_head(query + (row * ih + h) * 32, key, sum);
#pragma unroll
    for (int i = 0; i < kKeys; ++i)
      if (sub == 0 && base + 4 * i < complete)
        p.scores[(at + row) * p.max_complete + base + 4 * i] = sum[i] * kIndexScale;
  }
}

// Scores are not negative: their bits are in their order; NaN below them all.
__device__ __forceinline__ uint32_t rank_of(float score) { return isnan(score) ? 0u : __float_as_uint(score) + 1u; }

// One block a row: finds the rank of the last selected block digit by digit, then writes the selected in order.
__global__ void __launch_bounds__(1024) qsa_select_kernel(QsaSelectParams p, int64_t first) {
  __shared__ uint32_t bins[kBins];
  __shared__ uint64_t gathered[kGather];
  __shared__ int gathered_count;
  __shared__ int warp_sums[32], warp_above[32], warp_equal[32];
  __shared__ uint32_t warp_low[32], warp_high[32];
  __shared__ uint32_t found_bin;
  __shared__ int found_want, found_count;
  const QsaShape& s = p.shape;
  const int r = static_cast<int>(first + blockIdx.x), blocks = static_cast<int>(s.blocks), tid = threadIdx.x;
  const LaneRow l = find_lane(s.lanes, r);
  const auto clear_bins = [&] {
    for (int i = tid; i < kBins; i += 1024) bins[i] = 0;
    if (tid == 0) gathered_count = 0, found_bin = 0;
  };
  clear_bins();
  wait_previous();
  if (l.slot < 0) return;
  const int complete = (l.start + r - l.first_row + 1) / static_cast<int>(s.ratio);
  int32_t* selected = p.selected + int64_t{r} * blocks;
  if (complete <= blocks) {
    for (int i = tid; i < blocks; i += 1024) selected[i] = i < complete ? i : -1;
    return;
  }
  const float* scores = p.scores + blockIdx.x * p.max_complete;
  const int lane = tid % 32, warp = tid / 32;
  // Ranks between the lowest and the highest of the row, cut into bins; then the bin of the last selected block, again,
  // until it holds few enough. Each warp takes a run of blocks; a run of one batch stays in registers.
  const int run = (complete + 1023) / 1024 * 32, from = warp * run;
  uint32_t rank[kBatch];
  bool loaded = false;
  const auto each = [&](auto fn) {  // fn(rank, block), with rank 0 and a block beyond the last for lanes that have none
    for (int b = from; b < from + run; b += 32 * kBatch) {
      if (!loaded) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = b + j * 32 + lane;
          rank[j] = i < complete && i < from + run ? rank_of(scores[i]) : 0;
        }
        loaded = run <= 32 * kBatch;
      }
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const int i = b + j * 32 + lane;
        fn(rank[j], i < from + run ? i : complete);
      }
    }
  };
  uint32_t low = UINT32_MAX, high = 0;
  each([&](uint32_t r, int i) {
    if (i < complete) low = min(low, r), high = max(high, r);
  });
  const uint32_t mine = high;  // 0 where this thread has no block, which is below all but NaN
  low = __reduce_min_sync(kFullWarp, low), high = __reduce_max_sync(kFullWarp, high);
  if (lane == 0) warp_low[warp] = low, warp_high[warp] = high;
  __syncthreads();
  low = __reduce_min_sync(kFullWarp, warp_low[lane]), high = __reduce_max_sync(kFullWarp, warp_high[lane]);
  int want = blocks;
  const auto shift_of = [&] { return max(0, 32 - __clz(high - low) - kBinBits); };
  // Counts from the highest bin down, two bins a thread, and finds the bin in which the count reaches `want`.
  const auto find_bin = [&] {
    __syncthreads();
    const int top = kBins - 1 - 2 * tid;
    const int c0 = static_cast<int>(bins[top]), c1 = static_cast<int>(bins[top - 1]);
    int before = c0 + c1;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(kFullWarp, before, d);
      if (lane >= d) before += v;
    }
    if (lane == 31) warp_sums[warp] = before;
    __syncthreads();
    before += before_warp(warp_sums) - c0 - c1;
    if (before < want && want <= before + c0) found_bin = top, found_want = want - before, found_count = c0;
    if (before + c0 < want && want <= before + c0 + c1)
      found_bin = top - 1, found_want = want - before - c0, found_count = c1;
    __syncthreads();
  };
  if (low < high) {
    // The threads' highest ranks: as many blocks as are wanted lie in the bin of the last of these or above.
    const int shift = shift_of();
    if (mine > low) atomicAdd(bins + ((mine - low) >> shift), 1u);
    find_bin();
    low += found_bin << shift;
    __syncthreads();
    clear_bins();
    __syncthreads();
  }
  while (low < high) {
    const int shift = shift_of();
    each([&](uint32_t r, int i) {
      if (i < complete && r >= low && r <= high) atomicAdd(bins + ((r - low) >> shift), 1u);
    });
    find_bin();
    low += found_bin << shift;
    high = min(high, low + ((1u << shift) - 1));
    want = found_want;
    const int count = found_count;
    if (count <= kGather && low < high) {
      each([&](uint32_t r, int i) {
        if (i < complete && r >= low && r <= high)
          gathered[atomicAdd(&gathered_count, 1)] = uint64_t{r} << 32 | ~static_cast<uint32_t>(i);
      });
      __syncthreads();
      if (tid < count) {
        const uint64_t me = gathered[tid];
        int before = 0, above = 0;
        for (int j = 0; j < count; ++j) {
          before += gathered[j] > me;
          above += gathered[j] >> 32 > me >> 32;
        }
        if (before == want - 1) found_bin = static_cast<uint32_t>(me >> 32), found_want = want - above;
      }
      __syncthreads();
      low = high = found_bin, want = found_want;
      break;
    }
    __syncthreads();
    clear_bins();
    __syncthreads();
  }
  const uint32_t last = low;  // the rank of the last selected block; `want` blocks of it are selected
  int above = 0, equal = 0;
  each([&](uint32_t r, int i) {
    above += __popc(__ballot_sync(kFullWarp, i < complete && r > last));
    equal += __popc(__ballot_sync(kFullWarp, i < complete && r == last));
  });
  if (lane == 0) warp_above[warp] = above, warp_equal[warp] = equal;
  __syncthreads();
  above = before_warp(warp_above), equal = before_warp(warp_equal);
  const unsigned below_me = (1u << lane) - 1;
  each([&](uint32_t r, int i) {
    const unsigned a = __ballot_sync(kFullWarp, i < complete && r > last);
    const unsigned e = __ballot_sync(kFullWarp, i < complete && r == last);
    const int my_above = above + __popc(a & below_me), my_equal = equal + __popc(e & below_me);
    if (i < complete && (r > last || (r == last && my_equal < want))) selected[my_above + min(my_equal, want)] = i;
    above += __popc(a), equal += __popc(e);
  });
}

}  // namespace

void qsa_scores(const QsaSelectParams& p, int64_t first, int64_t count, cudaStream_t stream) {
  check_qsa(p.shape, "qsa_scores");
  require(count <= p.score_rows && count < 65536 && first >= 0 && first + count <= p.shape.rows, "qsa_scores",
          "a workspace of the rows asked for (first, count, workspace rows, rows)",
          {first, count, p.score_rows, p.shape.rows});
  require(aligned16({p.index, p.cache.index_keys}), "qsa_scores",
          "index queries and index keys aligned to 16 bytes (first row, rows)", {first, count});
  if (count == 0 || p.max_complete <= p.shape.blocks) return;
  const unsigned runs = blocks_of(p.max_complete, kBlockKeys);
  const size_t query_bytes = p.shape.index_heads * kIndexDim * sizeof(float);
  if (count > kSpreadRows) {
    launch("qsa_scores", qsa_scores_prompt_kernel, dim3(runs, blocks_of(count, kPromptRows)), 256,
           kPromptRows * query_bytes, stream, p, first, count);
    return;
  }
  const dim3 grid(runs, static_cast<unsigned>(count));
  launch("qsa_scores", qsa_scores_kernel, grid, 256, query_bytes, stream, p, first);
}

void qsa_select(const QsaSelectParams& p, cudaStream_t stream) {
  check_qsa(p.shape, "qsa_select");
  const bool all = p.max_complete <= p.shape.blocks;  // nothing to compare
  require(all || p.score_rows > 0, "qsa_select", "a workspace of at least one row (complete blocks, workspace rows)",
          {p.max_complete, p.score_rows});
  const int64_t step = all ? std::max<int64_t>(p.shape.rows, 1) : std::min<int64_t>(p.score_rows, 65535);
  for (int64_t first = 0; first < p.shape.rows; first += step) {
    const int64_t count = std::min(step, p.shape.rows - first);
    if (!all) qsa_scores(p, first, count, stream);
    launch("qsa_select", qsa_select_kernel, static_cast<unsigned>(count), 1024, 0, stream, p, first);
  }
}

}  // namespace fnx::cuda
