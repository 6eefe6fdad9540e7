#include <cuda_bf16.h>

#include "kernels/cuda/qsa_device.cuh"

namespace fnx::cuda {

namespace {

constexpr int kWarps = 4;

// Norms and rotates a head held as element lane + 32 j in x[j]. `shared` has kEach * 32 floats of this warp.
template <int kEach>
__device__ __forceinline__ void norm_rope(float (&x)[kEach], const float* weight, float eps, const float* inv_freq,
                                          int rotary, int position, float* shared) {
  const int lane = threadIdx.x % 32, half = rotary / 2;
  float sum = 0;
#pragma unroll
  for (int j = 0; j < kEach; ++j) sum = fmaf(x[j], x[j], sum);
  const float scale = 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(kEach * 32) + eps);
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    x[j] = x[j] * scale * (1.0f + weight[j * 32 + lane]);
    shared[j * 32 + lane] = x[j];
  }
  __syncwarp();
#pragma unroll
  for (int j = 0; j < kEach; ++j) {
    const int e = j * 32 + lane;
    if (e >= rotary) continue;
    const bool second = e >= half;
    const float other = shared[second ? e - half : e + half];
    float s, c;
    sincosf(static_cast<float>(position) * inv_freq[second ? e - half : e], &s, &c);
    x[j] = second ? fmaf(x[j], c, other * s) : fmaf(x[j], c, -(other * s));
  }
  __syncwarp();
}

template <int kEach>
__device__ __forceinline__ void load_row(float (&x)[kEach], const float* from) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) x[j] = from[j * 32 + threadIdx.x % 32];
}
template <int kEach>
__device__ __forceinline__ void store_row(const float (&x)[kEach], float* to) {
#pragma unroll
  for (int j = 0; j < kEach; ++j) to[j * 32 + threadIdx.x % 32] = x[j];
}

__device__ __forceinline__ void store_page(const float (&x)[8], const QsaCache& cache, const KvPages& pages,
                                           int64_t place, int kv_heads, int kv) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < 8; ++j)
    if (cache.dtype == DType::BF16)
      kv_at<__nv_bfloat16>(cache, pages, place, kv_heads, kv)[j * 32 + lane] = __float2bfloat16_rn(x[j]);
    else
      kv_at<float>(cache, pages, place, kv_heads, kv)[j * 32 + lane] = x[j];
}

// Pools a block whose raw keys from `start` on are rows of the launch, the ones before in the slot's state.
__device__ void pool_block(const QsaWriteParams& p, const LaneRow& l, int block, float* shared) {
  const QsaShape& s = p.shape;
  const int ratio = static_cast<int>(s.ratio);
  const int64_t width = (s.index_heads + 1) * kIndexDim;
  float sum[4] = {}, x[4];
  for (int j = 0; j < ratio; ++j) {
    const int t = block * ratio + j, row = l.first_row + t - l.start;
    load_row(x, t >= l.start
                    ? p.index + row * width + s.index_heads * kIndexDim
                    : p.cache.raw_keys + (l.slot * p.cache.ring + t % static_cast<int>(p.cache.ring)) * kIndexDim);
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[i] += x[i];
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) sum[i] /= static_cast<float>(ratio);
  norm_rope(sum, p.index_k_norm, p.index_k_eps, p.inv_freq, static_cast<int>(s.rotary), block * ratio, shared);
  store_row(sum, p.cache.index_keys + block_place(s, l.slot, block) * kIndexDim);
}

