// Routed experts: kernels' arguments and the kernels of one codebook.
#pragma once

#include "kernels/cuda/exl3_experts.h"
#include "kernels/cuda/exl3_few.cuh"

namespace fnx::cuda {

// Pairs of one expert that a block of the many-row kernels takes.
inline constexpr int kUnitPairs = 32;

// A run of the pairs sorted by expert.
struct ExpertUnit {
  int32_t expert, begin, count;
};

struct ExpertArgs {
  const Exl3Expert* table;
  const int32_t* ids;  // [rows * slots_per_row]
  int64_t hidden, width, pairs;
  int experts, slots_per_row, gate_splits, down_splits;
  const float* x;           // [pairs / slots_per_row, hidden]
  const uint16_t* gate_xh;  // many: rotated [hidden/16, pairs, 16]
  const uint16_t* up_xh;
  uint16_t* down_xh;          // rotated [width/16, pairs, 16]
  float* slots;               // [pairs, hidden]
  float* gate_partials;       // few: [pairs, width/128, 2, gate_splits, 128]
  float* down_partials;       // few: [pairs, hidden/128, down_splits, 128]
  uint32_t* counters;         // few: [pairs, hidden/128 + width/128], zero between launches
  const int32_t* order;       // many: pair of each sorted place
  const ExpertUnit* units;    // many
  const int32_t* unit_count;  // many
};

// silu(g) * u.
__device__ __forceinline__ float activate(float g, float u) {
  return __fmul_rn(__fdiv_rn(g, __fadd_rn(1.0f, expf(-g))), u);
}
__device__ __forceinline__ float4 activate(float4 g, float4 u) {
  return {activate(g.x, u.x), activate(g.y, u.y), activate(g.z, u.z), activate(g.w, u.w)};
}

// The expert of an id, or null when it is not held here.
__device__ __forceinline__ const Exl3Expert* find_expert(const ExpertArgs& a, int32_t id) {
  if (id < 0 || id >= a.experts) return nullptr;
  const Exl3Expert* e = a.table + id;
  return e->gate.trellis == nullptr ? nullptr : e;
}

// Chain of a warp's n-tile over k-tiles [begin, end) of a matrix [in, out]. fill(first, tiles) brings the rows of a
// chunk into shared memory at `rows`; it runs between barriers, the first time after `ready`.
template <exl3::Codebook Book, int RowGroups, class Ready, class Fill>
__device__ __forceinline__ void expert_chain(const Exl3Matrix& m, std::byte* rings, const std::byte* rows, int64_t out,
                                             int block, int begin, int end, float (&acc)[RowGroups][4], Ready ready,
                                             Fill fill) {
  const int warp = threadIdx.x / 32;
  with_width<Book>(m.half_bits, [&]<int HalfBits>() {
    using Chain = TileChain<Book, HalfBits, RowGroups>;
    Chain chain(rings + warp * Chain::kRingBytes, m.trellis + (begin * (out / 16) + block * 8 + warp) * (8 * HalfBits),
                out / 16, end - begin, threadIdx.x % 32);
    ready();
    for (int t = begin; t < end; t += kChunkTiles<RowGroups>) {
      const int tiles = min(kChunkTiles<RowGroups>, end - t);
      __syncthreads();
      fill(t, tiles);
      __syncthreads();
      chain.run(rows, tiles, acc);
    }
  });
  __syncthreads();
}

// Longest ring of a codebook's widths.
inline constexpr int kExpertRingBytes = 3072;
static_assert(TileChain<exl3::Codebook::Mul1, 16, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 14, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 12, 1>::kRingBytes <= kExpertRingBytes &&
              TileChain<exl3::Codebook::Mul1, 6, 1>::kRingBytes <= kExpertRingBytes);

// Grid: (width/128, 2 * gate_splits, pairs). The last block of a pair's column activates and rotates for down.
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_gate_up_few_kernel(const ExpertArgs a) {
  __shared__ __align__(16) std::byte rings[8 * kExpertRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<1>];
  float* z = reinterpret_cast<float*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x, projection = blockIdx.y % 2, split = blockIdx.y / 2;
  const int64_t pair = blockIdx.z;
  // Ids may come from the kernel before, and the next kernel reads them before it waits for this one.
  wait_for_previous();
  let_next_start();
  const Exl3Expert* expert = find_expert(a, a.ids[pair]);
  if (expert == nullptr) return;
  const Exl3Matrix m = projection == 0 ? expert->gate : expert->up;
  const float* x = a.x + pair / a.slots_per_row * a.hidden;
  float acc[1][4] = {};
  expert_chain<Book, 1>(
      m, rings, rows, a.width, block, exl3_split_begin(a.hidden, a.gate_splits, split),
      exl3_split_begin(a.hidden, a.gate_splits, split + 1), acc,
      [&] {
        for (int i = threadIdx.x; i < kChunkBytes<1> / 16; i += kFewThreads)
          reinterpret_cast<uint4*>(rows)[i] = {0, 0, 0, 0};
      },
      [&](int first, int tiles) { rotate_rows<kFewThreads>(rows, x, m.suh, a.hidden, 1, first, tiles); });
  store_columns<1>(z, warp * 16, lane, 1, acc);
  __syncthreads();
  float* partial = a.gate_partials + (pair * blocks + block) * 2 * a.gate_splits * 128;
  if (warp == 0)
    __stcg(reinterpret_cast<float4*>(partial + (projection * a.gate_splits + split) * 128) + lane,
           *reinterpret_cast<const float4*>(z + 4 * lane));
  if (!arrive_last(a.counters + pair * blocks + block, 2 * a.gate_splits) || warp >= 2) return;
  const Exl3Matrix& mine = warp == 0 ? expert->gate : expert->up;
  const float4 sum = sum_splits(partial + warp * a.gate_splits * 128 + 4 * lane, a.gate_splits, 128);
  const float4 y = output_block(sum, mine.svh + block * 128, nullptr, lane);
  if (warp == 1) *reinterpret_cast<float4*>(z + 4 * lane) = y;
  asm volatile("bar.sync 1, 64;" ::: "memory");
  if (warp == 1) return;
  const float4 h = activate(y, *reinterpret_cast<const float4*>(z + 4 * lane));
  store_rotated(a.down_xh, a.pairs, pair, block, lane,
                rotate_block(h, load_half4(expert->down.suh + block * 128 + 4 * lane), lane));
}

// Grid: (hidden/128, down_splits, pairs). Runs after the kernel above alone, which has waited for the ids.
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 4) exl3_down_few_kernel(const ExpertArgs a) {
  __shared__ __align__(16) std::byte rings[8 * kExpertRingBytes];
  __shared__ __align__(16) std::byte rows[kChunkBytes<1>];
  float* z = reinterpret_cast<float*>(rows);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int block = blockIdx.x, blocks = gridDim.x, split = blockIdx.y;
  const int64_t pair = blockIdx.z;
  const Exl3Expert* expert = find_expert(a, a.ids[pair]);
  if (expert == nullptr) return wait_for_previous();
  float acc[1][4] = {};
  expert_chain<Book, 1>(
      expert->down, rings, rows, a.hidden, block, exl3_split_begin(a.width, a.down_splits, split),
      exl3_split_begin(a.width, a.down_splits, split + 1), acc, [] { wait_for_previous(); },
      [&](int first, int tiles) { load_rows<1, kFewThreads>(rows, a.down_xh + pair * 16, a.pairs, 1, first, tiles); });
  store_columns<1>(z, warp * 16, lane, 1, acc);
  __syncthreads();
  float4 sum = *reinterpret_cast<const float4*>(z + 4 * lane);
  if (a.down_splits > 1) {
    float* partial = a.down_partials + (pair * blocks + block) * a.down_splits * 128;
    if (warp == 0) __stcg(reinterpret_cast<float4*>(partial + split * 128) + lane, sum);
    if (!arrive_last(a.counters + a.pairs * (a.width / 128) + pair * blocks + block, a.down_splits)) return;
    if (warp == 0) sum = sum_splits(partial + 4 * lane, a.down_splits, 128);
  }
  if (warp == 0)
    *reinterpret_cast<float4*>(a.slots + pair * a.hidden + block * 128 + 4 * lane) =
        output_block(sum, expert->down.svh + block * 128, nullptr, lane);
}

