// Checks, sorting by expert, rotation and launches of the routed experts.
#include "kernels/cuda/exl3_experts.h"

#include "kernels/cuda/exl3_experts.cuh"
#include "kernels/cuda/exl3_octet.cuh"
#include "kernels/cuda/exl3_plan.h"
#include "kernels/cuda/exl3_rotate.cuh"

namespace fnx::cuda {

namespace {

constexpr int kSortThreads = 1024;

struct Workspace {
  size_t gate_xh = kExchangeBytes, up_xh, gate, down_xh, bytes;  // offsets
  size_t counts, order, units, unit_count;                       // many rows
};
// Slots of a token share a launch: a nominal ten pairs fill the card.
constexpr int64_t kNominalPairs = 10;
int gate_splits(const Exl3Experts& p) { return plan_splits(p.hidden, 2 * kNominalPairs * (p.width / 128)); }
int down_splits(const Exl3Experts& p) { return plan_splits(p.width, kNominalPairs * (p.hidden / 128)); }

// Small units waste little on experts of few pairs; large ones decode an expert's weights less often.
int unit_pairs(int64_t pairs, int64_t experts) {
  return pairs <= experts * kSmallUnitPairs ? kSmallUnitPairs : kUnitPairs;
}
int64_t most_units(int64_t pairs, int64_t experts) {
  return std::min(pairs, experts + pairs / unit_pairs(pairs, experts));
}

// Pairs up to which gate and up take so few waves of blocks that starting before others have ended gains.
constexpr int64_t kOverlapPairs = 48;

// Words of the exchange that a pair takes.
int64_t gate_slots(const Exl3Experts& p) { return (2 * gate_splits(p) - 1) * p.width; }
int64_t down_slots(const Exl3Experts& p) { return (down_splits(p) - 1) * p.hidden; }
bool few_fits(const Exl3Experts& p) {
  const int64_t pairs = p.rows * p.slots_per_row;
  return pairs <= kExl3FewPairs &&
         4 * pairs * (gate_slots(p) + down_slots(p) + 1) <= static_cast<int64_t>(kExchangeBytes);
}

Workspace make_workspace(const Exl3Experts& p) {
  const int64_t pairs = p.rows * p.slots_per_row;
  Workspace w;
  w.up_xh = w.gate_xh + aligned256(pairs * p.hidden * 2);
  w.gate = w.up_xh + aligned256(pairs * p.hidden * 2);
  w.down_xh = w.gate + aligned256(pairs * p.width * 4);
  w.counts = w.down_xh + aligned256(pairs * p.width * 2);
  w.order = w.counts + aligned256(4 * (8 * p.experts + 1));
  w.unit_count = w.order + aligned256(4 * pairs);
  w.units = w.unit_count + 256;
  w.bytes = w.units + aligned256(most_units(pairs, p.experts) * sizeof(ExpertUnit));
  return w;
}

void check(const Exl3Experts& p, const char* entry, int64_t most_pairs, size_t bytes) {
  const std::string name(entry);
  if (p.rows < 1 || p.slots_per_row < 1 || p.rows * p.slots_per_row > most_pairs)
    refuse(name + " takes 1 to " + std::to_string(most_pairs) + " (row, slot) pairs, not " + std::to_string(p.rows) +
           " x " + std::to_string(p.slots_per_row));
  if (p.experts < 1 || p.experts > 65536) refuse(name + ": " + std::to_string(p.experts) + " experts");
  for (const int64_t n : {p.hidden, p.width})
    if (n <= 0 || n % 128 != 0 || n > 65536)
      refuse(name + ": hidden " + std::to_string(p.hidden) + ", width " + std::to_string(p.width) +
             ": multiples of 128 up to 65536 are needed");
  check_aligned("table", p.table, 8), check_aligned("ids", p.ids, 4), check_aligned("x", p.x, 16);
  check_aligned("slots", p.slots, 16), check_aligned("workspace", p.workspace, 256);
  if (p.workspace_bytes < bytes)
    refuse(name + ": workspace of " + std::to_string(p.workspace_bytes) + " bytes, " + std::to_string(bytes) +
           " needed");
}

// One warp eight sorted places of a 128-block: rotates their rows with their experts' gate and up scales.
__global__ void __launch_bounds__(kRotateThreads)
    exl3_rotate_pairs_kernel(const ExpertArgs a, uint16_t* gate_xh, uint16_t* up_xh) {
  const int lane = threadIdx.x % 32;
  const int64_t blocks = a.hidden / 128, i = int64_t{blockIdx.x} * (kRotateThreads / 32) + threadIdx.x / 32;
  const int64_t first = i / blocks * 8, place = first + lane / 4, block = i % blocks;
  if (first >= a.pairs) return;
  const int32_t pair = place < a.pairs ? a.order[place] : -1;
  const Exl3Expert* expert = pair < 0 ? nullptr : find_expert(a, a.ids[pair]);
  const bool live = expert != nullptr;
  if (__ballot_sync(~0u, live) == 0) return;
  const int64_t column = block * 128 + lane % 4 * 4;
  Octet x = {};
#pragma unroll
  for (int k = 0; k < 8; ++k)
    if (live) x[k] = *reinterpret_cast<const float4*>(a.x + pair / a.slots_per_row * a.hidden + column + 16 * k);
#pragma unroll 1
  for (int projection = 0; projection < 2; ++projection) {
    Octet v;
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = x[k];
    if (live) scale_octet(v, (projection == 0 ? expert->gate.suh : expert->up.suh) + block * 128, lane);
    hadamard_octet(v, lane);
    store_rotated_octet(projection == 0 ? gate_xh : up_xh, a.pairs, place, block, lane, v, live);
  }
}

// Calls f(pair, mine) for the pairs [begin, end) a warp at a time, ascending; mine: the pair is of `expert`.
template <class F>
__device__ __forceinline__ void scan_pairs(const ExpertArgs& a, int expert, int64_t begin, int64_t end, F f) {
  constexpr int kAhead = 8;
  for (int64_t i = begin + threadIdx.x % 32; i - threadIdx.x % 32 < end; i += kAhead * 32) {
    int32_t ids[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) ids[k] = i + k * 32 < end ? a.ids[i + k * 32] : -1;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) f(i + k * 32, ids[k] == expert);
  }
}

// Warp w of a block of eight scans pairs [part(w), part(w + 1)).
__device__ __forceinline__ int64_t part_begin(const ExpertArgs& a, int warp) { return a.pairs * warp / 8; }

// counts[e][w] = pairs of expert e in part w, 0 when it is not held. One block an expert.
__global__ void __launch_bounds__(256) exl3_count_kernel(const ExpertArgs a, int32_t* counts) {
  const int expert = blockIdx.x, warp = threadIdx.x / 32;
  int count = 0;
  if (find_expert(a, expert) != nullptr)
    scan_pairs(a, expert, part_begin(a, warp), part_begin(a, warp + 1), [&](int64_t, bool mine) { count += mine; });
  count = __reduce_add_sync(~0u, count);
  if (threadIdx.x % 32 == 0) counts[expert * 8 + warp] = count;
}

// Exclusive scan of counts in place; lists the units in order of experts, those of one expert about equal. One block.
__global__ void __launch_bounds__(kSortThreads)
    exl3_units_kernel(int experts, int unit_pairs, int32_t* counts, ExpertUnit* units, int32_t* unit_count) {
  __shared__ int pairs_before[kSortThreads], units_before[kSortThreads];
  const int t = threadIdx.x, share = (experts + kSortThreads - 1) / kSortThreads;
  const int first = min(t * share, experts), last = min(first + share, experts);
  const auto pairs_of = [&](int e) {
    int sum = 0;
    for (int w = 0; w < 8; ++w) sum += counts[e * 8 + w];
    return sum;
  };
  const auto units_of = [&](int n) { return (n + unit_pairs - 1) / unit_pairs; };
  int pairs = 0, mine = 0;
  for (int e = first; e < last; ++e) {
    const int n = pairs_of(e);
    pairs += n, mine += units_of(n);
  }
  pairs_before[t] = pairs, units_before[t] = mine;
  __syncthreads();
  for (int d = 1; d < kSortThreads; d *= 2) {
    const int p = t >= d ? pairs_before[t - d] : 0, u = t >= d ? units_before[t - d] : 0;
    __syncthreads();
    pairs_before[t] += p, units_before[t] += u;
    __syncthreads();
  }
  if (t == kSortThreads - 1) *unit_count = units_before[t], counts[experts * 8] = pairs_before[t];
  int begin = pairs_before[t] - pairs, unit = units_before[t] - mine;
  for (int e = first; e < last; ++e) {
    const int n = pairs_of(e), parts = units_of(n), size = parts == 0 ? 1 : ((n + parts - 1) / parts + 15) / 16 * 16;
    for (int at = 0; at < n; at += size) units[unit++] = {e, begin + at, min(size, n - at)};
    for (int w = 0; w < 8; ++w) {
      const int count = counts[e * 8 + w];
      counts[e * 8 + w] = begin, begin += count;
    }
  }
}

// order[place] = pair, ascending pairs within an expert; -1 after the last. One block an expert.
__global__ void __launch_bounds__(256) exl3_order_kernel(const ExpertArgs a, const int32_t* begins, int32_t* order) {
  const int expert = blockIdx.x, warp = threadIdx.x / 32;
  int at = begins[expert * 8 + (expert == a.experts ? 0 : warp)];
  if (expert == a.experts) {
    for (int64_t i = at + threadIdx.x; i < a.pairs; i += 256) order[i] = -1;
    return;
  }
  if (begins[expert * 8 + 8] == begins[expert * 8]) return;
  scan_pairs(a, expert, part_begin(a, warp), part_begin(a, warp + 1), [&](int64_t pair, bool mine) {
    const uint32_t all = __ballot_sync(~0u, mine);
    if (mine) order[at + __popc(all & ((1u << threadIdx.x % 32) - 1))] = static_cast<int32_t>(pair);
    at += __popc(all);
  });
}

ExpertArgs make_args(const Exl3Experts& p, const Workspace& w) {
  auto* base = static_cast<std::byte*>(p.workspace);
  ExpertArgs a{};
  a.table = p.table, a.ids = p.ids, a.slots = p.slots;
  a.hidden = p.hidden, a.width = p.width, a.pairs = p.rows * p.slots_per_row;
  a.experts = static_cast<int>(p.experts), a.slots_per_row = static_cast<int>(p.slots_per_row), a.x = p.x;
  a.gate_splits = gate_splits(p), a.down_splits = down_splits(p);
  a.gate_begins = split_begins(p.hidden, a.gate_splits), a.down_begins = split_begins(p.width, a.down_splits);
  a.gate_exchange = reinterpret_cast<uint32_t*>(base);
  a.down_exchange = a.gate_exchange + a.pairs * gate_slots(p);
  if (a.pairs <= kOverlapPairs) {
    a.ready = a.down_exchange + a.pairs * down_slots(p);
    a.known = p.last_known && p.slots_per_row > 1 ? static_cast<int>(p.rows) : 0;
  }
  a.gate_xh = reinterpret_cast<uint16_t*>(base + w.gate_xh);
  a.up_xh = reinterpret_cast<uint16_t*>(base + w.up_xh);
  a.gate = reinterpret_cast<float*>(base + w.gate);
  a.down_xh = reinterpret_cast<uint16_t*>(base + w.down_xh);
  return a;
}

void rotate_pairs(const ExpertArgs& a, cudaStream_t stream) {
  const int64_t warps = (a.pairs + 7) / 8 * (a.hidden / 128), per_block = kRotateThreads / 32;
  launch("exl3_rotate_pairs_kernel", exl3_rotate_pairs_kernel,
         dim3(static_cast<unsigned>((warps + per_block - 1) / per_block)), kRotateThreads, 0, false, stream, a,
         const_cast<uint16_t*>(a.gate_xh), const_cast<uint16_t*>(a.up_xh));
}

}  // namespace

