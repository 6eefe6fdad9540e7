// Checks, sorting by expert, rotation and launches of the routed experts.
#include "kernels/cuda/exl3_experts.h"

#include "kernels/cuda/exl3_experts.cuh"
#include "kernels/cuda/exl3_plan.h"
#include "kernels/cuda/exl3_rotate.cuh"

namespace fnx::cuda {

namespace {

constexpr int kSortThreads = 1024;

struct Workspace {
  size_t gate_xh = kExchangeBytes, up_xh, down_xh, bytes;  // offsets
  size_t counts, order, units, unit_count;                 // many rows
};
// Slots of a token share a launch: a nominal ten pairs fill the card.
constexpr int64_t kNominalPairs = 10;
int gate_splits(const Exl3Experts& p) { return plan_splits(p.hidden, 2 * kNominalPairs * (p.width / 128)); }
int down_splits(const Exl3Experts& p) { return plan_splits(p.width, kNominalPairs * (p.hidden / 128)); }

int64_t most_units(int64_t pairs, int64_t experts) { return std::min(pairs, experts + pairs / kUnitPairs); }

// Words of the exchange that a pair takes.
int64_t gate_slots(const Exl3Experts& p) { return (2 * gate_splits(p) - 1) * p.width; }
int64_t down_slots(const Exl3Experts& p) { return (down_splits(p) - 1) * p.hidden; }
bool few_fits(const Exl3Experts& p) {
  const int64_t pairs = p.rows * p.slots_per_row;
  return pairs <= kExl3FewPairs && 4 * pairs * (gate_slots(p) + down_slots(p)) <= static_cast<int64_t>(kExchangeBytes);
}

Workspace make_workspace(const Exl3Experts& p) {
  const int64_t pairs = p.rows * p.slots_per_row;
  Workspace w;
  w.up_xh = w.gate_xh + aligned256(pairs * p.hidden * 2);
  w.down_xh = w.up_xh + aligned256(pairs * p.hidden * 2);
  w.counts = w.down_xh + aligned256(pairs * p.width * 2);
  w.order = w.counts + aligned256(4 * (p.experts + 1));
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

// One warp a (sorted place, projection, 128-block): rotates a row with its expert's gate or up scales.
__global__ void __launch_bounds__(kRotateThreads)
    exl3_rotate_pairs_kernel(const ExpertArgs a, uint16_t* gate_xh, uint16_t* up_xh) {
  const int64_t blocks = a.hidden / 128, i = int64_t{blockIdx.x} * (kRotateThreads / 32) + threadIdx.x / 32;
  const int64_t place = i / (2 * blocks);
  if (place >= a.pairs) return;
  const int64_t pair = a.order[place];
  const Exl3Expert* expert = pair < 0 ? nullptr : find_expert(a, a.ids[pair]);
  if (expert == nullptr) return;
  const bool up = i / blocks % 2;
  rotate_row_block(a.x, up ? expert->up.suh : expert->gate.suh, up ? up_xh : gate_xh, a.hidden, a.pairs,
                   pair / a.slots_per_row, place, i % blocks, threadIdx.x % 32);
}

// counts[e] = pairs of expert e, 0 when it is not held. One warp an expert.
__global__ void exl3_count_kernel(const ExpertArgs a, int32_t* counts) {
  const int expert = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (expert >= a.experts) return;
  int count = 0;
  if (find_expert(a, expert) != nullptr)
    for (int64_t i = lane; i < a.pairs; i += 32) count += a.ids[i] == expert;
  count = __reduce_add_sync(~0u, count);
  if (lane == 0) counts[expert] = count;
}

// Exclusive scan of counts in place; lists the units in order of experts. One block.
__global__ void __launch_bounds__(kSortThreads)
    exl3_units_kernel(int experts, int32_t* counts, ExpertUnit* units, int32_t* unit_count) {
  __shared__ int pairs_before[kSortThreads], units_before[kSortThreads];
  const int t = threadIdx.x, share = (experts + kSortThreads - 1) / kSortThreads;
  const int first = min(t * share, experts), last = min(first + share, experts);
  int pairs = 0, mine = 0;
  for (int e = first; e < last; ++e) pairs += counts[e], mine += (counts[e] + kUnitPairs - 1) / kUnitPairs;
  pairs_before[t] = pairs, units_before[t] = mine;
  __syncthreads();
  for (int d = 1; d < kSortThreads; d *= 2) {
    const int p = t >= d ? pairs_before[t - d] : 0, u = t >= d ? units_before[t - d] : 0;
    __syncthreads();
    pairs_before[t] += p, units_before[t] += u;
    __syncthreads();
  }
  if (t == kSortThreads - 1) *unit_count = units_before[t], counts[experts] = pairs_before[t];
  int begin = pairs_before[t] - pairs, unit = units_before[t] - mine;
  for (int e = first; e < last; ++e) {
    const int count = counts[e];
    counts[e] = begin;
    for (int at = 0; at < count; at += kUnitPairs) units[unit++] = {e, begin + at, min(kUnitPairs, count - at)};
    begin += count;
  }
}

// order[place] = pair, ascending pairs within an expert; -1 after the last. One warp an expert.
__global__ void exl3_order_kernel(const ExpertArgs a, const int32_t* begins, int32_t* order) {
  const int expert = blockIdx.x * 8 + threadIdx.x / 32, lane = threadIdx.x % 32;
  if (expert > a.experts) return;
  if (expert == a.experts) {
    for (int64_t i = begins[expert] + lane; i < a.pairs; i += 32) order[i] = -1;
    return;
  }
  int at = begins[expert];
  if (begins[expert + 1] == at) return;
  for (int64_t i = lane; i - lane < a.pairs; i += 32) {
    const bool mine = i < a.pairs && a.ids[i] == expert;
    const uint32_t all = __ballot_sync(~0u, mine);
    if (mine) order[at + __popc(all & ((1u << lane) - 1))] = static_cast<int32_t>(i);
    at += __popc(all);
  }
}

ExpertArgs make_args(const Exl3Experts& p, const Workspace& w) {
  auto* base = static_cast<std::byte*>(p.workspace);
  ExpertArgs a{};
  a.table = p.table, a.ids = p.ids, a.slots = p.slots;
  a.hidden = p.hidden, a.width = p.width, a.pairs = p.rows * p.slots_per_row;
  a.experts = static_cast<int>(p.experts), a.slots_per_row = static_cast<int>(p.slots_per_row), a.x = p.x;
  a.gate_splits = gate_splits(p), a.down_splits = down_splits(p);
  a.gate_exchange = reinterpret_cast<uint32_t*>(base);
  a.down_exchange = a.gate_exchange + a.pairs * gate_slots(p);
  a.gate_xh = reinterpret_cast<uint16_t*>(base + w.gate_xh);
  a.up_xh = reinterpret_cast<uint16_t*>(base + w.up_xh);
  a.down_xh = reinterpret_cast<uint16_t*>(base + w.down_xh);
  return a;
}

void rotate_pairs(const ExpertArgs& a, cudaStream_t stream) {
  const int64_t warps = a.pairs * 2 * (a.hidden / 128), per_block = kRotateThreads / 32;
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
  const dim3 grid(static_cast<unsigned>(p.experts / 8 + 1));
  launch("exl3_count_kernel", exl3_count_kernel, grid, 256, 0, false, stream, a, counts);
  launch("exl3_units_kernel", exl3_units_kernel, dim3(1), kSortThreads, 0, false, stream, a.experts, counts, units,
         unit_count);
  launch("exl3_order_kernel", exl3_order_kernel, grid, 256, 0, false, stream, a, counts, order);
  rotate_pairs(a, stream);
  const int most = static_cast<int>(most_units(a.pairs, p.experts));
  switch (p.codebook) {
    case exl3::Codebook::ThreeInst:
      return launch_experts_many<exl3::Codebook::ThreeInst>(a, most, stream);
    case exl3::Codebook::Mcg:
      return launch_experts_many<exl3::Codebook::Mcg>(a, most, stream);
    case exl3::Codebook::Mul1:
      return launch_experts_many<exl3::Codebook::Mul1>(a, most, stream);
  }
}

void exl3_experts(const Exl3Experts& p, CudaStream stream) {
  few_fits(p) ? exl3_experts_few(p, stream) : exl3_experts_many(p, stream);
}

}  // namespace fnx::cuda
