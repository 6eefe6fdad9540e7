#include <algorithm>

#include "kernels/cuda/qsa_attend.cuh"

namespace fnx::cuda {

namespace {

constexpr int kThreads = 256;
constexpr int kStride = kHeadDim + 8;  // of a row in shared memory: rows start 16 bytes apart modulo 128
constexpr int kWeightStride = kPartKeys + 8, kScoreStride = kPartKeys + 4;
constexpr int kWarpTiles = kHeadDim / 8 / (kThreads / 32);  // tiles of 8 dims of a warp's values

struct Tile {
  __nv_bfloat16 values[kPartKeys][kStride];
  __nv_bfloat16 keys[kPartKeys][kStride];
  __nv_bfloat16 query[kSplit][kMostGroup][kStride];
  union {
    float scores[kMostGroup][kScoreStride];
    __nv_bfloat16 weights[kSplit][kMostGroup][kWeightStride];  // once the scores are read
  };
  float highest[kMostGroup], total[kMostGroup];
};

__device__ __forceinline__ int64_t key_place(const QsaShape& s, const KeyList& k, int i) {
  if (i >= k.count) return -1;
  const int ratio = static_cast<int>(s.ratio);
  return token_place(s, k.slot, i < k.chosen ? k.selected[i / ratio] * ratio + i % ratio : k.tail + i - k.chosen);
}

__device__ __forceinline__ void split3(float x, __nv_bfloat16* to, int stride) {
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    const __nv_bfloat16 b = __float2bfloat16_rn(x);
    to[i * stride] = b;
    x -= __bfloat162float(b);
  }
}

__device__ void load_query(const QsaAttendParams& p, Tile& tile, int r, int kv) {
  const int group = static_cast<int>(p.shape.heads / p.shape.kv_heads);
  const float* q = p.query_gate + (int64_t{r} * p.shape.heads + kv * group) * 2 * kHeadDim;
#pragma unroll
  for (int i = 0; i < kMostGroup * kHeadDim / kThreads / 4; ++i) {
    const int head = (i * kThreads + threadIdx.x) / (kHeadDim / 4), d = threadIdx.x % (kHeadDim / 4) * 4;
    float4 v = make_float4(0, 0, 0, 0);
    if (head < group) v = *reinterpret_cast<const float4*>(q + head * 2 * kHeadDim + d);
    split3x4(v, &tile.query[0][head][d], kMostGroup * kStride);
  }
}

// Begins the copies of a part's keys, or values, a warp a key at a time: its lines arrive together. `place`: of a
// thread's key among all pages, -1 beyond the list.
constexpr int kKeyThreads = kThreads / kPartKeys;
__device__ __forceinline__ void load_keys(const QsaAttendParams& p, int64_t place, int kv, const KvPages& from,
                                          __nv_bfloat16 (&to)[kPartKeys][kStride]) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * (32 / kKeyThreads);
#pragma unroll
  for (int i = 0; i < 32 / kKeyThreads; ++i) {
    const int64_t at = __shfl_sync(kFullWarp, place, i * kKeyThreads);
    copy_async16(to[first + i] + lane * 8,
                 kv_at<const __nv_bfloat16>(p.cache, from, max(at, int64_t{0}), p.shape.kv_heads, kv) + lane * 8,
                 at >= 0);
  }
  copy_commit();
}
template <int kPending>
__device__ __forceinline__ void wait_keys() {
  copy_wait<kPending>();
  __syncthreads();
}

