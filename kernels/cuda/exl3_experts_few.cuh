// Routed experts of few rows: the kernels of one codebook, for the units exl3_experts_*_few.cu.
#pragma once

#include "kernels/cuda/exl3_experts.cuh"

namespace fnx::cuda {

// Longest ring of a codebook's widths.
inline constexpr int kExpertRingBytes = 4096;
static_assert(TileChain<exl3::Codebook::Mul1, 16, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 14, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 12, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 10, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 8, 1>::kRingBytes <= kExpertRingBytes);

// Chain of a warp's n-tile over k-tiles [begin, end) of a matrix [in, out]. fill(first, tiles) brings the rows of a
// chunk into shared memory at `rows`; it runs between barriers, the first time after `ready`. Early: the first tiles
// are decoded before that.
template <exl3::Codebook Book, bool Early, class Ready, class Fill>
__device__ __forceinline__ void expert_chain(const Exl3Matrix& m, std::byte* rings, const std::byte* rows, int64_t out,
                                             int block, int begin, int end, float (&acc)[1][4], Ready ready,
                                             Fill fill) {
  const int warp = threadIdx.x / 32;
  with_width<Book>(m.half_bits, [&]<int HalfBits>() {
    using Chain = TileChain<Book, HalfBits, 1>;
    Chain chain(rings + warp * Chain::kRingBytes, m.trellis + (begin * (out / 16) + block * 8 + warp) * (8 * HalfBits),
                out / 16, end - begin, threadIdx.x % 32);
    if constexpr (Early) chain.decode_early();
    ready();
    for (int t = begin; t < end; t += kChunkTiles<1>) {
      const int tiles = min(kChunkTiles<1>, end - t);
      if (t != begin) __syncthreads();
      fill(t, tiles);
      __syncthreads();
      chain.run(rows, tiles, acc);
    }
  });
  __syncthreads();
}

// Whether blocks of `blockIdx.z` know their expert before the ids are there; such pairs come first, a row each.
__device__ __forceinline__ bool is_known(const ExpertArgs& a) { return blockIdx.z < static_cast<unsigned>(a.known); }
__device__ __forceinline__ int64_t find_pair(const ExpertArgs& a) {
  const auto slots = static_cast<unsigned>(a.slots_per_row), known = static_cast<unsigned>(a.known);
  if (known == 0) return blockIdx.z;
  if (blockIdx.z < known) return blockIdx.z * slots + slots - 1;
  const unsigned rest = blockIdx.z - known, row = rest / (slots - 1);
  return row * slots + rest - row * (slots - 1);
}

// Waits until a counter has come to `count`; what was written before that is then visible here.
__device__ __forceinline__ void await(const uint32_t* counter, uint32_t count) {
  uint32_t seen;
  do asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  while (seen < count);
}

// Brings the table into the L2 before the ids are known.
__device__ __forceinline__ void prefetch_table(const ExpertArgs& a) {
  const unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  const unsigned at = (block * kFewThreads + threadIdx.x) * 128;
  if (block < 256 && at < a.experts * sizeof(Exl3Expert))
    prefetch_line(reinterpret_cast<const std::byte*>(a.table) + at);
}

// The expert of a pair and its matrix 0 (gate), 1 (up) or 2 (down), or null when it is not held here. What tells that
// is loaded together with the matrix.
__device__ __forceinline__ const Exl3Expert* find_matrix(const ExpertArgs& a, int64_t pair, int which, Exl3Matrix& m) {
  const int32_t id = is_known(a) ? a.experts - 1 : a.ids[pair];
  if (id < 0 || id >= a.experts) return nullptr;
  const Exl3Expert* e = a.table + id;
  const auto word = [](const void* p) {
    uint64_t v;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(v) : "l"(p));
    return v;
  };
  const Exl3Matrix* from = &e->gate + which;
  const uint64_t held = word(&e->gate.trellis), trellis = word(&from->trellis), suh = word(&from->suh);
  const uint64_t svh = word(&from->svh), half_bits = word(&from->half_bits);
  m = {reinterpret_cast<const uint16_t*>(trellis), reinterpret_cast<const uint16_t*>(suh),
       reinterpret_cast<const uint16_t*>(svh), static_cast<int>(half_bits)};
  return held == 0 ? nullptr : e;
}

