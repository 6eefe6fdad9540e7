#include <algorithm>

#include "kernels/cuda/qsa_device.cuh"

namespace fnx::cuda {

namespace {

constexpr int kBinBits = 11, kBins = 1 << kBinBits;
constexpr int kBatch = 8;      // highest ranks in flight a thread
constexpr int kGather = 1024;  // candidates for the last place that are compared with one another

// One block a row: finds the rank of the last selected block digit by digit, then writes the selected in order. A
// thread holds eight neighbouring blocks: all of a row of up to 8192; of a longer one those eights whose highest rank
// is high enough, or eights in turn where too many are.
__global__ void __launch_bounds__(1024) qsa_select_kernel(QsaSelectParams p, int64_t first) {
  __shared__ uint32_t bins[2][kBins];
  __shared__ uint64_t gathered[kGather];
  __shared__ int gathered_count;
  __shared__ int warp_sums[32], warp_taken[32], warp_above[32], warp_equal[32];
  __shared__ uint32_t warp_low[32], warp_high[32];
  __shared__ uint32_t found_bin;
  __shared__ int found_want, found_count;
  const QsaShape& s = p.shape;
  const int r = static_cast<int>(first + blockIdx.x), blocks = static_cast<int>(s.blocks), tid = threadIdx.x;
  const LaneRow l = find_lane(s.lanes, r);
  for (int i = tid; i < 2 * kBins; i += 1024) bins[0][i] = 0;
  if (tid == 0) gathered_count = found_count = 0;
  wait_previous();
  if (l.slot < 0) return;
  const int complete = (l.start + r - l.first_row + 1) / static_cast<int>(s.ratio);
  int32_t* selected = p.selected + int64_t{r} * blocks;
  if (complete <= blocks) {
    for (int i = tid; i < blocks; i += 1024) selected[i] = i < complete ? i : -1;
    return;
  }
  const float* scores = row_scores(p, blockIdx.x);
  const int lane = tid % 32, warp = tid / 32, eights = (complete + kEight - 1) / kEight;
  const unsigned below_me = (1u << lane) - 1;
  int want = blocks, turn = 0;
  uint32_t low = UINT32_MAX, high = 0;
  const auto shift_of = [&] { return max(0, 32 - __clz(high - low) - kBinBits); };
  // Counts from the highest bin down, two bins a thread, and finds the bin in which the count reaches `want`.
  const auto find_bin = [&] {
    __syncthreads();
    const int top = kBins - 1 - 2 * tid;
    const int c0 = static_cast<int>(bins[turn][top]), c1 = static_cast<int>(bins[turn][top - 1]);
    turn ^= 1;
    bins[turn][top] = bins[turn][top - 1] = 0;
    const int sum = __reduce_add_sync(kFullWarp, c0 + c1);
    if (lane == 0) warp_sums[warp] = sum;
    __syncthreads();
    int before = before_warp(warp_sums);
    if (before < want && want <= before + sum) {
      int here = c0 + c1;
#pragma unroll
      for (int d = 1; d < 32; d *= 2) {
        const int v = __shfl_up_sync(kFullWarp, here, d);
        if (lane >= d) here += v;
      }
      before += here - c0 - c1;
      if (before < want && want <= before + c0) found_bin = top, found_want = want - before, found_count = c0;
      if (before + c0 < want && want <= before + c0 + c1)
        found_bin = top - 1, found_want = want - before - c0, found_count = c1;
    }
    __syncthreads();
  };
  // Makes low and high the row's, from each thread's; then raises low by the threads' highest ranks: as many blocks as
  // are wanted lie in the bin of the last of these or above. Whether there were as many above the lowest rank.
  const auto bound = [&] {
    const uint32_t mine = high;  // 0 where this thread has no block, which is below all but NaN
    low = __reduce_min_sync(kFullWarp, low), high = __reduce_max_sync(kFullWarp, high);
    if (lane == 0) warp_low[warp] = low, warp_high[warp] = high;
    __syncthreads();
    low = __reduce_min_sync(kFullWarp, warp_low[lane]), high = __reduce_max_sync(kFullWarp, warp_high[lane]);
    if (low == high) return false;
    const int shift = shift_of();
    if (mine > low) atomicAdd(bins[turn] + ((mine - low) >> shift), 1u);
    find_bin();
    if (found_count == 0) return false;
    low += found_bin << shift;
    return true;
  };

  uint32_t rank[kEight];  // 0 where there is no block
  const auto load = [&](int eight) {
#pragma unroll
    for (int j = 0; j < kEight; j += 4) {
      const int i = eight * kEight + j;
      const float4 v = i < complete ? *reinterpret_cast<const float4*>(scores + i) : float4{};
      rank[j] = rank_of(v.x), rank[j + 1] = rank_of(v.y), rank[j + 2] = rank_of(v.z), rank[j + 3] = rank_of(v.w);
#pragma unroll
      for (int k = j; k < j + 4; ++k)
        if (eight * kEight + k >= complete) rank[k] = 0;
    }
  };
  int mine = tid, turns = 1;
  bool bounded;
  const int run = (eights + 1023) / 1024 * 32, from = warp * run;
  if (eights <= 1024) {
    load(mine);
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      if (mine * kEight + j < complete) low = min(low, rank[j]);
      high = max(high, rank[j]);
    }
    bounded = bound() || complete <= kGather;
  } else {
    const uint32_t* tops = row_tops(p, blockIdx.x);
    uint32_t held[kBatch];
    bool loaded = false;
    const auto each_top = [&](auto fn) {  // each warp takes a run of eights; one of one batch stays in registers
      for (int b = from; b < from + run; b += 32 * kBatch) {
        if (!loaded) {
#pragma unroll
          for (int j = 0; j < kBatch; ++j) {
            const int i = b + j * 32 + lane;
            held[j] = i < eights && i < from + run ? tops[i] : 0;
          }
          loaded = run <= 32 * kBatch;
        }
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const int i = b + j * 32 + lane;
          fn(held[j], i < from + run ? i : eights);
        }
      }
    };
    each_top([&](uint32_t top, int i) {
      if (i < eights) low = min(low, top), high = max(high, top);
    });
    bounded = bound();
    if (!bounded) low = 0;
    int count = 0;
    each_top([&](uint32_t top, int) { count += top >= low; });
    count = __reduce_add_sync(kFullWarp, count);
    if (lane == 0) warp_taken[warp] = count;
    __syncthreads();
    count = __reduce_add_sync(kFullWarp, warp_taken[lane]);
    if (count <= 1024) {
      int* list = reinterpret_cast<int*>(gathered);
      int place = before_warp(warp_taken);
      each_top([&](uint32_t top, int i) {
        const unsigned taken = __ballot_sync(kFullWarp, top >= low);
        if (top >= low) list[place + __popc(taken & below_me)] = i;
        place += __popc(taken);
      });
      __syncthreads();
      mine = tid < count ? list[tid] : eights;
      load(mine);
    } else {
      turns = run / 32;
    }
  }
  // Few enough that reach the bound: each thread takes one of them, in order.
  uint64_t single = ~static_cast<uint32_t>(complete);  // its rank, then the complement of the block
  int singles = 0;
  if (turns == 1 && bounded) {
    int n = 0;
#pragma unroll
    for (int j = 0; j < kEight; ++j) n += mine * kEight + j < complete && rank[j] >= low;
    int place = n;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(kFullWarp, place, d);
      if (lane >= d) place += v;
    }
    if (lane == 31) warp_taken[warp] = place;
    __syncthreads();
    place += before_warp(warp_taken) - n;
    singles = __reduce_add_sync(kFullWarp, warp_taken[lane]);
    if (singles <= kGather) {
#pragma unroll
      for (int j = 0; j < kEight; ++j)
        if (mine * kEight + j < complete && rank[j] >= low)
          gathered[place++] = uint64_t{rank[j]} << 32 | ~static_cast<uint32_t>(mine * kEight + j);
      __syncthreads();
      if (tid < singles) single = gathered[tid];
    } else {
      singles = 0;
    }
  }
  const auto each_eight = [&](auto fn) {  // with its ranks in `rank`
    for (int t = 0; t < turns; ++t) {
      const int eight = turns == 1 ? mine : from + t * 32 + lane;
      if (turns > 1) load(eight);
      fn(eight * kEight);
    }
  };
  const auto each = [&](auto fn) {  // fn(rank, block)
    if (singles > 0) return fn(static_cast<uint32_t>(single >> 32), static_cast<int>(~static_cast<uint32_t>(single)));
    each_eight([&](int at) {
#pragma unroll
      for (int j = 0; j < kEight; ++j) fn(rank[j], at + j);
    });
  };
  while (low < high) {
    const int shift = shift_of();
    each([&](uint32_t r, int i) {
      if (i < complete && r >= low && r <= high) atomicAdd(bins[turn] + ((r - low) >> shift), 1u);
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
  }
  const uint32_t last = low;  // the rank of the last selected block; `want` blocks of it are selected
  int above = 0, equal = 0;
  if (singles > 0) {
    const uint32_t mine = static_cast<uint32_t>(single >> 32);
    const bool tied = tid < singles && mine == last;
    const unsigned a = __ballot_sync(kFullWarp, mine > last), e = __ballot_sync(kFullWarp, tied);
    if (lane == 0) warp_above[warp] = __popc(a), warp_equal[warp] = __popc(e);
    __syncthreads();
    above = before_warp(warp_above) + __popc(a & below_me), equal = before_warp(warp_equal) + __popc(e & below_me);
    if (mine > last || (tied && equal < want))
      selected[above + min(equal, want)] = static_cast<int>(~static_cast<uint32_t>(single));
    return;
  }
  each([&](uint32_t r, int i) { above += r > last, equal += i < complete && r == last; });
  above = __reduce_add_sync(kFullWarp, above), equal = __reduce_add_sync(kFullWarp, equal);
  if (lane == 0) warp_sums[warp] = above, warp_equal[warp] = equal;
  __syncthreads();
  above = before_warp(warp_sums), equal = before_warp(warp_equal);
  each_eight([&](int at) {
    int a = 0, e = 0;
#pragma unroll
    for (int j = 0; j < kEight; ++j) a += rank[j] > last, e += at + j < complete && rank[j] == last;
    int my_above = above - a, my_equal = equal - e;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const int va = __shfl_up_sync(kFullWarp, a, d), ve = __shfl_up_sync(kFullWarp, e, d);
      if (lane >= d) a += va, e += ve;
    }
    my_above += a, my_equal += e;
#pragma unroll
    for (int j = 0; j < kEight; ++j) {
      const bool higher = rank[j] > last, tied = at + j < complete && rank[j] == last;
      if (higher || (tied && my_equal < want)) selected[my_above + min(my_equal, want)] = at + j;
      my_above += higher, my_equal += tied;
    }
    above += __shfl_sync(kFullWarp, a, 31), equal += __shfl_sync(kFullWarp, e, 31);
  });
}