// Scores of a part to the tile; a warp has 16 keys and eight heads. `keys`: how many the list has from here on.
__device__ __forceinline__ void score_part(Tile& tile, int keys) {
  static_assert(kPartKeys / 16 * (kMostGroup / 8) == kThreads / 32);
  const int first_key = threadIdx.x / 32 % (kPartKeys / 16) * 16, first_head = threadIdx.x / 32 / (kPartKeys / 16) * 8;
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float score[kSplit][4] = {};  // keys (g, g, g + 8, g + 8), heads 2 t, 2 t + 1
#pragma unroll
  for (int k = 0; k < kHeadDim; k += 32) {
    uint32_t a[2][4];
#pragma unroll
    for (int h = 0; h < 2; ++h) load_matrices(a[h], &tile.keys[first_key + lane % 16][k + h * 16 + lane / 16 * 8]);
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      uint32_t b[4];
      load_matrices(b, &tile.query[i][first_head + lane % 8][k + lane / 8 * 8]);
      mma_bf16(score[i], a[0], b[0], b[1]);
      mma_bf16(score[i], a[1], b[2], b[3]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int key = first_key + g + i / 2 * 8;
    const float s = score[0][i] + score[1][i] + score[2][i];
    tile.scores[first_head + 2 * t + i % 2][key] = key < keys ? s * kScale : -INFINITY;
  }
}

// Their weights, maxima and totals to the tile; a warp has two heads.
__device__ __forceinline__ void weigh_part(Tile& tile) {
  constexpr int kHeads = kMostGroup / (kThreads / 32);
  const int head = threadIdx.x / 32 * kHeads, lane = threadIdx.x % 32;
  float s0[kHeads], s1[kHeads];
#pragma unroll
  for (int i = 0; i < kHeads; ++i) s0[i] = tile.scores[head + i][lane], s1[i] = tile.scores[head + i][lane + 32];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kHeads; ++i) {
    float m = fmaxf(s0[i], s1[i]);
#pragma unroll
    for (int d = 16; d > 0; d /= 2) m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, d));
    const float p0 = expf(s0[i] - m), p1 = expf(s1[i] - m);
    const float total = warp_sum(p0 + p1);
    split3(p0, &tile.weights[0][head + i][lane], kMostGroup * kWeightStride);
    split3(p1, &tile.weights[0][head + i][lane + 32], kMostGroup * kWeightStride);
    if (lane == 0) tile.highest[head + i] = m, tile.total[head + i] = total;
  }
}

// Weighted values: warp w has dims 32 w .. 32 w + 31; sum[n]: heads (g, g, g + 8, g + 8), dims 32 w + 8 n + 2 t (+ 1).
__device__ __forceinline__ void value_part(const Tile& tile, float (&sum)[kWarpTiles][4]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < kWarpTiles; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) sum[n][i] = 0;
#pragma unroll
  for (int k = 0; k < kPartKeys; k += 16) {
    uint32_t a[kSplit][4];
#pragma unroll
    for (int i = 0; i < kSplit; ++i) load_matrices(a[i], &tile.weights[i][lane % 16][k + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < kWarpTiles; n += 2) {
      uint32_t b[4];
      load_matrices_t(b, &tile.values[k + lane % 16][8 * kWarpTiles * warp + 8 * n + lane / 16 * 8]);
#pragma unroll
      for (int i = 0; i < kSplit; ++i) {
        mma_bf16(sum[n], a[i], b[0], b[1]);
        mma_bf16(sum[n + 1], a[i], b[2], b[3]);
      }
    }
  }
}

// Partials of (row, kv, part): highest [group], total [group], values [group][256].
__device__ __forceinline__ float* part_of(const QsaAttendParams& p, int64_t row, int kv, int part, int parts) {
  const int64_t group = p.shape.heads / p.shape.kv_heads;
  return p.partials + ((row * p.shape.kv_heads + kv) * parts + part) * group * (kHeadDim + 2);
}

// blockIdx: part, KV head, row.
__global__ void __launch_bounds__(kThreads) attend_parts_kernel(QsaAttendParams p) {
  extern __shared__ __align__(16) unsigned char memory[];
  Tile& tile = *reinterpret_cast<Tile*>(memory);
  const int part = blockIdx.x, kv = blockIdx.y, r = blockIdx.z;
  const KeyList list = key_list(p, r);
  load_query(p, tile, r, kv);
  wait_previous();  // only `selected` is of the previous launch, which is qsa_select
  if (part * kPartKeys >= list.count) return;
  const int64_t place = key_place(p.shape, list, part * kPartKeys + threadIdx.x / kKeyThreads);
  load_keys(p, place, kv, p.cache.keys, tile.keys);
  load_keys(p, place, kv, p.cache.values, tile.values);
  wait_keys<1>();
  score_part(tile, list.count - part * kPartKeys);
  __syncthreads();
  weigh_part(tile);
  wait_keys<0>();
  float sum[kWarpTiles][4];
  value_part(tile, sum);
  const int group = static_cast<int>(p.shape.heads / p.shape.kv_heads);
  const int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4, t = threadIdx.x % 4;
  float* to = part_of(p, r, kv, part, gridDim.x);
  if (threadIdx.x < group)
    to[threadIdx.x] = tile.highest[threadIdx.x], to[group + threadIdx.x] = tile.total[threadIdx.x];
#pragma unroll
  for (int n = 0; n < kWarpTiles; ++n)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      if (g + 8 * i < group)
        *reinterpret_cast<float2*>(to + 2 * group + (g + 8 * i) * kHeadDim + 8 * kWarpTiles * warp + 8 * n + 2 * t) =
            make_float2(sum[n][2 * i], sum[n][2 * i + 1]);
}

