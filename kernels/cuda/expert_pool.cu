#include "kernels/cuda/expert_pool.h"

#include <climits>

#include "kernels/cuda/device_math.cuh"

namespace fnx::cuda {

namespace {

constexpr int kPlanThreads = 512, kPlanWarps = kPlanThreads / 32;
constexpr int kMostExperts = 1024;
constexpr uint32_t kTouchWeight = 256;  // of the rule

// 64-bit words of PoolWords as the atomics take them.
using Word = unsigned long long;

struct PlanShared {
  int first[kMostExperts];                          // of each expert: its first choice
  int request[kMostExperts], misses[kMostExperts];  // in order
  int held[kMostExperts], was[kMostExperts];        // of each line: its expert, now and before the plan
  int next[kMostExperts];                           // of each line: the expert that fills it in this wave, or -1
  uint32_t count[kMostExperts];                     // of each line's expert
  uint64_t touched[kMostExperts];                   // of each line's expert
  uint8_t kept[kMostExperts];                       // of each line: its expert is protected
  int warps[kPlanWarps];
  Word evictions, placed_bytes, in_place, in_place_bytes;
};

// Calls f(i, place) for the i in [0, n) that `take(i)` names, places ascending from 0; returns their number.
template <class Take, class F>
__device__ __forceinline__ int compact(int* warps, int n, Take take, F f) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int base = 0;
  for (int start = 0; start < n; start += kPlanThreads) {
    const int i = start + static_cast<int>(threadIdx.x);
    const bool mine = i < n && take(i);
    const unsigned all = __ballot_sync(kFullWarp, mine);
    if (lane == 0) warps[warp] = __popc(all);
    __syncthreads();
    int before = base, total = 0;
#pragma unroll
    for (int w = 0; w < kPlanWarps; ++w) {
      if (w < warp) before += warps[w];
      total += warps[w];
    }
    if (mine) f(i, before + __popc(all & ((1u << lane) - 1)));
    base += total;
    __syncthreads();
  }
  return base;
}

__device__ __forceinline__ void serve(Exl3Expert& entry, const PooledExpert& expert, const std::byte* at) {
  entry.gate.trellis = reinterpret_cast<const uint16_t*>(at);
  entry.up.trellis = reinterpret_cast<const uint16_t*>(at + expert.up);
  entry.down.trellis = reinterpret_cast<const uint16_t*>(at + expert.down);
}

// One block. Only plans write a state, and other launches lie between two plans: what it holds is read early.
__global__ void __launch_bounds__(kPlanThreads, 1) plan_experts_kernel(PlanExpertsParams p) {
  __shared__ PlanShared s;
  const PoolState& t = p.state;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  for (int e = tid; e < t.experts; e += kPlanThreads) s.first[e] = INT_MAX;
  for (int l = tid; l < t.lines; l += kPlanThreads) s.held[l] = s.was[l] = t.expert_of[l], s.kept[l] = 0;
  if (tid == 0) s.evictions = s.placed_bytes = s.in_place = s.in_place_bytes = 0;
  const uint64_t clock = t.words->clock, since = t.words->since_decay;
  __syncthreads();
  wait_previous();

  const int k = static_cast<int>(p.k), choices = static_cast<int>(p.rows) * k;
  const auto choice = [&](int i) { return p.ids[int64_t{i / k} * p.columns + i % k]; };
  // The state's number of the i-th choice, -1 when it is none of its experts.
  const auto number = [&](int i) {
    const int e = choice(i) - static_cast<int>(p.first);
    return e >= 0 && e < t.experts ? e : -1;
  };
  for (int i = tid; i < choices; i += kPlanThreads) {
    if (const int id = choice(i); id >= 0 && id < t.all) atomicAdd(reinterpret_cast<Word*>(t.heat + id), Word{1});
    if (const int e = number(i); e >= 0) atomicMin(&s.first[e], i);
  }
  const uint64_t halvings = since / p.decay_touches;
  if (halvings > 0)
    for (int e = tid; e < t.experts; e += kPlanThreads) t.count[e] = halvings > 31 ? 0 : t.count[e] >> halvings;
  __syncthreads();
  const int distinct = compact(
      s.warps, choices,
      [&](int i) {
        const int e = number(i);
        return e >= 0 && s.first[e] == i;
      },
      [&](int i, int place) { s.request[place] = number(i); });
  for (int i = tid; i < distinct; i += kPlanThreads) {
    const int e = s.request[i];
    t.count[e] += kTouchWeight, t.touched[e] = clock + i + 1;
    if (const int l = t.line_of[e]; l >= 0) s.kept[l] = 1;
  }
  const int misses = compact(
      s.warps, distinct, [&](int i) { return t.line_of[s.request[i]] < 0; },
      [&](int i, int place) { s.misses[place] = s.request[i]; });
  for (int l = tid; l < t.lines; l += kPlanThreads)
    if (const int e = s.held[l]; e >= 0) s.count[l] = p.counts ? t.count[e] : 0, s.touched[l] = t.touched[e];
  __syncthreads();

  int waves = 0, kept = distinct - misses;
  for (int done = 0; distinct > 0;) {
    const int fills = min(t.lines - kept, misses - done);
    // A warp ranks a line among those that may be given up; the miss of that rank takes it.
    for (int l = warp; fills > 0 && l < t.lines; l += kPlanWarps) {
      int before = 0;
      if (!s.kept[l]) {
        const int held = s.held[l];
        for (int o = lane; o < t.lines; o += 32) {
          if (s.kept[o]) continue;
          const int other = s.held[o];
          bool less = o < l;
          if (held < 0 || other < 0)
            less = held < 0 && other < 0 ? less : other < 0;
          else if (s.count[o] != s.count[l])
            less = s.count[o] < s.count[l];
          else if (s.touched[o] != s.touched[l])
            less = s.touched[o] < s.touched[l];
          before += o != l && less;
        }
      }
      before = __reduce_add_sync(kFullWarp, before);
      if (lane == 0) s.next[l] = !s.kept[l] && before < fills ? s.misses[done + before] : -1;
    }
    __syncthreads();
    for (int l = tid; fills > 0 && l < t.lines; l += kPlanThreads) {
      const int e = s.next[l];
      if (e < 0) continue;
      if (const int old = s.held[l]; old >= 0) {
        t.line_of[old] = -1;
        atomicAdd(&s.evictions, Word{1});
      }
      s.held[l] = e, t.line_of[e] = l;
      s.count[l] = p.counts ? t.count[e] : 0, s.touched[l] = t.touched[e];
    }
    ++waves, done += fills;
    if (done == misses) break;
    for (int l = tid; l < t.lines; l += kPlanThreads) s.kept[l] = 0;
    kept = 0;
    __syncthreads();
  }
  __syncthreads();

  for (int i = tid; i < distinct; i += kPlanThreads)
    if (const int e = s.request[i]; t.line_of[e] < 0) {
      atomicAdd(&s.in_place, Word{1});
      atomicAdd(&s.in_place_bytes, static_cast<Word>(p.homes[e].bytes));
    }
  const int placed = compact(
      s.warps, t.lines, [&](int l) { return s.held[l] != s.was[l]; },
      [&](int l, int place) {
        const int e = s.held[l], old = s.was[l];
        t.fills[2 * place] = l, t.fills[2 * place + 1] = e;
        t.expert_of[l] = e;
        if (old >= 0) serve(p.table[old], p.homes[old], p.homes[old].home);
        serve(p.table[e], p.homes[e], p.lines + l * p.line_bytes);
        atomicAdd(&s.placed_bytes, static_cast<Word>(p.homes[e].bytes));
      });
  if (tid > 0) return;
  *t.fill_count = placed;
  PoolWords& w = *t.words;
  w.clock = clock + distinct, w.since_decay = since - halvings * p.decay_touches + distinct;
  w.requests += 1, w.waves += waves, w.touches += distinct, w.hits += distinct - misses, w.misses += misses;
  w.fills += misses, w.fills_by_kind[0] += misses, w.evictions += s.evictions;
  w.resident += misses - s.evictions;
  w.placed += placed, w.placed_bytes += s.placed_bytes;
  w.in_place += s.in_place, w.in_place_bytes += s.in_place_bytes;
}

// Enough loads on their way to fill the link several times over.
constexpr int kFillThreads = 256, kFillBlocks = 128, kFillLoads = 4;

// Grid: kFillBlocks. Every block copies its part of each expert.
__global__ void __launch_bounds__(kFillThreads) fill_planned_kernel(FillPlannedParams p) {
  constexpr int kTogether = 64;  // copies whose addresses are looked up at once
  __shared__ const uint4* from[kTogether];
  __shared__ uint4* to[kTogether];
  __shared__ int64_t words[kTogether];
  wait_previous();
  const int count = *p.state.fill_count;
  constexpr int64_t kStep = int64_t{kFillBlocks} * kFillThreads;
  const int64_t first = int64_t{blockIdx.x} * kFillThreads + threadIdx.x;
  Word copied = 0;
  for (int start = 0; start < count; start += kTogether) {
    const int some = min(kTogether, count - start);
    __syncthreads();
    if (threadIdx.x < some) {
      const int2 fill = reinterpret_cast<const int2*>(p.state.fills)[start + threadIdx.x];
      const PooledExpert& e = p.homes[fill.y];
      from[threadIdx.x] = reinterpret_cast<const uint4*>(e.home);
      to[threadIdx.x] = reinterpret_cast<uint4*>(p.lines + fill.x * p.line_bytes);
      words[threadIdx.x] = e.bytes / 16;
    }
    __syncthreads();
    for (int f = 0; f < some; ++f)
      for (int64_t i = first; i < words[f]; i += kFillLoads * kStep) {
        uint4 v[kFillLoads];
#pragma unroll
        for (int k = 0; k < kFillLoads; ++k)
          if (i + k * kStep < words[f]) v[k] = __ldcs(from[f] + i + k * kStep);
#pragma unroll
        for (int k = 0; k < kFillLoads; ++k)
          if (i + k * kStep < words[f]) to[f][i + k * kStep] = v[k], copied += 16;
      }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) copied += __shfl_xor_sync(kFullWarp, copied, d);
  if (threadIdx.x % 32 == 0 && copied > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->copied_bytes), copied);
}

