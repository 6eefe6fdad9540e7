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
  int first[kMostExperts], line_of[kMostExperts];   // of each expert: its first choice, its line
  int request[kMostExperts], misses[kMostExperts];  // in order
  int held[kMostExperts], was[kMostExperts];        // of each line: its expert, now and before the plan
  int next[kMostExperts];                           // of each line: the expert that fills it in this wave, or -1
  uint32_t count[kMostExperts];                     // of each line's expert
  uint64_t touched[kMostExperts];                   // of each line's expert
  uint8_t kept[kMostExperts];                       // of each line: its expert is protected
  int warps[kPlanWarps];
  int staged[PoolStage::kPlaces];  // of each place of the stage: its expert, or -1
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

// The first of so many of the stage's places that is the expert's, -1 without one.
template <int kPlaces>
__device__ __forceinline__ int place_of(const int* staged, int expert) {
  int place = -1;
#pragma unroll
  for (int i = kPlaces - 1; i >= 0; --i)
    if (staged[i] == expert) place = i;
  return place;
}

// Of one warp: orders the misses among the first choices. A request beyond the lines may drive its own misses out
// again: nothing is ordered then.
template <class Number>
__device__ __forceinline__ void give_order(StageOrder& order, int lines, PlanShared& s, int choices, Number number) {
  const int lane = threadIdx.x % 32;
  // The state's number of the choice at i where it is the expert's first one, else -1.
  const auto first_choice = [&](int i) {
    const int e = i < choices ? number(i) : -1;
    return e >= 0 && s.first[e] == i ? e : -1;
  };
  int distinct = 0;
  for (int start = 0; start < choices; start += 32)
    distinct += __popc(__ballot_sync(kFullWarp, first_choice(start + lane) >= 0));
  int others = 0;
  unsigned places = 0;
  for (int start = 0; start < choices && distinct <= lines; start += 32) {
    const int e = first_choice(start + lane);
    const bool missed = e >= 0 && s.line_of[e] < 0;
    const int place = missed ? place_of<PoolStage::kForeseen>(s.staged, e) : -1;  // the others are written here
    if (place >= 0) places |= 1u << place;
    const unsigned other = __ballot_sync(kFullWarp, missed && place < 0);
    const int at = others + __popc(other & ((1u << lane) - 1));
    if (missed && place < 0 && at < StageOrder::kMost) order.experts[at] = e, s.staged[StageOrder::kForeseen + at] = e;
    others += __popc(other);
  }
  places = __reduce_or_sync(kFullWarp, places);
  __syncwarp();
  if (lane > 0) return;
  order.places = places, order.count = min(others, StageOrder::kMost);
  order.guessed = atomicExch(&order.drawn, StageOrder::kClosed);
  order.go = 1;  // a go that gave up waiting may have come before the order was cleared
  __threadfence();
  *static_cast<volatile int32_t*>(&order.given) = 1;
}

// Of one warp, lane i for place i of the stage: what the guess brought of it, and where the order's pieces of it lie
// among all of them.
struct OrderedPieces {
  int from, begin, count;
};
__device__ __forceinline__ OrderedPieces ordered_pieces(const volatile StageOrder& order, uint32_t lacking,
                                                        int pieces) {
  const int lane = threadIdx.x % 32, other = lane - StageOrder::kForeseen;
  const uint32_t places = order.places;
  const int count = order.count, guessed = static_cast<int>(order.guessed);
  const int before = __popc(lacking & ((1u << lane) - 1)) * pieces;
  OrderedPieces p{0, 0, 0};
  if (other < 0 && (lacking >> lane & 1) != 0) p.from = min(max(guessed - before, 0), pieces);
  if (other < 0 ? (places >> lane & 1) != 0 : other < count) p.count = pieces - p.from;
  p.begin = p.count;
#pragma unroll
  for (int d = 1; d < 32; d *= 2) {
    const int below = __shfl_up_sync(kFullWarp, p.begin, d);
    if (lane >= d) p.begin += below;
  }
  p.begin -= p.count;
  return p;
}

