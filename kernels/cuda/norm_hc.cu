#include "kernels/cuda/norm_hc.h"

#include "kernels/cuda/hc_row.h"
#include "kernels/cuda/hc_tile.h"
#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

namespace {

__device__ __forceinline__ float4 fma4(float g, float4 y, float4 x) {
  return make_float4(fmaf(g, y.x, x.x), fmaf(g, y.y, x.y), fmaf(g, y.z, x.z), fmaf(g, y.w, x.w));
}

// One block a group of a row. Up to four float4 a thread stay in registers; a longer group is read again. kInject: x is
// completed first, in place; a group is a stream.
template <bool kInject>
__global__ void __launch_bounds__(256) grouped_norm_kernel(GroupedNormParams p, HcInjectParams lacking) {
  constexpr int kKept = 4;
  __shared__ float sums[8];
  const int64_t at = int64_t{blockIdx.x} * p.group;
  const float4* x = reinterpret_cast<const float4*>(p.x + at);
  const int64_t row = blockIdx.x / p.groups;
  const float4* w = reinterpret_cast<const float4*>(p.weight + blockIdx.x % p.groups * p.group);
  float4* out = reinterpret_cast<float4*>(p.out + at);
  const int n = static_cast<int>(p.group / 4);
  float4 v[kKept], wv[kKept];
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int i = j * 256 + threadIdx.x;
    wv[j] = i < n ? __ldg(w + i) : make_float4(0, 0, 0, 0);
  }
  wait_previous();
#pragma unroll
  for (int j = 0; j < kKept; ++j) {
    const int i = j * 256 + threadIdx.x;
    v[j] = i < n ? x[i] : make_float4(0, 0, 0, 0);
  }
  if constexpr (kInject) {
    const float g = lacking.inj[blockIdx.x];
    const float4* y = reinterpret_cast<const float4*>(lacking.y + row * p.group);
    float4* stack = reinterpret_cast<float4*>(lacking.stack + at);
#pragma unroll
    for (int j = 0; j < kKept; ++j) {
      const int i = j * 256 + threadIdx.x;
      if (i < n) stack[i] = v[j] = fma4(g, y[i], v[j]);
    }
    for (int i = kKept * 256 + threadIdx.x; i < n; i += 256) stack[i] = fma4(g, y[i], x[i]);
  }
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kKept; ++j) sum = dot4(v[j], v[j], sum);
  for (int i = kKept * 256 + threadIdx.x; i < n; i += 256) sum = dot4(x[i], x[i], sum);
  const float mean = block_sum<8>(sum, sums) / static_cast<float>(p.group);
  const float scale = 1.0f / sqrtf(mean + p.eps);
  const auto put = [&](int i, float4 a, float4 b) {
    out[i] = make_float4(a.x * scale * (1.0f + b.x), a.y * scale * (1.0f + b.y), a.z * scale * (1.0f + b.z),
                         a.w * scale * (1.0f + b.w));
  };
#pragma unroll
  for (int j = 0; j < kKept; ++j)
    if (j * 256 + threadIdx.x < n) put(j * 256 + threadIdx.x, v[j], wv[j]);
  for (int i = kKept * 256 + threadIdx.x; i < n; i += 256) put(i, x[i], w[i]);
}