// Shared memory of the many-row kernels: z of the gate, rings, rows; z of a matrix replaces its rings when they are
// done.
inline constexpr int kUnitGroups = kUnitPairs / 8;
inline constexpr int kUnitTileBytes = kUnitPairs * kColumnStride * 4;
inline constexpr int kUnitRingBytes = 8 * kExpertRingBytes;
inline constexpr int kUnitBytes = kUnitRingBytes + kChunkBytes<kUnitGroups>;
static_assert(kUnitTileBytes <= kUnitRingBytes);

// z [count][128] of one matrix column in shared memory: chains of every split, added in ascending order.
template <exl3::Codebook Book, int RowGroups>
__device__ __forceinline__ void unit_columns(const Exl3Matrix& m, std::byte* shared, int64_t in, int64_t out, int block,
                                             int splits, const uint16_t* x, int64_t stride, int rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float total[RowGroups][4];
  for (int s = 0; s < splits; ++s) {
    float acc[RowGroups][4] = {};
    std::byte* chunk = shared + kUnitRingBytes;
    expert_chain<Book, RowGroups>(
        m, shared, chunk, out, block, exl3_split_begin(in, splits, s), exl3_split_begin(in, splits, s + 1), acc, [] {},
        [&](int first, int tiles) { load_rows<RowGroups, kFewThreads>(chunk, x, stride, rows, first, tiles); });
#pragma unroll
    for (int g = 0; g < RowGroups; ++g)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[g][i] = s == 0 ? acc[g][i] : __fadd_rn(total[g][i], acc[g][i]);
  }
  store_columns<RowGroups>(reinterpret_cast<float*>(shared), warp * 16, lane, rows, total);
  __syncthreads();
}

