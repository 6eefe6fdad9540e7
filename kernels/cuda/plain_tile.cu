// Plain linear layers of prompts: tiles of 160 outputs by 64 rows from shared memory, the sums of plain_linear.
#include <algorithm>
#include <climits>

#include "kernels/cuda/plain_finish.cuh"
#include "kernels/cuda/plain_tile.cuh"

namespace fnx::cuda {

namespace {

constexpr int kGroup = 128, kGroups = 2;     // a group of four warps multiplies every other split, or rows of its own
constexpr int kWarpOuts = 5, kWarpRows = 4;  // tiles of a warp
constexpr int kOuts = 2 * kWarpOuts * kTileOut, kRows = 2 * kWarpRows * 8;  // of a group
constexpr int kRowStages = 3, kWeightStages = 2;

// The side tile is a second matrix of at most 16 outputs: the first two blocks of a row of them share its row tiles.
struct Stage {
  float rows[kRowStages][kRows * kUnit];
  __half weights[kWeightStages][(kOuts + kTileOut) * kUnit];
};

struct TileParams {
  PlainLaunch p;
  int tiles, all_tiles;  // of 16 outputs: of the first matrix; of both, without a side tile
  bool side, share_rows;
};

__device__ __forceinline__ void group_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
__device__ __forceinline__ void group_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

__global__ void __launch_bounds__(kGroups* kGroup, 1) plain_tile_kernel(TileParams q) {
  extern __shared__ __align__(16) unsigned char memory[];
  const PlainLaunch& p = q.p;
  const int group = threadIdx.x / kGroup, tid = threadIdx.x % kGroup, warp = tid / 32, lane = tid % 32;
  const int g = lane / 4, t = lane % 4, warp_out = warp % 2 * kWarpOuts * kTileOut, warp_row = warp / 2 * kWarpRows * 8;
  Stage& stage = reinterpret_cast<Stage*>(memory)[group];
  const int in = static_cast<int>(p.in), first_tile = blockIdx.x * (kOuts / kTileOut);
  const int64_t first_row = (q.share_rows ? int64_t{blockIdx.y} : int64_t{blockIdx.y} * kGroups + group) * kRows;
  if (first_row >= p.rows) return;
  const int side_tile = q.side && blockIdx.x < 2 ? static_cast<int>(blockIdx.x) * 2 + warp % 2 : -1;
  const bool idle = first_tile + warp_out / kTileOut >= q.all_tiles;

  // Copies of this thread: 16-byte pieces of the rows and of the weights of a unit.
  constexpr int kRowCopies = kRows * kRowChunks / kGroup, kOutCopies = kOuts * kWeightChunks / kGroup;
  const int row_piece_of = tid % kRowChunks, out_piece = tid % kWeightChunks;
  const float* row_from = p.x + (first_row + tid / kRowChunks) * p.in + row_piece_of * 4;
  const int rows_left = static_cast<int>(min(p.rows - first_row, int64_t{kRows})) - tid / kRowChunks;
  const bool whole = first_tile + kOuts / kTileOut <= static_cast<int>(p.matrix[0].out) / kTileOut;
  const int first_out = first_tile * kTileOut + tid / kWeightChunks;
  const __half* out_from = p.matrix[0].w + int64_t{first_out} * p.in + out_piece * 8;  // of a whole block
  const auto place_of = [&](int i) -> const __half* {  // in any other; null beyond the matrices
    const int at = first_out + i * (kGroup / kWeightChunks), tile = at / kTileOut;
    const bool second = tile >= q.tiles;
    const int out = at - (second ? q.tiles * kTileOut : 0);
    if (tile >= q.all_tiles || out >= p.matrix[second].out) return nullptr;
    return p.matrix[second].w + int64_t{out} * p.in + out_piece * 8;
  };
  const bool copies_side = q.side && blockIdx.x < 2 && tid < kTileOut * kWeightChunks;
  const auto load_rows = [&](int at, int unit) {
    const int k = unit * kUnit;
#pragma unroll
    for (int i = 0; i < kRowCopies; ++i) {
      const int step = i * (kGroup / kRowChunks);
      const bool here = step < rows_left && k + row_piece_of * 4 < in;
      copy_async16(row_piece(stage.rows[at], step + tid / kRowChunks, row_piece_of), row_from + step * p.in + k, here);
    }
    copy_commit();
  };
  const auto load_weights = [&](int at, int unit) {
    const int k = unit * kUnit;
    __half* to = stage.weights[at] + tid * 8;
    const bool inside = k + out_piece * 8 < in;
    if (whole) {
#pragma unroll
      for (int i = 0; i < kOutCopies; ++i)
        copy_async16(to + i * kGroup * 8, out_from + i * (kGroup / kWeightChunks) * p.in + k, inside);
    } else {
#pragma unroll 1
      for (int i = 0; i < kOutCopies; ++i) {
        const __half* from = place_of(i);
        const bool here = inside && from != nullptr;
        copy_async16(to + i * kGroup * 8, here ? from + k : p.matrix[0].w, here);
      }
    }
    if (copies_side) {
      const int out = tid / kWeightChunks;
      const bool here = out < p.matrix[1].out && k + out_piece * 8 < in;
      copy_async16(to + kOuts * kUnit, here ? p.matrix[1].w + int64_t{out} * in + k + out_piece * 8 : p.matrix[0].w,
                   here);
    }
    copy_commit();
  };

  // This group's units in order: those of splits group, group + 2, .., or of all splits.
  const int split_step = q.share_rows ? kGroups : 1, first_split = q.share_rows ? group : 0;
  const int split_units = kTileSlices * p.slice_units;
  int load_split = first_split, load_unit = first_split * split_units;
  const auto next_unit = [&] {  // the unit to load next, or -1
    if (load_split >= p.splits) return -1;
    const int unit = load_unit++;
    if (load_unit >= min((load_split + 1) * split_units, p.units))
      load_split += split_step, load_unit = load_split * split_units;
    return unit;
  };
  wait_previous();
  // Rows are loaded two units ahead and weights one: groups of copies are rows 0, weights 0, rows 1, weights 1, ..
  int unit_ahead = next_unit(), row_stage = 0, weight_stage = 0;
  if (unit_ahead >= 0) load_rows(0, unit_ahead), load_weights(0, unit_ahead);
  unit_ahead = next_unit();
  if (unit_ahead >= 0)
    load_rows(1, unit_ahead);
  else
    copy_commit();

  for (int split = first_split; split < p.splits; split += split_step) {
    float sum[kWarpOuts][kWarpRows][4], side_sum[4];
    const int end = min((split + 1) * split_units, p.units);
    for (int slice = split * split_units; slice < end; slice += p.slice_units) {
      float acc[kWarpOuts][kWarpRows][4] = {}, side[4] = {};
      for (int unit = slice; unit < min(slice + p.slice_units, end); ++unit) {
        copy_wait<1>();
        group_barrier(1 + group, kGroup);
        if (unit_ahead >= 0)
          load_weights(weight_stage ^ 1, unit_ahead);
        else
          copy_commit();
        unit_ahead = next_unit();
        const int two_ahead = row_stage == 0 ? 2 : row_stage - 1;
        if (unit_ahead >= 0)
          load_rows(two_ahead, unit_ahead);
        else
          copy_commit();
        const __half* weights = stage.weights[weight_stage];
        const float* rows = stage.rows[row_stage];
        RowHalves x[kWarpRows];
#pragma unroll
        for (int n = 0; n < kWarpRows; ++n) x[n] = staged_row(rows, warp_row + n * 8 + g);
        if (!idle)
#pragma unroll
          for (int o = 0; o < kWarpOuts; ++o) {
            uint4 w[2];
            staged_weights(weights, warp_out + o * kTileOut, w);
#pragma unroll
            for (int i = 0; i < 4; ++i)
#pragma unroll
              for (int n = 0; n < kWarpRows; ++n) mma_step(acc[o][n], w, x[n], i);
          }
        if (side_tile >= 0) {
          uint4 w[2];
          staged_weights(weights, kOuts, w);
#pragma unroll
          for (int n = 0; n < kWarpRows; ++n)
            if (n == side_tile)
#pragma unroll
              for (int i = 0; i < 4; ++i) mma_step(side, w, x[n], i);
        }
        row_stage = row_stage == 2 ? 0 : row_stage + 1, weight_stage ^= 1;
      }
      const bool first = slice == split * split_units;
#pragma unroll
      for (int o = 0; o < kWarpOuts; ++o)
#pragma unroll
        for (int n = 0; n < kWarpRows; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i) sum[o][n][i] = first ? acc[o][n][i] : sum[o][n][i] + acc[o][n][i];
#pragma unroll
      for (int i = 0; i < 4; ++i) side_sum[i] = first ? side[i] : side_sum[i] + side[i];
    }
    // The output holds the sum of the splits before; a group takes its turn.
    if (q.share_rows && split > 0) group_barrier(3 + (split - 1) % 2, kGroups * kGroup);
    const auto cells = [&](auto fn) {  // fn(matrix, row, output, the sum of this split)
#pragma unroll
      for (int o = 0; o < kWarpOuts; ++o) {
        const int tile = first_tile + warp_out / kTileOut + o;
        const bool second = tile >= q.tiles;
        const PlainMatrix& m = p.matrix[second];
        const int out = (tile - (second ? q.tiles : 0)) * kTileOut + g;
#pragma unroll
        for (int n = 0; n < kWarpRows; ++n)
#pragma unroll
          for (int i = 0; i < 4; ++i)
            fn(m, first_row + warp_row + n * 8 + 2 * t + i % 2, tile < q.all_tiles ? out + i / 2 * 8 : INT_MAX,
               sum[o][n][i]);
      }
      if (side_tile >= 0)
#pragma unroll
        for (int i = 0; i < 4; ++i)
          fn(p.matrix[1], first_row + warp_row + side_tile * 8 + 2 * t + i % 2, g + i / 2 * 8, side_sum[i]);
    };
    if (split > 0)
      cells([&](const PlainMatrix& m, int64_t row, int out, float& v) {
        if (row < p.rows && out < m.out) v = __ldcg(m.y + row * m.out + out) + v;
      });
    if (split + 1 < p.splits)
      cells([&](const PlainMatrix& m, int64_t row, int out, float& v) {
        if (row < p.rows && out < m.out) __stcg(m.y + row * m.out + out, v);
      });
    else
      cells([&](const PlainMatrix& m, int64_t row, int out, float& v) {
        if (row < p.rows && out < m.out) m.y[row * m.out + out] = finished(m, out, v, p.streams);
      });
    if (q.share_rows && split + 1 < p.splits) group_arrive(3 + split % 2, kGroups * kGroup);
  }
}

TileParams tile_params(const PlainLaunch& p) {
  TileParams q{p, static_cast<int>(blocks_of(p.matrix[0].out, kTileOut)), 0, false, p.splits > 1};
  q.side = p.matrix[1].w != nullptr && p.matrix[1].out <= kTileOut;
  q.all_tiles = q.tiles;
  if (p.matrix[1].w != nullptr && !q.side) q.all_tiles += static_cast<int>(blocks_of(p.matrix[1].out, kTileOut));
  return q;
}

dim3 grid_of(const TileParams& q) {
  const unsigned wide = blocks_of(q.all_tiles, kOuts / kTileOut);
  return dim3(q.side ? std::max(wide, 2u) : wide, blocks_of(q.p.rows, q.share_rows ? kRows : kGroups * kRows));
}

}  // namespace

bool plain_tile_takes(const PlainLaunch& p) {
  constexpr unsigned kFill = 96;  // blocks that keep most multiprocessors of a card at work
  const dim3 grid = grid_of(tile_params(p));
  return grid.x * grid.y >= kFill;
}

void launch_plain_tile(const PlainLaunch& p, const char* name, cudaStream_t stream) {
  const TileParams q = tile_params(p);
  constexpr int kBytes = kGroups * sizeof(Stage);
  check_cuda(cudaFuncSetAttribute(plain_tile_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), name);
  launch(name, plain_tile_kernel, grid_of(q), kGroups * kGroup, kBytes, stream, q);
}

}  // namespace fnx::cuda