void check_state(const char* kernel, const PoolState& s, const void* lines, int64_t line_bytes) {
  require(s.lines >= 1 && s.lines <= s.experts && s.experts <= kMostExperts, kernel,
          "1 to 1024 experts and up to a line each (lines, experts)", {s.lines, s.experts});
  require(line_bytes > 0 && line_bytes % 16 == 0 && aligned16({lines}), kernel,
          "lines of a multiple of 16 bytes that begin at one (bytes)", {line_bytes});
  require(reinterpret_cast<uintptr_t>(s.words) % 8 == 0, kernel, "a state at a multiple of 8 bytes (address modulo 8)",
          {static_cast<int64_t>(reinterpret_cast<uintptr_t>(s.words) % 8)});
}

}  // namespace

void plan_experts(const PlanExpertsParams& p, cudaStream_t stream) {
  check_state("plan_experts", p.state, p.lines, p.line_bytes);
  require(p.rows >= 0 && p.k >= 1 && p.k <= p.columns && p.rows * p.k <= 65536 && p.decay_touches >= 1, "plan_experts",
          "1 to all of a row's columns, up to 65536 choices and a decay from 1 touch on (rows, k, columns, touches)",
          {p.rows, p.k, p.columns, p.decay_touches});
  launch("plan_experts", plan_experts_kernel, 1, kPlanThreads, 0, stream, p);
}

void fill_planned(const FillPlannedParams& p, cudaStream_t stream) {
  check_state("fill_planned", p.state, p.lines, p.line_bytes);
  launch("fill_planned", fill_planned_kernel, kFillBlocks, kFillThreads, 0, stream, p);
}

}  // namespace fnx::cuda