constexpr int kEach = 64, kWarpBlocks = 32 * kEach;  // blocks of a lane and of a warp that selects for a prompt
constexpr int kSelectRows = 4;                       // of a block where a row takes one warp

// The same selection for prompts: kWarps warps hold a row's ranks in registers, block 32 j + i of a warp's run in lane
// i, and find the rank of the last selected bit by bit.
template <int kWarps>
__device__ __forceinline__ void select_prompt(const QsaSelectParams& p, int64_t first, int count) {
  __shared__ int parts[2][kWarps];
  __shared__ uint32_t bounds[2][kWarps];
  wait_previous();
  const QsaShape& s = p.shape;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, part = kWarps == 1 ? 0 : warp;
  const int at = kWarps == 1 ? blockIdx.x * kSelectRows + warp : blockIdx.x;
  if (at >= count) return;
  const int r = static_cast<int>(first) + at, blocks = static_cast<int>(s.blocks);
  const LaneRow l = find_lane(s.lanes, r);
  if (l.slot < 0) return;
  const int complete = (l.start + r - l.first_row + 1) / static_cast<int>(s.ratio);
  int32_t* selected = p.selected + int64_t{r} * blocks;
  if (complete <= blocks) {
    for (int i = part * 32 + lane; i < blocks; i += 32 * kWarps) selected[i] = i < complete ? i : -1;
    return;
  }
  // Adds over the row's warps, and over those before this one.
  int turn = 0;
  const auto add_warps = [&](int v, int& before) {
    before = 0;
    if constexpr (kWarps > 1) {
      if (lane == 0) parts[turn][warp] = v;
      __syncthreads();
      v = lane < kWarps ? parts[turn][lane] : 0;
      before = __reduce_add_sync(kFullWarp, lane < warp ? v : 0);
      v = __reduce_add_sync(kFullWarp, v);
      turn ^= 1;
    }
    return v;
  };
  const int from = part * kWarpBlocks, used = (min(complete - from, kWarpBlocks) + 31) / 32;
  const float* scores = row_scores(p, at) + from;
  uint32_t rank[kEach];  // 0 also where there is no block, which only loses to blocks before it
  uint32_t low = UINT32_MAX, high = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const bool here = from + j * 32 + lane < complete;
    rank[j] = here ? rank_of(scores[j * 32 + lane]) : 0;
    if (here) low = min(low, rank[j]);
    high = max(high, rank[j]);
  }
  low = __reduce_min_sync(kFullWarp, low), high = __reduce_max_sync(kFullWarp, high);
  if constexpr (kWarps > 1) {
    if (lane == 0) bounds[0][warp] = low, bounds[1][warp] = high;
    __syncthreads();
    low = __reduce_min_sync(kFullWarp, lane < kWarps ? bounds[0][lane] : UINT32_MAX);
    high = __reduce_max_sync(kFullWarp, lane < kWarps ? bounds[1][lane] : 0);
  }
  constexpr int kGroup = 16;  // ranks between looks at whether there are more
  const auto each = [&](auto fn) {
#pragma unroll
    for (int j0 = 0; j0 < kEach; j0 += kGroup) {
      if (j0 >= used) break;
#pragma unroll
      for (int j = j0; j < j0 + kGroup; ++j) fn(rank[j], j);
    }
  };
  const auto count_from = [&](uint32_t bound, int& before) {
    int n = 0;
    each([&](uint32_t rank_j, int) { n += (bound - 1 - rank_j) >> 31; });  // ranks are below 2^31
    return add_warps(__reduce_add_sync(kFullWarp, n), before);
  };
  int before = 0, reached = 0;
  uint32_t last = low;  // the highest rank so far that as many as are wanted reach
  if (low < high) {
    const int bit = 31 - __clz(low ^ high);
    last = high >> bit >> 1 << bit << 1;  // what all have in common
    for (int b = bit; b >= 0 && reached != blocks; --b) {
      const uint32_t bound = last | 1u << b;
      const int n = count_from(bound, before);
      if (n >= blocks) last = bound, reached = n;
    }
  }
  const uint32_t least = reached == blocks ? last : last + 1;  // of those that no tie decides
  int place, equal = 0;
  const int want = blocks - count_from(least, place);
  if (kWarps > 1 && want > 0) {
    int n = 0;
    each([&](uint32_t rank_j, int) { n += rank_j == last; });
    add_warps(__reduce_add_sync(kFullWarp, n), equal);
  }
  const unsigned below_me = (1u << lane) - 1;
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const unsigned a = __ballot_sync(kFullWarp, rank[j] >= least), e = __ballot_sync(kFullWarp, rank[j] == last);
    const int my_above = place + __popc(a & below_me), my_equal = equal + __popc(e & below_me);
    if (rank[j] >= least || (rank[j] == last && my_equal < want))
      selected[my_above + min(my_equal, want)] = from + j * 32 + lane;
    place += __popc(a), equal += __popc(e);
  }
}