// Neighbouring parts are read in one access of shared memory.
__host__ __device__ constexpr int padded_parts(int parts) { return (parts + 3) / 4 * 4; }

// One block a head of a row, one thread a dim: merges the parts in ascending order. The factors of all parts follow
// from the running maxima, which are exact, so they are found side by side; `memory` holds two floats a part and the
// totals.
__global__ void __launch_bounds__(kHeadDim) merge_parts_kernel(QsaAttendParams p, int parts) {
  extern __shared__ __align__(16) unsigned char memory[];
  float2* factors = reinterpret_cast<float2*>(memory);
  float* totals = reinterpret_cast<float*>(factors + padded_parts(parts));
  const int heads = static_cast<int>(p.shape.heads), group = heads / static_cast<int>(p.shape.kv_heads);
  const int r = blockIdx.x / heads, head = blockIdx.x % heads, g = head % group, d = threadIdx.x, lane = d % 32;
  const int used = (key_list(p, r).count + kPartKeys - 1) / kPartKeys;
  if (used == 0) return;
  const float* from = part_of(p, r, head / group, 0, parts);
  const int64_t step = int64_t{group} * (kHeadDim + 2);
  const int64_t at = int64_t{r} * heads + head;
  const float gate = sigmoid(p.query_gate[(2 * at + 1) * kHeadDim + d]);
  wait_previous();
  if (d < 32) {
    float before = -INFINITY;  // maximum of the parts before this run of 32
    for (int i0 = 0; i0 < used; i0 += 32) {
      const int i = i0 + lane;
      const float m = i < used ? from[i * step + g] : -INFINITY;
      if (i < used) totals[i] = from[i * step + group + g];
      float top = m;
#pragma unroll
      for (int w = 1; w < 32; w *= 2) {
        const float other = __shfl_up_sync(kFullWarp, top, w);
        if (lane >= w) top = fmaxf(top, other);
      }
      top = fmaxf(top, before);
      const float above = __shfl_up_sync(kFullWarp, top, 1), was = lane == 0 ? before : above;
      if (i < used) factors[i] = i == 0 ? make_float2(0, 1) : make_float2(expf(was - top), expf(m - top));
      before = __shfl_sync(kFullWarp, top, 31);
    }
  }
  constexpr int kBatch = 36;  // parts in flight
  const float* values = from + 2 * group + g * kHeadDim + d;
  float sum = 0, total = 0, v[kBatch];
  for (int i0 = 0; i0 < used; i0 += kBatch) {
#pragma unroll
    for (int j = 0; j < kBatch; ++j) v[j] = i0 + j < used ? values[(i0 + j) * step] : 0.0f;
    if (i0 == 0) __syncthreads();
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int i = i0 + j;
      if (i >= used) break;
      const float2 f = factors[i];
      total = merged(total, totals[i], f, i == 0);
      sum = merged(sum, v[j], f, i == 0);
    }
  }
  p.out[at * kHeadDim + d] = gated(sum, total, gate);
}