// Grid: (width/128, 2 * gate_splits, pairs). The last block of a pair's column activates and rotates for down.
// Where the expert is known, x and the expert are read beside the launch before, and nothing is written.
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_gate_up_few_kernel(const ExpertArgs a) {
  __shared__ __align__(16) std::byte rings[8 * kExpertRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<1>];
  float* z = reinterpret_cast<float*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x, last = gridDim.y - 1;
  const bool up = static_cast<int>(blockIdx.y) >= a.gate_splits;
  const int split = blockIdx.y - (up ? a.gate_splits : 0);
  const int begin = a.gate_begins.at[split], end = a.gate_begins.at[split + 1];
  const int64_t pair = find_pair(a);
  const bool known = is_known(a);
  prefetch_table(a);
  // Ids may come from the kernel before; the next kernel, which let_next_start allows, reads them before it waits.
  if (!known) wait_for_previous();
  let_next_start();
  Exl3Matrix m;
  const Exl3Expert* expert = find_matrix(a, pair, up ? 1 : 0, m);
  if (expert == nullptr) return wait_for_previous();
  // Ahead of the weights, behind which the scales would queue.
  if (2 * static_cast<int>(threadIdx.x) < end - begin) prefetch_line(m.suh + (begin + 2 * threadIdx.x) * 16);
  float acc[1][4] = {};
  expert_chain<Book, false>(
      m, rings, rows, a.width, block, begin, end, acc,
      [&] {
        // What the last block reads after its chain; the last warp has no rows to rotate.
        if (blockIdx.y < last || warp < 7 || lane >= 6) return;
        const uint16_t* scales = lane < 2 ? expert->gate.svh : lane < 4 ? expert->up.svh : expert->down.suh;
        prefetch_line(scales + block * 128 + lane % 2 * 64);
      },
      [&](int first, int tiles) {
        const int64_t row = static_cast<unsigned>(pair) / static_cast<unsigned>(a.slots_per_row);
        rotate_rows<1, kFewThreads>(rows, a.x + row * a.hidden, m.suh, a.hidden, 1, first, tiles);
      });
  store_columns(z, warp * 16, lane, 1, acc);
  if (known) wait_for_previous();
  __syncthreads();
  uint32_t* slots = a.gate_exchange + (pair * blocks + block) * last * kSlot;
  if (blockIdx.y < last) {
    if (warp == 0) give4(slots + blockIdx.y * kSlot + 4 * lane, *reinterpret_cast<const float4*>(z + 4 * lane));
    return;
  }
  const Exl3Matrix& mine = warp == 0 ? expert->gate : expert->up;
  float4 svh = {}, suh = {};
  if (warp < 2) svh = load_half4(mine.svh + block * 128 + 4 * lane);
  if (warp == 0) suh = load_half4(expert->down.suh + block * 128 + 4 * lane);
  // Warps 0 to 3 take the gate's splits, the others those of up but the last, which is this block's.
  const int column = threadIdx.x % 128;
  if (warp < 4) {
    z[kColumnStride + column] = take(slots + column, a.gate_splits);
  } else if (a.gate_splits > 1) {
    z[column] = __fadd_rn(take(slots + a.gate_splits * kSlot + column, a.gate_splits - 1), z[column]);
  }
  __syncthreads();
  if (warp >= 2) return;
  const float4 sum = *reinterpret_cast<const float4*>(z + (warp == 0 ? kColumnStride : 0) + 4 * lane);
  const float4 y = output_block(sum, svh, nullptr, lane);
  if (warp == 1) *reinterpret_cast<float4*>(z + 4 * lane) = y;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  if (warp == 1) return;
  const float4 h = activate(y, *reinterpret_cast<const float4*>(z + 4 * lane));
  store_rotated(a.down_xh, a.pairs, pair, block, lane, rotate_block(h, suh, lane));
  if (a.ready == nullptr) return;
  __threadfence();
  __syncwarp();
  if (lane == 0) atomicAdd(a.ready + pair, 1);
}