__global__ void __launch_bounds__(32 * kSelectRows)
    qsa_select_warp_kernel(QsaSelectParams p, int64_t first, int count) {
  select_prompt<1>(p, first, count);
}
template <int kWarps>
__global__ void __launch_bounds__(32 * kWarps) qsa_select_warps_kernel(QsaSelectParams p, int64_t first, int count) {
  select_prompt<kWarps>(p, first, count);
}

void launch_select(const QsaSelectParams& p, int64_t first, int64_t count, cudaStream_t stream) {
  const auto run = [&](auto kernel, unsigned blocks, unsigned threads) {
    launch("qsa_select", kernel, blocks, threads, 0, stream, p, first, static_cast<int>(count));
  };
  const auto rows = static_cast<unsigned>(count);
  static_assert(kMostWarpBlocks == 16 * kWarpBlocks);
  if (!selects_by_warps(p, count))
    launch("qsa_select", qsa_select_kernel, rows, 1024, 0, stream, p, first);
  else if (p.max_complete <= kWarpBlocks)
    run(qsa_select_warp_kernel, blocks_of(count, kSelectRows), 32 * kSelectRows);
  else if (p.max_complete <= 4 * kWarpBlocks)
    run(qsa_select_warps_kernel<4>, rows, 32 * 4);
  else
    run(qsa_select_warps_kernel<16>, rows, 32 * 16);
}

}  // namespace

void qsa_select(const QsaSelectParams& p, cudaStream_t stream) {
  check_qsa(p.shape, "qsa_select");
  const bool all = p.max_complete <= p.shape.blocks;  // nothing to compare
  require(all || p.score_rows > 0, "qsa_select", "a workspace of at least one row (complete blocks, workspace rows)",
          {p.max_complete, p.score_rows});
  const int64_t step = all ? std::max<int64_t>(p.shape.rows, 1) : std::min<int64_t>(p.score_rows, 65535);
  for (int64_t first = 0; first < p.shape.rows; first += step) {
    const int64_t count = std::min(step, p.shape.rows - first);
    if (!all) qsa_scores(p, first, count, stream);
    launch_select(p, first, count, stream);
  }
}

}  // namespace fnx::cuda
