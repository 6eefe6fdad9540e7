// Plain linear layers of prompts: tiles of 128 rows by 64 outputs, the sums of plain_linear.
#include "kernels/cuda/plain_tile.cuh"

#include <algorithm>

namespace fnx::cuda {

namespace {

constexpr int kWarps = 4, kThreads = 32 * kWarps, kStages = 3;
constexpr int kWarpRows = 2;          // tiles of 16 rows of a warp
constexpr int kBlockTiles = 4;        // of outputs: more leave the registers no room for weights on their way
constexpr int64_t kSlots = 132 * 2;   // for blocks, on the nominal card of plan_splits
constexpr int64_t kManyBlocks = 512;  // from here on the last blocks of a launch do not count

constexpr int kRows = kWarps * kWarpRows * 16, kOuts = kBlockTiles * kTileOut, kEights = kOuts / 8;
constexpr int kQuads = kEights * kWarpRows,
              kAllQuads = kQuads + kWarpRows;  // a thread's fours of sums; the side's last
constexpr int kBlockQuads = kAllQuads * kThreads;
constexpr int kColumns = kOuts + 8;  // with the side's

// The side tile is a second matrix of at most 16 outputs: the first blocks of a row of them have eight each.
struct Stage {
  float rows[kRows * kUnit];
  __half weights[kColumns * kUnit];
};
static_assert(kStages * sizeof(Stage) >= kRows * kColumns * sizeof(float));

struct TileParams {
  PlainLaunch p;
  int tiles, all_tiles;  // of 16 outputs: of the first matrix; of both, without a side tile
  int group;             // splits of a block
  bool side;
};

__device__ __forceinline__ bool has_side(const TileParams& q) { return q.side && blockIdx.x * 8 < q.p.matrix[1].out; }

// What a column of a block is: an output of one of the matrices, or of none.
struct Column {
  bool second;
  int out;  // -1: none
};
__device__ __forceinline__ Column column_of(const TileParams& q, int column) {
  if (column >= kOuts) {
    const int out = static_cast<int>(blockIdx.x) * 8 + column - kOuts;
    return {true, q.side && out < q.p.matrix[1].out ? out : -1};
  }
  const int tile = static_cast<int>(blockIdx.x) * kBlockTiles + column / kTileOut;
  const bool second = tile >= q.tiles;
  const int out = (tile - (second ? q.tiles : 0)) * kTileOut + column % kTileOut;
  return {second, tile < q.all_tiles && out < q.p.matrix[second].out ? out : -1};
}

// Row and column of the first of a thread's four sums; then come the next column, and both eight rows on.
struct Place {
  int row, column;
};
__device__ __forceinline__ Place place_of(int quad) {
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  return {(warp * kWarpRows + quad % kWarpRows) * 16 + g, quad / kWarpRows * 8 + 2 * t};
}

// The sums that this thread's block keeps of a split, or of all before; apart by kThreads.
__device__ __forceinline__ float4* kept_sums(const TileParams& q, int slot) {
  const int64_t block = (int64_t{slot} * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  return reinterpret_cast<float4*>(q.p.partials) + block * kBlockQuads + threadIdx.x;
}

// blockIdx: outputs, rows, group of splits. One group gives the output; of several, the first leaves its running sum
// and the others each split's, and plain_add_kernel adds them.
__global__ void __launch_bounds__(kThreads, 2) plain_tile_kernel(const __grid_constant__ TileParams q) {
  extern __shared__ __align__(16) unsigned char memory[];
  const PlainLaunch& p = q.p;
  Stage* const stages = stages_in<Stage>(memory);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int warp_row = warp * kWarpRows * 16;
  const int in = static_cast<int>(p.in);
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const bool side_mine = has_side(q);

  const int first_split = blockIdx.z * q.group, end_split = min(first_split + q.group, p.splits);
  const int split_units = kTileSlices * p.slice_units, end_unit = min(end_split * split_units, p.units);

  // This thread's pieces of 16 bytes of a unit of rows and of weights; a bit of out_here for each output that is one.
  constexpr int kRowCopies = kRows * kRowChunks / kThreads, kRowStep = kThreads / kRowChunks;
  constexpr int kOutStep = kThreads / kWeightChunks, kOutCopies = kOuts / kOutStep;
  static_assert(kOuts % kOutStep == 0 && kRowStep % 2 == 0 && kColumns - kOuts <= kOutStep);
  const int row_at = tid / kRowChunks, row_chunk = tid % kRowChunks;
  const int out_at = row_at * 2 + tid % 2, out_chunk = row_chunk / 2;  // where eight inputs end, both do
  const int rows_left = static_cast<int>(min(p.rows - first_row, int64_t{kRows})) - row_at;
  int unit = first_split * split_units;
  int inputs = min(in, end_unit * kUnit) - unit * kUnit - row_chunk * 4;  // that are left from the next piece on
  const float* row_from = p.x + (first_row + row_at) * p.in + unit * kUnit + row_chunk * 4;
  const __half* out_from[kOutCopies + 1];  // the side's last
  int out_here = 0;
#pragma unroll
  for (int i = 0; i <= kOutCopies; ++i) {
    const int column = i * kOutStep + out_at;
    const Column c = column < kColumns ? column_of(q, column) : Column{false, -1};
    out_here |= (c.out >= 0) << i;
    out_from[i] = p.matrix[c.second].w + int64_t{max(c.out, 0)} * p.in + unit * kUnit + out_chunk * 8;
  }
  const int row_to = row_at * kUnit + (row_chunk ^ (row_at & 1)) * 4;
  const auto load = [&](Stage& to) {
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i)
      copy_async16(to.rows + row_to + i * kRowStep * kUnit,
                   row_from + uint64_t{static_cast<uint32_t>(in)} * (i * kRowStep),
                   i * kRowStep < rows_left && inputs > 0);
#pragma unroll
    for (int i = 0; i <= kOutCopies; ++i)
      if (i < kOutCopies || (out_here >> kOutCopies) != 0)  // nobody reads a sum of the side without an output
        copy_async16(to.weights + ((i * kOutStep + out_at) * kWeightChunks + out_chunk) * 8, out_from[i],
                     (out_here >> i & 1) != 0 && inputs > 0);
    copy_commit();
    row_from += kUnit, inputs -= kUnit;
#pragma unroll
    for (int i = 0; i <= kOutCopies; ++i) out_from[i] += kUnit;
  };

  // What a warp multiplies of a unit: of the even groups and then of the odd ones all rows, and four eights of weights
  // at a time. Each is read while the tensor cores take what was read before.
  const int even_at = (warp_row + g) * kUnit + (2 * t ^ (g & 1)) * 4;
  const auto read_rows = [&](const Stage& from, int odd, float4(&to)[kWarpRows][2]) {
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
      for (int i = 0; i < 2; ++i)
        to[m][i] = *reinterpret_cast<const float4*>(from.rows + (even_at ^ odd * 4) + (m * 16 + i * 8) * kUnit);
  };
  constexpr int kTogether = 4;  // whose chains alternate
  uint4 w[kEights], w_side;
  const auto read_weights = [&](const Stage& from, int first) {
#pragma unroll
    for (int n = first; n < first + kTogether; ++n) w[n] = staged_eight(from.weights, n * 8);
  };
  float acc[kAllQuads][4];
  const auto multiply = [&](const RowHalf(&x)[kWarpRows], int odd, int first) {
#pragma unroll
    for (int lo = 0; lo < 2; ++lo)
#pragma unroll
      for (int n = first; n < first + kTogether; ++n)
#pragma unroll
        for (int m = 0; m < kWarpRows; ++m) mma_step(acc[n * kWarpRows + m], x[m], w[n], odd, lo);
  };

  wait_previous();
#pragma unroll
  for (int i = 0; i < kStages; ++i) load(stages[i]);
  copy_wait<kStages - 1>();
  __syncthreads();
  float4 read[kWarpRows][2];
  RowHalf even[kWarpRows], odd[kWarpRows];
  const auto split_rows = [&](RowHalf(&to)[kWarpRows]) {
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m) to[m] = RowHalf(read[m][0], read[m][1]);
  };
  read_rows(stages[0], 0, read);
  read_weights(stages[0], 0);
  split_rows(even);
  Stage* stage = stages;
  float sum[kQuads][4];
  // The side's sums, which the registers have no room for; its acc has them after each slice.
  auto* side_sum = reinterpret_cast<float4*>(stages + kStages) + tid;
  for (int split = first_split; split < end_split; ++split) {
    const int split_end = min((split + 1) * split_units, p.units);
#pragma unroll
    for (int i = 0; i < kQuads; ++i) sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0.0f;
#pragma unroll
    for (int m = 0; m < kWarpRows; ++m) side_sum[m * kThreads] = make_float4(0, 0, 0, 0);
    while (unit < split_end) {
#pragma unroll
      for (int i = 0; i < kAllQuads; ++i) acc[i][0] = acc[i][1] = acc[i][2] = acc[i][3] = 0.0f;
      const int slice_end = min(unit + p.slice_units, split_end);
      for (; unit < slice_end; ++unit) {
        read_rows(*stage, 1, read);
        read_weights(*stage, kTogether);
        if (side_mine) w_side = staged_eight(stage->weights, kOuts);
        multiply(even, 0, 0);
        split_rows(odd);
        multiply(even, 0, kTogether);
        if (side_mine)
#pragma unroll
          for (int i = 0; i < 2 * kWarpRows; ++i)
            mma_step(acc[kQuads + i % kWarpRows], even[i % kWarpRows], w_side, 0, i / kWarpRows);
        // The next unit is there, and this one's stage is free.
        copy_wait<kStages - 2>();
        __syncthreads();
        Stage* next = stage + 1 == stages + kStages ? stages : stage + 1;
        read_rows(*next, 0, read);
        multiply(odd, 1, 0);
        read_weights(*next, 0);
        load(*stage);
        split_rows(even);
        multiply(odd, 1, kTogether);
        if (side_mine)
#pragma unroll
          for (int i = 0; i < 2 * kWarpRows; ++i)
            mma_step(acc[kQuads + i % kWarpRows], odd[i % kWarpRows], w_side, 1, i / kWarpRows);
        stage = next;
      }
#pragma unroll
      for (int n = 0; n < kQuads; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) sum[n][i] += acc[n][i];
#pragma unroll
      for (int m = 0; m < kWarpRows; ++m) {
        float4& side = side_sum[m * kThreads];
        float(&v)[4] = acc[kQuads + m];
        v[0] = side.x + v[0], v[1] = side.y + v[1], v[2] = side.z + v[2], v[3] = side.w + v[3];
        side = make_float4(v[0], v[1], v[2], v[3]);
      }
    }
    const bool keep = gridDim.z > 1 || split + 1 < p.splits, more = blockIdx.z == 0 && split > 0;
    float4* kept = kept_sums(q, blockIdx.z == 0 ? 0 : split);
    float4 before[kAllQuads] = {};
    if (more)
#pragma unroll
      for (int i = 0; i < kAllQuads; ++i)
        if (i < kQuads || side_mine) before[i] = __ldcg(kept + i * kThreads);
#pragma unroll
    for (int i = 0; i < kAllQuads; ++i) {
      float(&v)[4] = i < kQuads ? sum[i] : acc[i];
      if (more)
        v[0] = before[i].x + v[0], v[1] = before[i].y + v[1], v[2] = before[i].z + v[2], v[3] = before[i].w + v[3];
      if (keep && (i < kQuads || side_mine)) __stcg(kept + i * kThreads, make_float4(v[0], v[1], v[2], v[3]));
    }
  }
  copy_wait<0>();
  if (gridDim.z > 1) return;
  // Through shared memory, so that the outputs leave in whole lines.
  auto* out = reinterpret_cast<float*>(memory);
  __syncthreads();
#pragma unroll
  for (int n = 0; n < kAllQuads; ++n) {
    if (n >= kQuads && !side_mine) break;
    const Place at = place_of(n);
    const float(&v)[4] = n < kQuads ? sum[n] : acc[n];
#pragma unroll
    for (int i = 0; i < 4; i += 2)
      *reinterpret_cast<float2*>(out + (at.row + i * 4) * kColumns + at.column) = make_float2(v[i], v[i + 1]);
  }
  __syncthreads();
  const int rows = static_cast<int>(min(p.rows - first_row, int64_t{kRows}));
#pragma unroll 1
  for (int column = lane; column < kColumns; column += 32) {
    const Column c = column_of(q, column);
    if (c.out < 0) continue;
#pragma unroll 4
    for (int row = warp; row < rows; row += kThreads / 32)
      put_output(p, p.matrix[c.second], first_row + row, c.out, out[row * kColumns + column]);
  }
}

// blockIdx: outputs, rows, four sums of a thread.
__global__ void __launch_bounds__(kThreads) plain_add_kernel(const __grid_constant__ TileParams q) {
  wait_previous();
  const int quad = blockIdx.z;
  if (quad >= kQuads && !has_side(q)) return;
  float4 sum = __ldcg(kept_sums(q, 0) + quad * kThreads);
#pragma unroll 8
  for (int split = q.group; split < q.p.splits; ++split) {
    const float4 v = __ldcg(kept_sums(q, split) + quad * kThreads);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  const Place at = place_of(quad);
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const Column c = column_of(q, at.column + i % 2);
    const int64_t row = int64_t{blockIdx.y} * kRows + at.row + i / 2 * 8;
    if (c.out >= 0) put_output(q.p, q.p.matrix[c.second], row, c.out, v[i]);
  }
}

TileParams tile_params(const PlainLaunch& p) {
  const int second = p.matrix[1].w != nullptr ? static_cast<int>(blocks_of(p.matrix[1].out, kTileOut)) : 0;
  TileParams q{p, static_cast<int>(blocks_of(p.matrix[0].out, kTileOut)), 0, p.splits, second == 1};
  q.all_tiles = q.tiles + (q.side ? 0 : second);
  return q;
}

}  // namespace