// One block. Only plans write a state, and other launches lie between two plans: what it holds is read early.
__global__ void __launch_bounds__(kPlanThreads, 1) plan_experts_kernel(PlanExpertsParams p) {
  __shared__ PlanShared s;
  const PoolState& t = p.state;
  const int tid = threadIdx.x, lane = tid % 32, warp = tid / 32;
  const ForeseenExperts& f = p.foreseen;
  const uint64_t clock = t.words->clock, since = t.words->since_decay, halvings = since / p.decay_touches;
  for (int e = tid; e < t.experts; e += kPlanThreads) s.first[e] = INT_MAX, s.line_of[e] = t.line_of[e];
  for (int l = tid; l < t.lines; l += kPlanThreads) {
    const int e = t.expert_of[l];
    s.held[l] = s.was[l] = e, s.kept[l] = 0;
    if (e < 0) continue;
    s.count[l] = !p.counts || halvings > 31 ? 0 : t.count[e] >> halvings;
    s.touched[l] = t.touched[e];
  }
  if (tid < PoolStage::kPlaces) s.staged[tid] = tid < f.count ? f.ids[tid] - f.first : -1;
  if (tid == 0) s.evictions = s.placed_bytes = s.in_place = s.in_place_bytes = 0;
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
  if (halvings > 0)
    for (int e = tid; e < t.experts; e += kPlanThreads) t.count[e] = halvings > 31 ? 0 : t.count[e] >> halvings;
  __syncthreads();
  if (f.ids != nullptr && warp == 0) give_order(*f.stage.order, t.lines, s, choices, number);
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
    if (const int l = s.line_of[e]; l >= 0) {
      s.kept[l] = 1, s.touched[l] = clock + i + 1;
      if (p.counts) s.count[l] += kTouchWeight;
    }
  }
  const int misses = compact(
      s.warps, distinct, [&](int i) { return s.line_of[s.request[i]] < 0; },
      [&](int i, int place) { s.misses[place] = s.request[i]; });
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
        t.line_of[old] = s.line_of[old] = -1;
        atomicAdd(&s.evictions, Word{1});
      }
      s.held[l] = e, t.line_of[e] = s.line_of[e] = l;
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
    if (const int e = s.request[i]; s.line_of[e] < 0) {
      atomicAdd(&s.in_place, Word{1});
      atomicAdd(&s.in_place_bytes, static_cast<Word>(p.homes[e].bytes));
    }
  const int placed = compact(
      s.warps, t.lines, [&](int l) { return s.held[l] != s.was[l]; },
      [&](int l, int place) {
        const int e = s.held[l], old = s.was[l];
        const int staged = place_of<PoolStage::kPlaces>(s.staged, e);
        t.fills[place] = {l, e, staged};
        t.expert_of[l] = e;
        if (old >= 0) serve(p.table[old], p.homes[old], p.homes[old].home);
        serve(p.table[e], p.homes[e],
              staged < 0 ? p.lines + l * p.line_bytes : f.stage.lines + staged * f.stage.line_bytes);
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

constexpr int kFillThreads = 256, kTogether = 64;
constexpr int kFillBlocks = 132, kSettleBlocks = 66;  // loads enough to fill the link; what computing can spare

// Copies that blocks make together: of each the words, and the pieces at its head that are there.
struct Copies {
  const std::byte* from[kTogether];
  std::byte* to[kTogether];
  int words[kTogether], there[kTogether];
};

// Blocks take the pieces of the first `count` copies in turn, several at once; moved(which, bytes) of each.
template <class Moved>
__device__ __forceinline__ void copy_pieces(const Copies& c, int count, int pieces, Moved moved) {
  constexpr int kPieceWords = PoolStage::kPiece / 16, kLoads = kPieceWords / kFillThreads, kPieces = 4 / kLoads;
  static_assert(kLoads * kFillThreads == kPieceWords);
  struct Piece {
    bool here;
    int which, first;  // copy; word of this thread
  };
  const int tid = threadIdx.x, blocks = static_cast<int>(gridDim.x);
  for (int i = blockIdx.x; i < count * pieces; i += kPieces * blocks) {
    uint4 v[kPieces][kLoads];
    const auto piece_of = [&](int j) {
      const int at = i + j * blocks, which = at / pieces, piece = at % pieces;
      return Piece{at < count * pieces && piece >= c.there[which], which, piece * kPieceWords + tid};
    };
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const auto [here, which, first] = piece_of(j);
      if (!here) continue;
      const auto* from = reinterpret_cast<const uint4*>(c.from[which]) + first;
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (first + k * kFillThreads < c.words[which]) v[j][k] = __ldcs(from + k * kFillThreads);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const auto [here, which, first] = piece_of(j);
      if (!here) continue;
      auto* to = reinterpret_cast<uint4*>(c.to[which]) + first;
#pragma unroll
      for (int k = 0; k < kLoads; ++k)
        if (first + k * kFillThreads < c.words[which]) to[k * kFillThreads] = v[j][k];
      moved(which, 16 * max(min(kPieceWords, c.words[which] - (first - tid)), 0));
    }
  }
}

// Grid: kFillBlocks. Mostly everything is there, and nothing but that is read.
__global__ void __launch_bounds__(kFillThreads) fill_planned_kernel(FillPlannedParams p) {
  __shared__ Copies c;
  __shared__ int came[PoolStage::kPlaces];  // of each place of the stage, the pieces that are there
  __shared__ bool to_line[kTogether];
  const PoolStage& stage = p.stage;
  const int tid = threadIdx.x, pieces = static_cast<int>(PoolStage::pieces_of(p.line_bytes));
  wait_previous();
  const int count = *p.state.fill_count;
  PlannedFill fill = p.state.fills[min(tid, p.state.lines - 1)];  // with the count, which says whether it is one
  if (stage.order != nullptr && tid < PoolStage::kPlaces) {
    const StageOrder& order = *stage.order;
    const int drawn = static_cast<int>(order.drawn - StageOrder::kClosed);
    const OrderedPieces o = ordered_pieces(order, order.lacking, pieces);
    // Who drew has copied: this launch waited for the end of those copies.
    came[tid] = o.from + min(max(drawn - o.begin, 0), o.count);
  }
  Word copied = 0, chosen = 0;
  for (int start = 0; start < count; start += kTogether) {
    const int some = min(kTogether, count - start);
    __syncthreads();
    bool lacks = false;
    if (tid < some) {
      if (start > 0) fill = p.state.fills[start + tid];
      to_line[tid] = fill.place < 0;
      c.there[tid] = to_line[tid] ? 0 : came[fill.place];
      c.to[tid] = to_line[tid] ? p.lines + fill.line * p.line_bytes : stage.lines + fill.place * stage.line_bytes;
      lacks = c.there[tid] < pieces;
    }
    if (__syncthreads_or(lacks) == 0) continue;
    if (tid < some) {
      const PooledExpert& e = p.homes[fill.expert];
      c.from[tid] = e.home, c.words[tid] = static_cast<int>(e.bytes / 16);
    }
    __syncthreads();
    copy_pieces(c, some, pieces, [&](int which, int bytes) { (to_line[which] ? copied : chosen) += bytes; });
  }
  if (tid > 0) return;
  if (stage.order != nullptr && blockIdx.x == 0) stage.order->go = 0;  // who waited for it has ended
  if (copied > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->copied_bytes), copied);
  if (chosen > 0) atomicAdd(reinterpret_cast<Word*>(&p.state.words->chosen_bytes), chosen);
}