// One warp a head of a row: queries, keys, values, index queries, pooled block; then one warp a lane.
__global__ void __launch_bounds__(32 * kWarps) qsa_write_kernel(QsaWriteParams p) {
  wait_previous();
  __shared__ float buffers[kWarps][kHeadDim];
  const QsaShape& s = p.shape;
  float* shared = buffers[threadIdx.x / 32];
  const int heads = static_cast<int>(s.heads), kv = static_cast<int>(s.kv_heads), ih = static_cast<int>(s.index_heads);
  const int ratio = static_cast<int>(s.ratio), rotary = static_cast<int>(s.rotary);
  const int64_t units = heads + 2 * kv + ih + 1, unit = int64_t{blockIdx.x} * kWarps + threadIdx.x / 32;
  const int64_t index_width = (ih + 1) * kIndexDim;

  if (unit >= s.rows * units) {  // of a lane: the block that began before this launch, then the raw keys to keep
    const int64_t i = unit - s.rows * units;
    if (i >= s.lanes.count) return;
    const int4 t = reinterpret_cast<const int4*>(s.lanes.table)[i];
    const LaneRow l{t.x, t.y, t.z, t.w};
    const int end = l.start + l.rows, block = l.start / ratio;
    if (l.start % ratio != 0 && (block + 1) * ratio <= end) pool_block(p, l, block, shared);
    for (int position = max(l.start, end - static_cast<int>(p.cache.ring)); position < end; ++position) {
      float x[4];
      load_row(x, p.index + (l.first_row + position - l.start) * index_width + ih * kIndexDim);
      store_row(x, p.cache.raw_keys + (l.slot * p.cache.ring + position % static_cast<int>(p.cache.ring)) * kIndexDim);
    }
    return;
  }
  const int r = static_cast<int>(unit / units);
  int u = static_cast<int>(unit % units);
  const LaneRow l = find_lane(s.lanes, r);
  if (l.slot < 0) return;
  const int position = l.start + r - l.first_row;
  float x[8], y[4];
  if (u < heads) {
    float* q = p.query_gate + (int64_t{r} * heads + u) * 2 * kHeadDim;
    load_row(x, q);
    norm_rope(x, p.q_norm, p.q_eps, p.inv_freq, rotary, position, shared);
    return store_row(x, q);
  }
  u -= heads;
  if (u < 2 * kv) {
    const int head = u % kv;
    const int64_t row = (int64_t{r} * kv + head) * kHeadDim;
    const int64_t place = token_place(s, l.slot, position);
    load_row(x, (u < kv ? p.key : p.value) + row);
    if (u >= kv) return store_page(x, p.cache, p.cache.values, place, kv, head);
    norm_rope(x, p.k_norm, p.k_eps, p.inv_freq, rotary, position, shared);
    store_row(x, p.key + row);
    return store_page(x, p.cache, p.cache.keys, place, kv, head);
  }
  u -= 2 * kv;
  if (u < ih) {
    float* q = p.index + r * index_width + u * kIndexDim;
    load_row(y, q);
    norm_rope(y, p.index_q_norm, p.index_q_eps, p.inv_freq, rotary, position, shared);
    return store_row(y, q);
  }
  const int block = position / ratio;
  if ((position + 1) % ratio == 0 && block * ratio >= l.start) pool_block(p, l, block, shared);
}

}  // namespace

void qsa_write(const QsaWriteParams& p, cudaStream_t stream) {
  const QsaShape& s = p.shape;
  check_qsa(s, "qsa_write");
  require(p.cache.dtype == DType::BF16 || p.cache.dtype == DType::F32, "qsa_write",
          "BF16 or F32 pages (bytes of an element)", {static_cast<int64_t>(dtype_size(p.cache.dtype))});
  require(p.cache.ring >= s.ratio && p.cache.ring % s.ratio == 0, "qsa_write",
          "a ring of raw keys of whole blocks (ring, ratio)", {p.cache.ring, s.ratio});
  if (s.rows == 0 || s.lanes.count == 0) return;
  const int64_t units = s.rows * (s.heads + 2 * s.kv_heads + s.index_heads + 1) + s.lanes.count;
  launch("qsa_write", qsa_write_kernel, blocks_of(units, kWarps), 32 * kWarps, 0, stream, p);
}

}  // namespace fnx::cuda
