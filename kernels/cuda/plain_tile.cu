// Plain linear layers of prompts: tiles of 128 rows by 128 outputs, the sums of plain_linear.
#include "kernels/cuda/plain_tile.cuh"

#include <algorithm>

namespace fnx::cuda {

namespace {

constexpr int kThreads = 256, kOutWarps = 2, kRowWarps = 4, kWarpRows = 2;  // tiles of 16 rows of a warp
constexpr int kRows = kRowWarps * kWarpRows * 16, kStages = 3;
constexpr int kWarpOuts = 4;  // output tiles of a warp: more leave its registers no room for weights on their way
constexpr int64_t kProcessors = 132;  // of the nominal card of plan_splits
constexpr int64_t kManyBlocks = 512;  // from here on the last blocks of a launch do not count

constexpr int kBlockTiles = kOutWarps * kWarpOuts, kOuts = kBlockTiles * kTileOut;
constexpr int kEights = 2 * kWarpOuts;  // of outputs of a warp

// The side tile is a second matrix of at most 16 outputs: the first two blocks of a row of them share it.
struct Stage {
  float rows[kRows * kUnit];
  __half weights[(kBlockTiles + 1) * kTileOut * kUnit];
};

struct TileParams {
  PlainLaunch p;
  int tiles, all_tiles;  // of 16 outputs: of the first matrix; of both, without a side tile
  int width;             // of a row of partial sums
  int group;             // splits of a block
  bool side;
};

// blockIdx: outputs, rows, group of splits. One group leaves its sums in the output; of several, the first leaves its
// running sum and the others each split's, and plain_add_kernel adds them.
__global__ void __launch_bounds__(kThreads, 1) plain_tile_kernel(const __grid_constant__ TileParams q) {
  extern __shared__ __align__(16) unsigned char memory[];
  const PlainLaunch& p = q.p;
  auto* stages = reinterpret_cast<Stage*>(memory);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int warp_out = warp % kOutWarps * kWarpOuts * kTileOut, warp_row = warp / kOutWarps * kWarpRows * 16;
  const int in = static_cast<int>(p.in), first_tile = blockIdx.x * kBlockTiles;
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  const bool idle = first_tile + warp_out / kTileOut >= q.all_tiles;
  const int side_part = q.side && blockIdx.x < 2 ? static_cast<int>(blockIdx.x) * 2 + warp % kOutWarps : -1;

  const int first_split = blockIdx.z * q.group, end_split = min(first_split + q.group, p.splits);
  const int split_units = kTileSlices * p.slice_units, end_unit = min(end_split * split_units, p.units);

  // This thread's pieces of 16 bytes of a unit of rows and of weights; null beyond the matrices.
  constexpr int kRowCopies = kRows * kRowChunks / kThreads, kRowStep = kThreads / kRowChunks;
  constexpr int kOutStep = kThreads / kWeightChunks, kOutCopies = (kOuts + kTileOut + kOutStep - 1) / kOutStep;
  const int row_at = tid / kRowChunks, row_chunk = tid % kRowChunks, out_chunk = tid % kWeightChunks;
  const float* row_from = p.x + (first_row + row_at) * p.in + row_chunk * 4;
  const int rows_left = static_cast<int>(min(p.rows - first_row, int64_t{kRows})) - row_at;
  const __half* out_from[kOutCopies];
#pragma unroll
  for (int i = 0; i < kOutCopies; ++i) {
    const int at = i * kOutStep + tid / kWeightChunks, tile = first_tile + at / kTileOut;
    const bool of_side = at >= kOuts, second = of_side || tile >= q.tiles;
    const int out = of_side ? at - kOuts : at % kTileOut + (tile - (second ? q.tiles : 0)) * kTileOut;
    const bool here = (of_side ? q.side && blockIdx.x < 2 : tile < q.all_tiles) && out < p.matrix[second].out;
    out_from[i] = here ? p.matrix[second].w + int64_t{out} * p.in + out_chunk * 8 : nullptr;
  }
  const auto load = [&](int unit, int at) {
    Stage& to = stages[at];
    const int k = unit * kUnit;
    if (unit < end_unit) {
#pragma unroll
      for (int i = 0; i < kRowCopies; ++i) {
        const bool here = i * kRowStep < rows_left && k + row_chunk * 4 < in;
        copy_async16(row_piece(to.rows, i * kRowStep + row_at, row_chunk),
                     here ? row_from + i * kRowStep * in + k : p.x, here);
      }
#pragma unroll
      for (int i = 0; i < kOutCopies; ++i) {
        const bool here = out_from[i] != nullptr && k + out_chunk * 8 < in;
        if ((i + 1) * kOutStep <= kOuts + kTileOut || i * kThreads + tid < (kOuts + kTileOut) * kWeightChunks)
          copy_async16(to.weights + (i * kThreads + tid) * 8, here ? out_from[i] + k : p.matrix[0].w, here);
      }
    }
    copy_commit();
  };

  wait_previous();
  int unit = first_split * split_units, stage = 0;
#pragma unroll
  for (int i = 0; i + 1 < kStages; ++i) load(unit + i, i);
  for (int split = first_split; split < end_split; ++split) {
    float sum[kEights][kWarpRows][4] = {}, side_sum[4] = {};
    const int split_end = min((split + 1) * split_units, p.units);
    while (unit < split_end) {
      float acc[kEights][kWarpRows][4] = {}, side[4] = {};
      const int slice_end = min(unit + p.slice_units, split_end);
      for (; unit < slice_end; ++unit) {
        copy_wait<kStages - 2>();
        __syncthreads();
        load(unit + kStages - 1, stage == 0 ? kStages - 1 : stage - 1);
        const Stage& from = stages[stage];
        stage = stage + 1 == kStages ? 0 : stage + 1;
        RowPair x[kWarpRows];
#pragma unroll
        for (int m = 0; m < kWarpRows; ++m)
          x[m] =
              RowPair(staged_row(from.rows, warp_row + m * 16 + g), staged_row(from.rows, warp_row + m * 16 + 8 + g));
        if (!idle) {
          constexpr int kTogether = 4;  // whose chains alternate
#pragma unroll
          for (int n0 = 0; n0 < kEights; n0 += kTogether) {
            uint4 w[kTogether];
#pragma unroll
            for (int n = 0; n < kTogether; ++n) w[n] = staged_eight(from.weights, warp_out + (n0 + n) * 8);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int n = 0; n < kTogether; ++n)
#pragma unroll
                for (int m = 0; m < kWarpRows; ++m) mma_step(acc[n0 + n][m], x[m], w[n], i);
          }
        }
        if (side_part >= 0) {
          const uint4 w = staged_eight(from.weights, kOuts + side_part / 2 * 8);
#pragma unroll
          for (int m = 0; m < kWarpRows; ++m)
            if (m == side_part % 2)
#pragma unroll
              for (int i = 0; i < 4; ++i) mma_step(side, x[m], w, i);
        }
      }
#pragma unroll
      for (int n = 0; n < kEights; ++n)
#pragma unroll
        for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[n][m][i] += acc[n][m][i];
#pragma unroll
      for (int i = 0; i < 4; ++i) side_sum[i] += side[i];
    }
    const auto put = [&](bool second, int64_t row, int out, float v) {
      const PlainMatrix& m = p.matrix[second];
      if (row >= p.rows || out >= m.out) return;
      const int slot = blockIdx.z == 0 ? 0 : split;
      float* to = gridDim.z == 1
                      ? m.y + row * m.out + out
                      : p.partials + (slot * p.rows + row) * q.width + (second ? q.tiles * kTileOut : 0) + out;
      if (blockIdx.z == 0 && split > 0) v = __ldcg(to) + v;
      if (gridDim.z == 1 && split + 1 == p.splits)
        put_output(p, m, row, out, v);
      else
        __stcg(to, v);
    };
#pragma unroll
    for (int n = 0; n < kEights; ++n) {
      const int tile = first_tile + warp_out / kTileOut + n / 2;
      if (tile >= q.all_tiles) break;
      const bool second = tile >= q.tiles;
#pragma unroll
      for (int m = 0; m < kWarpRows; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          put(second, first_row + warp_row + m * 16 + i / 2 * 8 + g,
              (tile - (second ? q.tiles : 0)) * kTileOut + n % 2 * 8 + 2 * t + i % 2, sum[n][m][i]);
    }
    if (side_part >= 0)
#pragma unroll
      for (int i = 0; i < 4; ++i)
        put(true, first_row + warp_row + side_part % 2 * 16 + i / 2 * 8 + g, side_part / 2 * 8 + 2 * t + i % 2,
            side_sum[i]);
  }
}

__global__ void __launch_bounds__(256) plain_add_kernel(const __grid_constant__ TileParams q) {
  wait_previous();
  const PlainLaunch& p = q.p;
  const auto first = static_cast<unsigned>(p.matrix[0].out);
  const unsigned outs = first + static_cast<unsigned>(p.matrix[1].w != nullptr ? p.matrix[1].out : 0);
  const unsigned at = blockIdx.x * 256 + threadIdx.x, row = at / outs, out = at % outs;
  if (row >= p.rows) return;
  const bool second = out >= first;
  const float* from = p.partials + int64_t{row} * q.width + (second ? q.tiles * kTileOut + out - first : out);
  float sum = __ldcg(from);
#pragma unroll 8
  for (int split = q.group; split < p.splits; ++split) sum += __ldcg(from + split * p.rows * q.width);
  put_output(p, p.matrix[second], row, second ? out - first : out, sum);
}

TileParams tile_params(const PlainLaunch& p) {
  const int second = p.matrix[1].w != nullptr ? static_cast<int>(blocks_of(p.matrix[1].out, kTileOut)) : 0;
  TileParams q{p, static_cast<int>(blocks_of(p.matrix[0].out, kTileOut)), 0, 0, p.splits, second == 1};
  q.all_tiles = q.tiles + (q.side ? 0 : second);
  q.width = (q.tiles + second) * kTileOut;
  return q;
}

}  // namespace

int64_t plain_tile_partials(int64_t rows, int64_t tiles, int64_t splits) {
  const int64_t most = int64_t{blocks_of(kManyBlocks, blocks_of(tiles, kBlockTiles))} * kRows;
  return splits == 1 ? 0 : splits * std::min(rows, most) * tiles * kTileOut;
}

void launch_plain_tile(const PlainLaunch& p, const char* name, cudaStream_t stream) {
  TileParams q = tile_params(p);
  constexpr int kBytes = kStages * sizeof(Stage);
  const unsigned wide = blocks_of(q.all_tiles, kBlockTiles);
  dim3 grid(q.side ? std::max(wide, 2u) : wide, blocks_of(q.p.rows, kRows), 1);
  const int64_t blocks = int64_t{grid.x} * grid.y;
  const auto rounds = [&](unsigned z) { return blocks_of(blocks * z, kProcessors); };
  for (int group = q.p.splits - 1; group > 0 && blocks < kManyBlocks; --group) {
    const unsigned z = blocks_of(q.p.splits, group);
    if (rounds(z) * grid.z < rounds(grid.z) * z) q.group = group, grid.z = z;
  }
  check_cuda(cudaFuncSetAttribute(plain_tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), name);
  launch(name, plain_tile_kernel, grid, kThreads, kBytes, stream, q);
  if (grid.z == 1) return;
  const int64_t outs = q.p.matrix[0].out + (q.p.matrix[1].w != nullptr ? q.p.matrix[1].out : 0);
  launch(name, plain_add_kernel, blocks_of(q.p.rows * outs, 256), 256, 0, stream, q);
}

}  // namespace fnx::cuda