// Grid: kSettleBlocks.
__global__ void __launch_bounds__(kFillThreads) settle_planned_kernel(SettlePlannedParams p) {
  __shared__ Copies c;
  const PoolStage& stage = p.stage;
  const int tid = threadIdx.x, pieces = static_cast<int>(stage.pieces);
  wait_previous();
  const int count = *p.state.fill_count;
  Word copied = 0;
  for (int start = 0; start < count; start += kTogether) {
    const int some = min(kTogether, count - start);
    __syncthreads();
    if (tid < some) {
      const PlannedFill fill = p.state.fills[start + tid];
      const PooledExpert& e = p.homes[fill.expert];
      std::byte* const line = p.lines + fill.line * stage.line_bytes;
      c.from[tid] = stage.lines + fill.place * stage.line_bytes, c.to[tid] = line;
      c.words[tid] = static_cast<int>(e.bytes / 16), c.there[tid] = fill.place < 0 ? pieces : 0;
      if (fill.place >= 0 && blockIdx.x == 0) serve(p.table[fill.expert], e, line);
    }
    __syncthreads();
    copy_pieces(c, some, pieces, [&](int, int bytes) { copied += bytes; });
  }
  __syncwarp();
  if (tid > 0) return;
  if (copied > 0) {
    atomicAdd(reinterpret_cast<Word*>(&p.state.words->copied_bytes), copied);
    atomicAdd(reinterpret_cast<Word*>(&p.state.words->taken_bytes), copied);
  }
  // Who reads these comes before this launch or after it.
  StageOrder& order = *stage.order;
  if (blockIdx.x == 0) order.given = 0, order.drawn = 0, order.lacking = 0;
}