// 16 kOutTiles elements of H and 8 kRowTiles rows a block; two warps a stream, one for each half of the rank. kAhead is
// 0 for many rows.
template <int kRowTiles, int kOutTiles, int kAhead>
__global__ void __launch_bounds__(kRowTiles == 1 ? 512 : 256) hc_up_kernel(HcMixParams p) {
  extern __shared__ float gated[];  // [streams][8 kRowTiles][16 kOutTiles]
  constexpr int kWide = kTileOut * kOutTiles, kCells = 8 * kRowTiles * kWide;
  const int64_t first_h = int64_t{blockIdx.x} * kWide, first_row = int64_t{blockIdx.y} * 8 * kRowTiles;
  const int streams = static_cast<int>(p.streams), warp = threadIdx.x / 32 % streams;
  const int g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  const bool second = threadIdx.x / 32 >= streams;  // half of the rank
  const int64_t wide = p.streams * p.hidden, first_out = warp * p.hidden + first_h;
  const int units = static_cast<int>((p.rank + kUnit - 1) / kUnit), half = (units + 1) / 2;
  float acc[kOutTiles][kRowTiles][4] = {};
  const ChainPlace place{static_cast<const __half*>(p.up),
                         p.low,
                         p.rank,
                         first_out,
                         (warp + 1) * p.hidden,
                         first_row,
                         p.rows,
                         second ? half : 0,
                         second ? units : half};
  float xn[kOutTiles][kRowTiles][4];
  const auto each = [&](auto fn) {  // fn(value of xn, of acc, row, element of H of this block)
#pragma unroll
    for (int o = 0; o < kOutTiles; ++o)
#pragma unroll
      for (int n = 0; n < kRowTiles; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int row = 8 * n + 2 * t + i % 2, h = o * kTileOut + g + i / 2 * 8;
          if (first_row + row < p.rows && first_h + h < p.hidden) fn(xn[o][n][i], acc[o][n][i], row, h);
        }
  };
  const auto load = [&] {
    if constexpr (kAhead > 0) wait_previous();
    each([&](float& x, float, int row, int h) { x = p.normed[(first_row + row) * wide + first_out + h]; });
  };
  if constexpr (kAhead > 0) {
    mma_chain_few<kRowTiles, kAhead>(place, acc, load);
  } else {
    wait_previous();
    mma_chain_many<kRowTiles, kOutTiles>(place, acc);
    load();
  }
  if (second) each([&](float, float mix, int row, int h) { gated[warp * kCells + row * kWide + h] = mix; });
  __syncthreads();
  if (!second)
    each([&](float x, float mix, int row, int h) {
      float& to = gated[warp * kCells + row * kWide + h];
      to = sigmoid(mix + to) * x;
    });
  __syncthreads();
  for (int cell = threadIdx.x; cell < kCells; cell += blockDim.x) {
    const int64_t row = first_row + cell / kWide, h = first_h + cell % kWide;
    if (row >= p.rows || h >= p.hidden) continue;
    float sum = gated[cell];
    for (int s = 1; s < p.streams; ++s) sum += gated[s * kCells + cell];
    p.u[row * p.hidden + h] = sum / static_cast<float>(p.streams);
  }
}

__global__ void __launch_bounds__(256) hc_inject_kernel(HcInjectParams p) {
  wait_previous();
  const int64_t quads = p.hidden / 4, i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.rows * p.streams * quads) return;
  const int64_t site = i / quads, row = site / p.streams;
  const float g = p.inj[site];
  const float4 y = reinterpret_cast<const float4*>(p.y)[row * quads + i % quads];
  float4& to = reinterpret_cast<float4*>(p.stack)[i];
  to = fma4(g, y, to);
}

void check_hc(const HcMixParams& p) {
  require(p.streams >= 2 && p.streams <= 8 && p.hidden > 0 && p.hidden % 16 == 0 && p.rank > 0 && p.rank % 8 == 0 &&
              p.rows >= 0,
          "hc_mix", "2 to 8 streams, H a multiple of 16, rank a multiple of 8 (streams, H, rank, rows)",
          {p.streams, p.hidden, p.rank, p.rows});
  require(aligned16({p.stack, p.norm_weight, p.down, p.up, p.inject, p.u, p.normed, p.low, p.work.partials}), "hc_mix",
          "16-byte alignment (streams, H, rank)", {p.streams, p.hidden, p.rank});
  require((p.lacking_inj == nullptr) == (p.lacking_y == nullptr) && aligned16({p.lacking_y}) &&
              (p.lacking_inj == nullptr || p.lacking_inj != p.inj),
          "hc_mix", "inj and y of what the stack lacks, y aligned to 16 bytes, inj not the one written (streams, H)",
          {p.streams, p.hidden});
}

