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
  if (tid == 0 && p.foreseen.ids != nullptr) *p.foreseen.stage.ended = 1;

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

// The place of the state's expert among those foreseen, -1 without one.
__device__ __forceinline__ int place_of(const ForeseenExperts& f, int expert) {
  for (int i = 0; i < f.count; ++i)
    if (f.ids[i] - f.first == expert) return i;
  return -1;
}

// Grid: kFillBlocks. Every block copies its part of each expert.
__global__ void __launch_bounds__(kFillThreads) fill_planned_kernel(FillPlannedParams p) {
  constexpr int kTogether = 64;  // copies whose addresses are looked up at once
  __shared__ const uint4* from[kTogether];
  __shared__ uint4* to[kTogether];
  __shared__ int64_t words[kTogether];
  __shared__ const uint4* staged[kTogether];
  __shared__ const uint8_t* there[kTogether];  // of each piece; null: the stage has none of the expert
  constexpr int64_t kPieceWords = PoolStage::kPiece / 16;
  wait_previous();
  const int count = *p.state.fill_count;
  constexpr int64_t kStep = int64_t{kFillBlocks} * kFillThreads;
  const int64_t first = int64_t{blockIdx.x} * kFillThreads + threadIdx.x;
  Word copied = 0, taken = 0;
  for (int start = 0; start < count; start += kTogether) {
    const int some = min(kTogether, count - start);
    __syncthreads();
    if (threadIdx.x < some) {
      const int2 fill = reinterpret_cast<const int2*>(p.state.fills)[start + threadIdx.x];
      const PooledExpert& e = p.homes[fill.y];
      from[threadIdx.x] = reinterpret_cast<const uint4*>(e.home);
      to[threadIdx.x] = reinterpret_cast<uint4*>(p.lines + fill.x * p.line_bytes);
      words[threadIdx.x] = e.bytes / 16;
      const PoolStage& stage = p.foreseen.stage;
      const int place = place_of(p.foreseen, fill.y);
      staged[threadIdx.x] = reinterpret_cast<const uint4*>(stage.lines + place * stage.line_bytes);
      there[threadIdx.x] = place < 0 ? nullptr : stage.there + place * stage.pieces;
    }
    __syncthreads();
    for (int f = 0; f < some; ++f)
      for (int64_t i = first; i < words[f]; i += kFillLoads * kStep) {
        uint4 v[kFillLoads];
#pragma unroll
        for (int k = 0; k < kFillLoads; ++k) {
          const int64_t at = i + k * kStep;
          if (at >= words[f]) continue;
          const bool near = there[f] != nullptr && there[f][at / kPieceWords] != 0;
          v[k] = __ldcs((near ? staged[f] : from[f]) + at);
          taken += near ? 16 : 0;
        }
#pragma unroll
        for (int k = 0; k < kFillLoads; ++k)
          if (i + k * kStep < words[f]) to[f][i + k * kStep] = v[k], copied += 16;
      }
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) {
    copied += __shfl_xor_sync(kFullWarp, copied, d);
    taken += __shfl_xor_sync(kFullWarp, taken, d);
  }
  if (threadIdx.x % 32 == 0 && copied > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->copied_bytes), copied);
  if (threadIdx.x % 32 == 0 && taken > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->taken_bytes), taken);
  if (blockIdx.x == 0 && threadIdx.x == 0 && p.foreseen.ids != nullptr) *p.foreseen.stage.ended = 0;
}

// What is on its way when a plan ends the copies is little; it fills the link all the same.
constexpr int kAheadBlocks = 16;