constexpr uint64_t kPatience = 2'000'000;  // ns

__device__ __forceinline__ uint64_t nanoseconds() {
  uint64_t t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
  return t;
}

// Of a warp: whether another kernel's flag came in time.
__device__ __forceinline__ bool await(const int32_t& flag) {
  int seen = 0;
  if (threadIdx.x % 32 == 0) {
    const uint64_t start = nanoseconds();
    while ((seen = *static_cast<const volatile int32_t*>(&flag)) == 0 && nanoseconds() - start < kPatience)
      __nanosleep(100);
    __threadfence();
  }
  __syncwarp();
  return __shfl_sync(kFullWarp, seen, 0) != 0;
}

// Grid: kForeseenBlocks. Each warp copies for itself, and has the loads of its next piece on their way before it stores
// one. Lane i keeps what place i gets.
__global__ void __launch_bounds__(kForeseenThreads, 1) fill_foreseen_kernel(FillForeseenParams p) {
  constexpr int kPieceWords = PoolStage::kPiece / 16, kLoads = kPieceWords / 32;
  static_assert(PoolStage::kPlaces == 32, "a lane a place");
  const int lane = threadIdx.x % 32;
  const ForeseenExperts& f = p.foreseen;
  StageOrder& order = *f.stage.order;
  const int pieces = static_cast<int>(f.stage.pieces);
  wait_previous();
  int e = lane < f.count ? f.ids[lane] - f.first : -1;
  if (e < 0 || e >= p.state.experts) e = -1;
  const PooledExpert foreseen = p.homes[max(e, 0)];
  // Lines may change meanwhile: this only decides what is worth a copy, and one warp for all.
  const bool lacks = (p.state.line_of[max(e, 0)] < 0) & (e >= 0) & (__ffs(__match_any_sync(kFullWarp, e)) == lane + 1);
  uint32_t lacking = __ballot_sync(kFullWarp, lacks) | StageOrder::kKnown;
  if (lane == 0)
    if (const uint32_t was = atomicCAS(&order.lacking, 0u, lacking); was != 0) lacking = was;
  lacking = __shfl_sync(kFullWarp, lacking, 0);
  const std::byte* home = foreseen.home;
  int words = static_cast<int>(foreseen.bytes / 16);
  OrderedPieces list{0, __popc(lacking & ((1u << lane) - 1)) * pieces, 0};
  if (lane < StageOrder::kForeseen && (lacking >> lane & 1) != 0) list.count = pieces;
  if (p.follows) await(order.go);  // nothing lies behind it, it shares out the link: late is as good

  struct Piece {
    const uint4* source;  // of this lane, as what follows; null: there is none
    uint4* to;
    int words;  // from `source` to the expert's end
  };
  bool ordered = false;
  unsigned ahead = 0, chosen = 0, experts = 0;
  const auto next = [&]() -> Piece {
    while (true) {
      uint32_t n = 0;
      if (lane == 0) n = atomicAdd(&order.drawn, 1u);
      n = __shfl_sync(kFullWarp, n, 0);
      if (n >= StageOrder::kClosed) {
        if (!ordered) {
          while (!await(order.given)) continue;  // its plan closed the guess: it runs, and gives the order without us
          const volatile StageOrder& o = order;
          const int other = lane - StageOrder::kForeseen;
          if (other >= 0) e = other < o.count ? o.experts[other] : -1;
          const PooledExpert wanted = p.homes[max(e, 0)];
          home = wanted.home, words = static_cast<int>(wanted.bytes / 16);
          list = ordered_pieces(o, lacking, pieces);
        }
        ordered = true, n -= StageOrder::kClosed;
      }
      const int at = static_cast<int>(n) - list.begin;
      if (const unsigned hit = __ballot_sync(kFullWarp, at >= 0 && at < list.count); hit != 0) {
        const int place = __ffs(hit) - 1, piece = __shfl_sync(kFullWarp, list.from + at, place);
        const int left = __shfl_sync(kFullWarp, words, place) - piece * kPieceWords;
        const auto from = __shfl_sync(kFullWarp, reinterpret_cast<Word>(home), place);
        const unsigned bytes = 16 * max(min(kPieceWords, left), 0);
        (ordered ? chosen : ahead) += bytes;
        experts += !ordered && piece == 0;
        return {reinterpret_cast<const uint4*>(from) + piece * kPieceWords + lane,
                reinterpret_cast<uint4*>(f.stage.lines + place * f.stage.line_bytes) + piece * kPieceWords + lane,
                left - lane};
      }
      if (ordered || !await(order.given)) break;  // the plan may have to start yet: it does without these copies then
    }
    if (lane == 0 && p.next != nullptr) *static_cast<volatile int32_t*>(&p.next->go) = 1;
    return {nullptr, nullptr, 0};
  };
  const auto load = [](const Piece& piece, uint4(&v)[kLoads]) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (32 * k < piece.words) v[k] = __ldcs(piece.source + 32 * k);
  };
  const auto store = [](const Piece& piece, const uint4(&v)[kLoads]) {
#pragma unroll
    for (int k = 0; k < kLoads; ++k)
      if (32 * k < piece.words) piece.to[32 * k] = v[k];
  };
  uint4 v[kLoads], w[kLoads];
  Piece piece = next();
  load(piece, v);
  while (piece.source != nullptr) {
    const Piece other = next();
    load(other, w);
    store(piece, v);
    if (other.source == nullptr) break;
    piece = next();
    load(piece, v);
    store(other, w);
  }
  if (lane > 0) return;
  PoolWords& counts = *p.state.words;
  if (ahead > 0) atomicAdd(reinterpret_cast<Word*>(&counts.ahead_bytes), Word{ahead});
  if (experts > 0) atomicAdd(reinterpret_cast<Word*>(&counts.ahead), Word{experts});
  if (chosen > 0) atomicAdd(reinterpret_cast<Word*>(&counts.chosen_bytes), Word{chosen});
}