int64_t plain_tile_partials(int64_t rows, int64_t tiles, int64_t splits) {
  const int64_t blocks = std::max(2u, blocks_of(tiles, kBlockTiles)) * int64_t{blocks_of(rows, kRows)};
  return splits == 1 ? 0 : std::max(blocks, splits * std::min(blocks, kManyBlocks)) * kBlockQuads * 4;
}

void launch_plain_tile(const PlainLaunch& p, const char* name, cudaStream_t stream) {
  TileParams q = tile_params(p);
  constexpr int kBytes = kStages * sizeof(Stage) + kWarpRows * kThreads * sizeof(float4);
  const unsigned wide = blocks_of(q.all_tiles, kBlockTiles);
  dim3 grid(q.side ? std::max(wide, 2u) : wide, blocks_of(q.p.rows, kRows), 1);
  const int64_t blocks = int64_t{grid.x} * grid.y;
  const auto rounds = [&](unsigned z) { return blocks_of(blocks * z, kSlots); };
  for (int group = q.p.splits - 1; group > 0 && blocks < kManyBlocks; --group) {
    const unsigned z = blocks_of(q.p.splits, group);
    if (rounds(z) * grid.z < rounds(grid.z) * z) q.group = group, grid.z = z;
  }
  check_cuda(cudaFuncSetAttribute(plain_tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), name);
  launch(name, plain_tile_kernel, grid, kThreads, kBytes, stream, q);
  if (grid.z == 1) return;
  grid.z = q.side ? kAllQuads : kQuads;
  launch(name, plain_add_kernel, grid, kThreads, 0, stream, q);
}

}  // namespace fnx::cuda