// Grid: kAheadBlocks. Block b copies pieces b, b + kAheadBlocks, .. of each place.
__global__ void __launch_bounds__(kFillThreads) fill_foreseen_kernel(FillForeseenParams p) {
  constexpr int kPieceLoads = PoolStage::kPiece / 16 / kFillThreads;
  __shared__ const uint4* from[PoolStage::kPlaces];
  __shared__ int64_t words[PoolStage::kPlaces];
  const ForeseenExperts& f = p.foreseen;
  const int tid = threadIdx.x;
  wait_previous();
  // Lines may change meanwhile: this only decides what is worth a copy.
  if (tid < f.count) {
    const int e = f.ids[tid] - f.first;
    const bool lacks = e >= 0 && e < p.state.experts && place_of(f, e) == tid && p.state.line_of[e] < 0;
    from[tid] = lacks ? reinterpret_cast<const uint4*>(p.homes[e].home) : nullptr;
    words[tid] = lacks ? p.homes[e].bytes / 16 : 0;
  }
  __syncthreads();
  const int each = (static_cast<int>(f.stage.pieces) + kAheadBlocks - 1) / kAheadBlocks, all = f.count * each;
  const auto piece = [&](int i) { return i % each * kAheadBlocks + static_cast<int>(blockIdx.x); };
  const auto mark = [&](int i, bool there) {
    if (piece(i) < f.stage.pieces) f.stage.there[i / each * f.stage.pieces + piece(i)] = there;
  };
  Word copied = 0, experts = 0;
  for (int i = 0; i < all; ++i) {
    const int place = i / each;
    const int64_t first = int64_t{piece(i)} * (PoolStage::kPiece / 16), left = words[place] - first;
    if (left > 0 && __syncthreads_or(tid == 0 && *static_cast<volatile int32_t*>(f.stage.ended) != 0)) {
      for (int rest = i + tid; rest < all; rest += kFillThreads) mark(rest, false);
      break;
    }
    uint4 v[kPieceLoads];
#pragma unroll
    for (int k = 0; k < kPieceLoads; ++k)
      if (tid + k * kFillThreads < left) v[k] = __ldcs(from[place] + first + tid + k * kFillThreads);
#pragma unroll
    for (int k = 0; k < kPieceLoads; ++k)
      if (tid + k * kFillThreads < left)
        reinterpret_cast<uint4*>(f.stage.lines + place * f.stage.line_bytes)[first + tid + k * kFillThreads] = v[k];
    if (tid > 0) continue;
    mark(i, left > 0);
    if (left > 0) copied += 16 * (left < PoolStage::kPiece / 16 ? left : PoolStage::kPiece / 16), experts += first == 0;
  }
  if (copied > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->ahead_bytes), copied);
  if (experts > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->ahead), experts);
}

void check_state(const char* kernel, const PoolState& s, const void* lines, int64_t line_bytes) {
  require(s.lines >= 1 && s.lines <= s.experts && s.experts <= kMostExperts, kernel,
          "1 to 1024 experts and up to a line each (lines, experts)", {s.lines, s.experts});
  require(line_bytes > 0 && line_bytes % 16 == 0 && aligned16({lines}), kernel,
          "lines of a multiple of 16 bytes that begin at one (bytes)", {line_bytes});
  require(reinterpret_cast<uintptr_t>(s.words) % 8 == 0, kernel, "a state at a multiple of 8 bytes (address modulo 8)",
          {static_cast<int64_t>(reinterpret_cast<uintptr_t>(s.words) % 8)});
}

void check_foreseen(const char* kernel, const ForeseenExperts& f) {
  require(f.count >= 0 && f.count <= PoolStage::kPlaces, kernel, "up to 16 experts foreseen", {f.count});
  require(f.ids == nullptr || (f.stage.line_bytes > 0 && f.stage.line_bytes % 16 == 0 && aligned16({f.stage.lines})),
          kernel, "a stage of lines of a multiple of 16 bytes that begins at one (bytes)", {f.stage.line_bytes});
}

}  // namespace

void plan_experts(const PlanExpertsParams& p, cudaStream_t stream) {
  check_state("plan_experts", p.state, p.lines, p.line_bytes);
  require(p.rows >= 0 && p.k >= 1 && p.k <= p.columns && p.rows * p.k <= 65536 && p.decay_touches >= 1, "plan_experts",
          "1 to all of a row's columns, up to 65536 choices and a decay from 1 touch on (rows, k, columns, touches)",
          {p.rows, p.k, p.columns, p.decay_touches});
  check_foreseen("plan_experts", p.foreseen);
  launch("plan_experts", plan_experts_kernel, 1, kPlanThreads, 0, stream, p);
}

void fill_planned(const FillPlannedParams& p, cudaStream_t stream) {
  check_state("fill_planned", p.state, p.lines, p.line_bytes);
  check_foreseen("fill_planned", p.foreseen);
  launch("fill_planned", fill_planned_kernel, kFillBlocks, kFillThreads, 0, stream, p);
}

void fill_foreseen(const FillForeseenParams& p, cudaStream_t stream) {
  check_state("fill_foreseen", p.state, p.foreseen.stage.lines, p.foreseen.stage.line_bytes);
  check_foreseen("fill_foreseen", p.foreseen);
  launch("fill_foreseen", fill_foreseen_kernel, kAheadBlocks, kFillThreads, 0, stream, p);
}

}  // namespace fnx::cuda
