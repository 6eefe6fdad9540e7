#include "kernels/cuda/hc_row.h"

#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

namespace {

constexpr int kThreads = 32 * kTileSlices, kStreams = 4;
constexpr int kMostUnits = 5;   // of a warp's chain: its weights are in registers before the launch may read x
constexpr int kMostSplits = 8;  // of down, added by every block of up
constexpr int kMostInputs = kMostUnits * kTileSlices * kUnit;  // of a split
constexpr int kQuads = (kMostInputs / 4 + kThreads - 1) / kThreads;
constexpr float kInverse = 1.0f / kStreams;  // exact, so that its product is the quotient

// A warp's weights: lane 4 g + t has inputs 8 t .. 8 t + 7 of each unit of outputs g and g + 8 of the tile.
struct ChainWeights {
  uint4 w[kMostUnits][2];
  int units;
  // Outputs beyond the matrix repeat its last one; nobody reads their sums.
  __device__ ChainWeights(const __half* matrix, int in, int first_out, int last_out, int from, int to)
      : units(to - from) {
    const int lane = threadIdx.x % 32, out = first_out + lane / 4;
    const int64_t first_in = from * kUnit + 8 * (lane % 4);
    const __half* a = matrix + int64_t{min(out, last_out)} * in + first_in;
    const __half* b = matrix + int64_t{min(out + 8, last_out)} * in + first_in;
#pragma unroll
    for (int i = 0; i < kMostUnits; ++i)
      w[i][0] = load_weight(a + i * kUnit, i < units), w[i][1] = load_weight(b + i * kUnit, i < units);
  }
  // x: the inputs from 8 t of the first unit on, as put_halves lays them. The seven missing rows repeat this one;
  // nobody reads their sums. acc[0], acc[2]: outputs g and g + 8, in the lanes of t = 0.
  __device__ void multiply(const float* x, float (&acc)[4]) const {
    const auto load = [&](int i, int part) { return reinterpret_cast<const uint4*>(x + i * kUnit)[part]; };
    uint4 next_even = load(0, 0), next_odd = load(0, 1);
#pragma unroll
    for (int i = 0; i < kMostUnits; ++i) {
      if (i >= units) break;
      const uint4 even = next_even, odd = next_odd;
      if (i + 1 < kMostUnits) next_even = load(i + 1, 0), next_odd = load(i + 1, 1);
      mma_f16(acc, w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, even.x, even.y);
      mma_f16(acc, w[i][0].x, w[i][1].x, w[i][0].y, w[i][1].y, even.z, even.w);
      mma_f16(acc, w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, odd.x, odd.y);
      mma_f16(acc, w[i][0].z, w[i][1].z, w[i][0].w, w[i][1].w, odd.z, odd.w);
    }
  }
};

// Where two neighbouring inputs' halves lie: of each four, the four hi, then the four lo.
__device__ __forceinline__ void put_halves(float* x, int input, float a, float b) {
  uint32_t* to = reinterpret_cast<uint32_t*>(x + input / 4 * 4) + input % 4 / 2;
  split2(a, b, to[0], to[2]);
}

struct DownParams {
  HcMixParams p;
  int tiles;  // of down; one more for inject
  int units, slice_units;
};

// blockIdx: tile of 16 outputs, split. Every block finds the scales of the streams that its inputs lie in. kInject: it
// completes them for itself; hc_up_row writes them.
template <bool kInject>
__global__ void __launch_bounds__(kThreads, 3) hc_down_row_kernel(DownParams d) {
  __shared__ __align__(16) float x[kMostInputs];  // x, then its halves in place
  __shared__ __align__(16) float sums[kStreams][kTileSlices];
  __shared__ float cells[kTileSlices][kTileOut];
  let_next_start();  // hc_up_row reads nothing but weights before it has waited
  const HcMixParams& p = d.p;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int hidden = static_cast<int>(p.hidden), rank = static_cast<int>(p.rank);
  const bool second = blockIdx.x >= d.tiles;
  const int first_out = second ? 0 : blockIdx.x * kTileOut, outs = second ? kStreams : rank;
  const int first_unit = blockIdx.y * kTileSlices * d.slice_units, from = first_unit + warp * d.slice_units;
  const ChainWeights chain(static_cast<const __half*>(second ? p.inject : p.down), kStreams * hidden, first_out,
                           outs - 1, from, min(from + d.slice_units, d.units));
  const int k0 = first_unit * kUnit, count = min(d.slice_units * kTileSlices * kUnit, kStreams * hidden - k0);
  float4 wn[kQuads];
#pragma unroll
  for (int j = 0; j < kQuads; ++j)
    if (4 * (tid + j * kThreads) < count)
      wn[j] = __ldg(reinterpret_cast<const float4*>(p.norm_weight + k0) + tid + j * kThreads);
  wait_for_previous();

  const int s0 = k0 / hidden, s1 = (k0 + count - 1) / hidden;
#pragma unroll 1
  for (int s = s0; s <= s1; ++s) {
    constexpr int kKept = 3;
    const float4* from_x = reinterpret_cast<const float4*>(p.stack + s * hidden);
    float sum = 0;
#pragma unroll 1
    for (int i0 = tid; i0 < hidden / 4; i0 += kKept * kThreads) {
      float4 v[kKept];
#pragma unroll
      for (int j = 0; j < kKept; ++j)
        v[j] = i0 + j * kThreads < hidden / 4 ? from_x[i0 + j * kThreads] : make_float4(0, 0, 0, 0);
      if constexpr (kInject) {
        const float inj = p.lacking_inj[s];
        const float4* from_y = reinterpret_cast<const float4*>(p.lacking_y);
#pragma unroll
        for (int j = 0; j < kKept; ++j) {
          if (i0 + j * kThreads >= hidden / 4) break;
          const float4 y = from_y[i0 + j * kThreads];
          v[j] = make_float4(fmaf(inj, y.x, v[j].x), fmaf(inj, y.y, v[j].y), fmaf(inj, y.z, v[j].z),
                             fmaf(inj, y.w, v[j].w));
        }
      }
#pragma unroll
      for (int j = 0; j < kKept; ++j) {
        const int at = s * hidden + 4 * (i0 + j * kThreads) - k0;
        sum = dot4(v[j], v[j], sum);
        if (i0 + j * kThreads < hidden / 4 && at >= 0 && at < count) *reinterpret_cast<float4*>(x + at) = v[j];
      }
    }
    sum = warp_sum(sum);
    if (lane == 0) sums[s - s0][warp] = sum;
  }
  __syncthreads();
  const auto scale_of = [&](int s) {
    float sum = sums[s - s0][0];
#pragma unroll
    for (int w = 1; w < kTileSlices; ++w) sum += sums[s - s0][w];
    return 1.0f / sqrtf(sum / static_cast<float>(hidden) + p.eps);
  };
  int scaled = s0;
  float scale = scale_of(s0);
#pragma unroll
  for (int j = 0; j < kQuads; ++j) {
    const int at = 4 * (tid + j * kThreads);
    if (at >= count) break;
    if (s0 != s1 && (k0 + at) / hidden != scaled) scale = scale_of(scaled = (k0 + at) / hidden);
    const float4 v = *reinterpret_cast<const float4*>(x + at), w = wn[j];
    put_halves(x, at, __fmul_rn(__fmul_rn(v.x, scale), 1.0f + w.x), __fmul_rn(__fmul_rn(v.y, scale), 1.0f + w.y));
    put_halves(x, at + 2, __fmul_rn(__fmul_rn(v.z, scale), 1.0f + w.z), __fmul_rn(__fmul_rn(v.w, scale), 1.0f + w.w));
  }
  if (blockIdx.x == 0 && tid <= s1 - s0 && (s0 + tid) * hidden >= k0) p.normed[s0 + tid] = scale_of(s0 + tid);
  __syncthreads();
  float acc[4] = {};
  chain.multiply(x + (from - first_unit) * kUnit + 8 * t, acc);
  if (t == 0) cells[warp][g] = acc[0], cells[warp][g + 8] = acc[2];
  __syncthreads();
  if (tid >= kTileOut || first_out + tid >= outs) return;
  float sum = cells[0][tid];
#pragma unroll
  for (int s = 1; s < kTileSlices; ++s) sum += cells[s][tid];
  p.work.partials[blockIdx.y * (rank + kStreams) + (second ? rank : first_out) + tid] = sum;
}

// The splits' sums of two neighbouring columns, added in ascending order.
__device__ __forceinline__ float2 add_splits(const HcMixParams& p, int column, int splits) {
  const float* from = p.work.partials + column;
  const int step = static_cast<int>(p.rank) + kStreams;
  float2 v[kMostSplits];
#pragma unroll
  for (int s = 0; s < kMostSplits; ++s)
    if (s < splits) v[s] = *reinterpret_cast<const float2*>(from + s * step);
  float2 sum = v[0];
#pragma unroll
  for (int s = 1; s < kMostSplits; ++s)
    if (s < splits) sum.x += v[s].x, sum.y += v[s].y;
  return sum;
}

// blockIdx: 16 elements of H. Two warps a stream, one for each half of the rank.
template <bool kInject>
__global__ void __launch_bounds__(kThreads, 3) hc_up_row_kernel(HcMixParams p, int splits) {
  __shared__ __align__(16) float low[2 * kMostUnits * kUnit];  // halves
  __shared__ float mixes[2][kTileOut][kStreams];
  const int rank = static_cast<int>(p.rank), hidden = static_cast<int>(p.hidden), tid = threadIdx.x;
  const int g = tid % 32 / 4, t = tid % 4, stream = tid / 32 % kStreams, half = tid / 32 / kStreams;
  const int first_h = blockIdx.x * kTileOut, first_out = stream * hidden + first_h;
  const int units = rank / kUnit, from = half * ((units + 1) / 2);
  const ChainWeights chain(static_cast<const __half*>(p.up), rank, first_out, first_out + kTileOut - 1, from,
                           half == 0 ? (units + 1) / 2 : units);
  let_next_start();  // what follows a mix reads nothing but weights before it has waited
  // The first threads finish one element of one stream each, neighbours the streams of one element.
  const int my_stream = tid % kStreams, my_h = tid / kStreams % kTileOut;
  const int column = my_stream * hidden + first_h + my_h;
  const float wn = 1.0f + __ldg(p.norm_weight + column);
  wait_for_previous();

  const int columns = rank + (blockIdx.x == 0 && p.inject != nullptr ? kStreams : 0);
#pragma unroll 1
  for (int c = 2 * tid; c < columns; c += 2 * kThreads) {
    const float2 v = add_splits(p, c, splits);
    if (c < rank)
      put_halves(low, c, silu(v.x * kInverse), silu(v.y * kInverse));
    else
      p.inj[c - rank] = 2.0f * sigmoid(v.x * kInverse), p.inj[c - rank + 1] = 2.0f * sigmoid(v.y * kInverse);
  }
  const bool finishes = tid < kTileOut * kStreams;
  float x = 0, scale = 0, inj = 0, y = 0;  // underway during the products
  if (finishes) {
    x = p.stack[column], scale = p.normed[my_stream];
    if constexpr (kInject) inj = p.lacking_inj[my_stream], y = p.lacking_y[first_h + my_h];
  }
  __syncthreads();
  float acc[4] = {};
  chain.multiply(low + from * kUnit + 8 * t, acc);
  if (t == 0) mixes[half][g][stream] = acc[0], mixes[half][g + 8][stream] = acc[2];
  __syncthreads();
  if (!finishes) return;
  if constexpr (kInject) p.stack[column] = x = fmaf(inj, y, x);
  const float mix = sigmoid(mixes[0][my_h][my_stream] + mixes[1][my_h][my_stream]);
  const float v = __fmul_rn(mix, __fmul_rn(__fmul_rn(x, scale), wn));
  float sum = v;
#pragma unroll
  for (int s = 1; s < kStreams; ++s) sum += __shfl_down_sync(kFullWarp, v, s);
  if (my_stream == 0) p.u[first_h + my_h] = sum * kInverse;
}

PlainPlan plan_of(const HcMixParams& p) { return plain_plan(p.streams * p.hidden, p.rank); }

}  // namespace