void launch_norm(const GroupedNormParams& p, const HcInjectParams& lacking, cudaStream_t stream) {
  launch("grouped_norm", lacking.y != nullptr ? grouped_norm_kernel<true> : grouped_norm_kernel<false>,
         static_cast<unsigned>(p.rows * p.groups), 256, 0, stream, p, lacking);
}

}  // namespace

void grouped_norm(const GroupedNormParams& p, cudaStream_t stream) {
  require(p.group > 0 && p.group % 4 == 0 && p.groups > 0 && p.rows >= 0 && aligned16({p.x, p.weight, p.out}),
          "grouped_norm", "groups of a multiple of 4 elements, 16-byte alignment (group, groups, rows)",
          {p.group, p.groups, p.rows});
  if (p.rows == 0) return;
  launch_norm(p, {}, stream);
}

int64_t hc_counters(int64_t streams, int64_t hidden, int64_t rank) {
  return plain_counters(streams * hidden, rank) + plain_counters(streams * hidden, streams);
}

int64_t hc_partials(int64_t rows, int64_t streams, int64_t hidden, int64_t rank) {
  return plain_pair_partials(rows, streams * hidden, rank, streams);
}

void hc_down(const HcMixParams& p, cudaStream_t stream) {
  check_hc(p);
  if (p.rows == 0) return;
  if (hc_row_takes(p)) return hc_down_row(p, stream);
  launch_norm({p.stack, p.norm_weight, p.normed, p.rows, p.streams, p.hidden, p.eps},
              {p.lacking_inj, p.lacking_y, p.stack, p.rows, p.streams, p.hidden}, stream);
  const int64_t wide = p.streams * p.hidden;
  PlainLaunch l = plain_launch(wide, p.rank, p.normed, p.rows, p.work);  // inject is summed by the plan of down
  l.matrix[0] = {static_cast<const __half*>(p.down), nullptr, p.low, p.rank,
                 hc_tile_takes(p) ? Finish::SiluMeanHalves : Finish::SiluMean};
  l.matrix[1] = {static_cast<const __half*>(p.inject), nullptr, p.inj, p.streams, Finish::InjectMean};
  l.streams = static_cast<float>(p.streams);
  launch_plain(l, "hc_down", stream);
}

void hc_up(const HcMixParams& p, cudaStream_t stream) {
  check_hc(p);
  if (p.rows == 0) return;
  if (hc_row_takes(p)) return hc_up_row(p, stream);
  if (hc_tile_takes(p)) return hc_up_tile(p, stream);
  const auto tiles = static_cast<unsigned>(p.hidden / kTileOut), threads = static_cast<unsigned>(64 * p.streams);
  const size_t cells = p.streams * 8 * kTileOut * sizeof(float);  // of one row tile and one output tile
  if (p.rows <= 8 || p.streams > 4)
    launch("hc_up", hc_up_kernel<1, 1, 5>, dim3(tiles, blocks_of(p.rows, 8)), threads, cells, stream, p);
  else if (p.rows <= 16)
    launch("hc_up", hc_up_kernel<2, 1, 5>, tiles, threads, 2 * cells, stream, p);
  else
    launch("hc_up", hc_up_kernel<4, 1, 0>, dim3(tiles, blocks_of(p.rows, 32)), threads, 4 * cells, stream, p);
}

void hc_mix(const HcMixParams& p, cudaStream_t stream) {
  hc_down(p, stream);
  hc_up(p, stream);
}

void hc_inject(const HcInjectParams& p, cudaStream_t stream) {
  require(p.hidden % 4 == 0 && p.streams > 0 && p.rows >= 0 && aligned16({p.y, p.stack}), "hc_inject",
          "H a multiple of 4 and 16-byte alignment (H, streams, rows)", {p.hidden, p.streams, p.rows});
  if (p.rows == 0) return;
  launch("hc_inject", hc_inject_kernel, blocks_of(p.rows * p.streams * p.hidden / 4, 256), 256, 0, stream, p);
}

}  // namespace fnx::cuda