// F32 pages: one block a KV head of a row, one thread a dim of the values.
__global__ void __launch_bounds__(kHeadDim) attend_f32_kernel(QsaAttendParams p) {
  wait_previous();
  __shared__ float query[kMostGroup][kHeadDim], scores[kMostGroup][kPartKeys], highest[kMostGroup], totals[kMostGroup];
  __shared__ int64_t place[kPartKeys];
  const int kv = blockIdx.x, r = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, d = threadIdx.x;
  const KeyList list = key_list(p, r);
  if (list.count == 0) return;
  const int heads = static_cast<int>(p.shape.heads), group = heads / static_cast<int>(p.shape.kv_heads);
  const int64_t first = int64_t{r} * heads + kv * group;
  for (int h = 0; h < group; ++h) query[h][d] = p.query_gate[(first + h) * 2 * kHeadDim + d];
  float sum[kMostGroup] = {};
  Running run[kMostGroup];
  for (int part = 0; part * kPartKeys < list.count; ++part) {
    __syncthreads();
    if (d < kPartKeys) place[d] = key_place(p.shape, list, part * kPartKeys + d);
    __syncthreads();
    for (int i = warp; i < kPartKeys; i += kHeadDim / 32) {
      float k[8];
#pragma unroll
      for (int j = 0; j < 8; ++j)
        k[j] = place[i] < 0 ? 0.0f
                            : kv_at<const float>(p.cache, p.cache.keys, place[i], p.shape.kv_heads, kv)[j * 32 + lane];
      for (int h = 0; h < group; ++h) {
        float dot = 0;
#pragma unroll
        for (int j = 0; j < 8; ++j) dot = fmaf(query[h][j * 32 + lane], k[j], dot);
        dot = warp_sum(dot);
        if (lane == 0) scores[h][i] = place[i] < 0 ? -INFINITY : dot * kScale;
      }
    }
    __syncthreads();
    for (int h = warp; h < group; h += kHeadDim / 32) {
      const float s0 = scores[h][lane], s1 = scores[h][lane + 32];
      float m = fmaxf(s0, s1);
#pragma unroll
      for (int w = 16; w > 0; w /= 2) m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, w));
      scores[h][lane] = expf(s0 - m), scores[h][lane + 32] = expf(s1 - m);
      const float total = warp_sum(scores[h][lane] + scores[h][lane + 32]);
      if (lane == 0) highest[h] = m, totals[h] = total;
    }
    __syncthreads();
    float weighted[kMostGroup] = {};
    for (int i = 0; i < kPartKeys && place[i] >= 0; ++i) {
      const float v = kv_at<const float>(p.cache, p.cache.values, place[i], p.shape.kv_heads, kv)[d];
#pragma unroll
      for (int h = 0; h < kMostGroup; ++h)
        if (h < group) weighted[h] = fmaf(scores[h][i], v, weighted[h]);
    }
#pragma unroll
    for (int h = 0; h < kMostGroup; ++h)
      if (h < group) {
        const float2 f = run[h].merge(highest[h], totals[h], part == 0);
        sum[h] = merged(sum[h], weighted[h], f, part == 0);
      }
  }
#pragma unroll
  for (int h = 0; h < kMostGroup; ++h)
    if (h < group)
      p.out[(first + h) * kHeadDim + d] =
          gated(sum[h], run[h].total, sigmoid(p.query_gate[(2 * (first + h) + 1) * kHeadDim + d]));
}

// An attribute of the current device, so it is set at every launch.
void allow_tile(void (*kernel)(QsaAttendParams)) {
  const cudaError_t e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Tile));
  require(e == cudaSuccess, "qsa_attend", "this much shared memory a block (bytes)", {sizeof(Tile)});
}

int64_t most_parts(const QsaShape& s) { return (s.blocks * s.ratio + s.ratio - 1 + kPartKeys - 1) / kPartKeys; }

}  // namespace

int64_t qsa_partials(const QsaShape& s) {
  return std::min(s.rows, kSpreadRows) * s.heads * most_parts(s) * (s.head_dim + 2);
}

void qsa_attend(const QsaAttendParams& p, cudaStream_t stream) {
  const QsaShape& s = p.shape;
  check_qsa(s, "qsa_attend");
  require(p.cache.dtype == DType::BF16 || p.cache.dtype == DType::F32, "qsa_attend",
          "BF16 or F32 pages (bytes of an element)", {static_cast<int64_t>(dtype_size(p.cache.dtype))});
  require(s.rows < 65536 &&
              aligned16({p.query_gate, p.cache.keys.near, p.cache.keys.far, p.cache.values.near, p.cache.values.far}),
          "qsa_attend", "fewer than 65536 rows, and queries and pages aligned to 16 bytes (rows)", {s.rows});
  if (s.rows == 0 || s.lanes.count == 0) return;
  const auto rows = static_cast<unsigned>(s.rows), kv = static_cast<unsigned>(s.kv_heads);
  if (p.cache.dtype == DType::F32) {
    launch("attend_f32", attend_f32_kernel, dim3(kv, rows), kHeadDim, 0, stream, p);
  } else if (s.rows <= kSpreadRows) {
    const auto parts = static_cast<unsigned>(most_parts(s));
    allow_tile(attend_parts_kernel);
    launch("attend_parts", attend_parts_kernel, dim3(parts, kv, rows), kThreads, sizeof(Tile), stream, p);
    launch("merge_parts", merge_parts_kernel, static_cast<unsigned>(s.rows * s.heads), kHeadDim,
           padded_parts(static_cast<int>(parts)) * 3 * sizeof(float), stream, p, static_cast<int>(parts));
  } else {
    attend_rows(p, stream);
  }
}

}  // namespace fnx::cuda