// Grid: (width/128, most units).
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 2) exl3_gate_up_many_kernel(const ExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  if (blockIdx.y >= *a.unit_count) return;
  const ExpertUnit unit = a.units[blockIdx.y];
  const Exl3Expert& e = a.table[unit.expert];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  float* gate = reinterpret_cast<float*>(shared);
  float* z = reinterpret_cast<float*>(shared + kUnitTileBytes);
  for (int projection = 0; projection < 2; ++projection) {
    const Exl3Matrix& m = projection == 0 ? e.gate : e.up;
    unit_columns<Book, kUnitGroups>(m, shared + kUnitTileBytes, a.hidden, a.width, block, a.gate_splits,
                                    (projection == 0 ? a.gate_xh : a.up_xh) + unit.begin * 16, a.pairs, unit.count);
    for (int r = warp; r < unit.count; r += 8) {
      float4* at = reinterpret_cast<float4*>(gate + r * kColumnStride) + lane;
      const float4 y = output_block(*reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane),
                                    m.svh + block * 128, nullptr, lane);
      if (projection == 0) {
        *at = y;
        continue;
      }
      store_rotated(a.down_xh, a.pairs, unit.begin + r, block, lane,
                    rotate_block(activate(*at, y), load_half4(e.down.suh + block * 128 + 4 * lane), lane));
    }
    __syncthreads();
  }
}

// Grid: (hidden/128, most units).
template <exl3::Codebook Book>
__global__ void __launch_bounds__(kFewThreads, 2) exl3_down_many_kernel(const ExpertArgs a) {
  extern __shared__ __align__(16) std::byte shared[];
  if (blockIdx.y >= *a.unit_count) return;
  const ExpertUnit unit = a.units[blockIdx.y];
  const Exl3Matrix& m = a.table[unit.expert].down;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, block = blockIdx.x;
  unit_columns<Book, kUnitGroups>(m, shared, a.width, a.hidden, block, a.down_splits, a.down_xh + unit.begin * 16,
                                  a.pairs, unit.count);
  const float* z = reinterpret_cast<const float*>(shared);
  for (int r = warp; r < unit.count; r += 8)
    *reinterpret_cast<float4*>(a.slots + a.order[unit.begin + r] * a.hidden + block * 128 + 4 * lane) = output_block(
        *reinterpret_cast<const float4*>(z + r * kColumnStride + 4 * lane), m.svh + block * 128, nullptr, lane);
}

// Launch the projections of one codebook; defined in the units exl3_experts_*.cu.
template <exl3::Codebook Book>
void launch_experts_few(const ExpertArgs& a, cudaStream_t stream);
template <exl3::Codebook Book>
void launch_experts_many(const ExpertArgs& a, int most_units, cudaStream_t stream);

template <exl3::Codebook Book>
void launch_experts_few_here(const ExpertArgs& a, cudaStream_t stream) {
  const auto pairs = static_cast<unsigned>(a.pairs);
  launch("exl3_gate_up_few_kernel", exl3_gate_up_few_kernel<Book>,
         dim3(static_cast<unsigned>(a.width / 128), 2 * a.gate_splits, pairs), kFewThreads, 0, true, stream, a);
  launch("exl3_down_few_kernel", exl3_down_few_kernel<Book>,
         dim3(static_cast<unsigned>(a.hidden / 128), a.down_splits, pairs), kFewThreads, 0, true, stream, a);
}

template <exl3::Codebook Book>
void launch_experts_many_here(const ExpertArgs& a, int most_units, cudaStream_t stream) {
  constexpr int kGateBytes = kUnitTileBytes + kUnitBytes;
  static const cudaError_t allowed =
      cudaFuncSetAttribute(exl3_gate_up_many_kernel<Book>, cudaFuncAttributeMaxDynamicSharedMemorySize, kGateBytes);
  check_cuda(allowed, "exl3_gate_up_many_kernel");
  launch("exl3_gate_up_many_kernel", exl3_gate_up_many_kernel<Book>,
         dim3(static_cast<unsigned>(a.width / 128), most_units), kFewThreads, kGateBytes, false, stream, a);
  launch("exl3_down_many_kernel", exl3_down_many_kernel<Book>, dim3(static_cast<unsigned>(a.hidden / 128), most_units),
         kFewThreads, kUnitBytes, false, stream, a);
}

}  // namespace fnx::cuda