size_t exl3_experts_workspace_bytes(int64_t rows, int64_t slots_per_row, int64_t experts, int64_t hidden,
                                    int64_t width) {
  Exl3Experts p;
  p.rows = rows, p.slots_per_row = slots_per_row, p.experts = experts, p.hidden = hidden, p.width = width;
  return make_workspace(p).bytes;
}

void exl3_experts_few(const Exl3Experts& p, CudaStream stream) {
  const Workspace w = make_workspace(p);
  check(p, "exl3_experts_few", kExl3FewPairs, w.bytes);
  if (!few_fits(p))
    refuse("exl3_experts_few: the split sums of " + std::to_string(p.rows * p.slots_per_row) +
           " pairs exceed the exchange; exl3_experts takes them");
  const ExpertArgs a = make_args(p, w);
  switch (p.codebook) {
    case exl3::Codebook::ThreeInst:
      return launch_experts_few<exl3::Codebook::ThreeInst>(a, stream);
    case exl3::Codebook::Mcg:
      return launch_experts_few<exl3::Codebook::Mcg>(a, stream);
    case exl3::Codebook::Mul1:
      return launch_experts_few<exl3::Codebook::Mul1>(a, stream);
  }
}

void exl3_experts_many(const Exl3Experts& p, CudaStream stream) {
  const Workspace w = make_workspace(p);
  check(p, "exl3_experts_many", int64_t{1} << 24, w.bytes);
  ExpertArgs a = make_args(p, w);
  auto* base = static_cast<std::byte*>(p.workspace);
  auto* counts = reinterpret_cast<int32_t*>(base + w.counts);
  auto* order = reinterpret_cast<int32_t*>(base + w.order);
  auto* units = reinterpret_cast<ExpertUnit*>(base + w.units);
  auto* unit_count = reinterpret_cast<int32_t*>(base + w.unit_count);
  a.order = order, a.units = units, a.unit_count = unit_count;
  const auto experts = static_cast<unsigned>(p.experts);
  const int unit = unit_pairs(a.pairs, p.experts);
  launch("exl3_count_kernel", exl3_count_kernel, dim3(experts), 256, 0, false, stream, a, counts);
  launch("exl3_units_kernel", exl3_units_kernel, dim3(1), kSortThreads, 0, false, stream, a.experts, unit, counts,
         units, unit_count);
  launch("exl3_order_kernel", exl3_order_kernel, dim3(experts + 1), 256, 0, false, stream, a, counts, order);
  rotate_pairs(a, stream);
  const int most = static_cast<int>(most_units(a.pairs, p.experts));
  switch (p.codebook) {
    case exl3::Codebook::ThreeInst:
      return launch_experts_many<exl3::Codebook::ThreeInst>(a, unit, most, stream);
    case exl3::Codebook::Mcg:
      return launch_experts_many<exl3::Codebook::Mcg>(a, unit, most, stream);
    case exl3::Codebook::Mul1:
      return launch_experts_many<exl3::Codebook::Mul1>(a, unit, most, stream);
  }
}

void exl3_experts(const Exl3Experts& p, CudaStream stream) {
  few_fits(p) ? exl3_experts_few(p, stream) : exl3_experts_many(p, stream);
}

}  // namespace fnx::cuda