void check_state(const char* kernel, const PoolState& s, const void* lines, int64_t line_bytes) {
  require(s.lines >= 1 && s.lines <= s.experts && s.experts <= kMostExperts, kernel,
          "1 to 1024 experts and up to a line each (lines, experts)", {s.lines, s.experts});
  require(line_bytes > 0 && line_bytes % 16 == 0 && aligned16({lines}), kernel,
          "lines of a multiple of 16 bytes that begin at one (bytes)", {line_bytes});
  require(reinterpret_cast<uintptr_t>(s.words) % 8 == 0, kernel, "a state at a multiple of 8 bytes (address modulo 8)",
          {static_cast<int64_t>(reinterpret_cast<uintptr_t>(s.words) % 8)});
}

void check_stage(const char* kernel, const PoolStage& s) {
  require(s.order == nullptr || (s.line_bytes > 0 && s.line_bytes % 16 == 0 && aligned16({s.lines})), kernel,
          "a stage of lines of a multiple of 16 bytes that begins at one (bytes)", {s.line_bytes});
}

void check_foreseen(const char* kernel, const ForeseenExperts& f) {
  require(f.count >= 0 && f.count <= PoolStage::kForeseen, kernel, "up to 16 experts foreseen", {f.count});
  check_stage(kernel, f.stage);
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
  check_stage("fill_planned", p.stage);
  launch("fill_planned", fill_planned_kernel, kFillBlocks, kFillThreads, 0, stream, p);
}

void settle_planned(const SettlePlannedParams& p, cudaStream_t stream) {
  check_state("settle_planned", p.state, p.lines, p.stage.line_bytes);
  check_stage("settle_planned", p.stage);
  launch("settle_planned", settle_planned_kernel, kSettleBlocks, kFillThreads, 0, stream, p);
}

void fill_foreseen(const FillForeseenParams& p, cudaStream_t stream) {
  check_state("fill_foreseen", p.state, p.foreseen.stage.lines, p.foreseen.stage.line_bytes);
  check_foreseen("fill_foreseen", p.foreseen);
  launch("fill_foreseen", fill_foreseen_kernel, kForeseenBlocks, kForeseenThreads, 0, stream, p);
}

}  // namespace fnx::cuda