bool hc_row_takes(const HcMixParams& p) {
  const PlainPlan plan = plan_of(p);
  return p.rows == 1 && p.streams == kStreams && p.rank % kUnit == 0 && p.rank <= 2 * kMostUnits * kUnit &&
         plan.slice_units <= kMostUnits && plan.splits <= kMostSplits;
}

void hc_down_row(const HcMixParams& p, cudaStream_t stream) {
  const PlainPlan plan = plan_of(p);  // inject is summed by the plan of down
  const DownParams d{p, static_cast<int>(blocks_of(p.rank, kTileOut)), static_cast<int>(plan.units),
                     static_cast<int>(plan.slice_units)};
  const dim3 grid(d.tiles + (p.inject != nullptr ? 1 : 0), static_cast<unsigned>(plan.splits));
  launch("hc_down", p.lacking_y != nullptr ? hc_down_row_kernel<true> : hc_down_row_kernel<false>, grid, kThreads, 0,
         stream, d);
}

void hc_up_row(const HcMixParams& p, cudaStream_t stream) {
  launch("hc_up", p.lacking_y != nullptr ? hc_up_row_kernel<true> : hc_up_row_kernel<false>,
         static_cast<unsigned>(p.hidden / kTileOut), kThreads, 0, stream, p, static_cast<int>(plan_of(p).splits));
}

}  // namespace fnx::cuda