// Grid: (hidden/128, down_splits, pairs). Runs after the kernel above alone, whose blocks have all started and waited
// for the ids. With `ready` a block waits for those of its pair alone.
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_down_few_kernel(const ExpertArgs a) {
  __shared__ __align__(16) std::byte rings[8 * kExpertRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<1>];
  float* z = reinterpret_cast<float*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x, split = blockIdx.y, last = a.down_splits - 1;
  const int begin = a.down_begins.at[split], end = a.down_begins.at[split + 1];
  const int64_t pair = find_pair(a);
  const auto columns = static_cast<uint32_t>(a.width / 128), readers = gridDim.x * gridDim.y;
  // Whoever waits for this launch waits for the one before it too.
  const auto leave = [&] {
    if (blockIdx.x + blockIdx.y + blockIdx.z == 0) wait_for_previous();
  };
  Exl3Matrix m;
  if (find_matrix(a, pair, 2, m) == nullptr) return leave();
  float acc[1][4] = {};
  uint32_t arrived = 0;
  expert_chain<Book, true>(
      m, rings, rows, a.hidden, block, begin, end, acc,
      [&] {
        if (split == last && threadIdx.x < 2) prefetch_line(m.svh + block * 128 + threadIdx.x * 64);
        if (a.ready == nullptr) wait_for_previous();
        let_next_start();
        if (a.ready == nullptr) return;
        if (threadIdx.x == 0) await(a.ready + pair, columns);
        __syncthreads();
        if (threadIdx.x == kFewThreads - 1) arrived = atomicAdd(a.ready + pair, 1) + 1;
      },
      [&](int first, int tiles) { load_rows<1, kFewThreads>(rows, a.down_xh + pair * 16, a.pairs, 1, first, tiles); });
  store_columns(z, warp * 16, lane, 1, acc);
  __syncthreads();
  // The last block of the pair empties its counter.
  if (arrived == columns + readers) a.ready[pair] = 0;
  const float4 svh = warp == 0 && split == last ? load_half4(m.svh + block * 128 + 4 * lane) : float4{};
  if (last > 0) {
    uint32_t* slots = a.down_exchange + (pair * blocks + block) * last * kSlot;
    if (split < last) {
      if (warp == 0) give4(slots + split * kSlot + 4 * lane, *reinterpret_cast<const float4*>(z + 4 * lane));
      return leave();
    }
    if (warp < 4) z[threadIdx.x] = __fadd_rn(take(slots + threadIdx.x, last), z[threadIdx.x]);
    __syncthreads();
  }
  if (warp > 0) return;
  *reinterpret_cast<float4*>(a.slots + pair * a.hidden + block * 128 + 4 * lane) =
      output_block(*reinterpret_cast<const float4*>(z + 4 * lane), svh, nullptr, lane);
  leave();
}

template <exl3::Codebook Book>
void launch_experts_few(const ExpertArgs& a, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(a.pairs);
  launch("exl3_gate_up_few_kernel", exl3_gate_up_few_kernel<Book>,
         dim3(static_cast<unsigned>(a.width / 128), 2 * a.gate_splits, pairs), kFewThreads, 0, true, stream, a);
  launch("exl3_down_few_kernel", exl3_down_few_kernel<Book>,
         dim3(static_cast<unsigned>(a.hidden / 128), a.down_splits, pairs), kFewThreads, 0, true, stream, a);
}

}  // namespace fnx::cuda
