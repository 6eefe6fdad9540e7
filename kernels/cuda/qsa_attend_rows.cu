// Attention of many rows: a block of two warps a KV head of a row. The warps share a part's keys for the scores and the
// 256 dims for the values; each copies what it multiplies, a chunk at a time, through a ring of its own, and meets the
// other twice a part: for the maxima and for the weights.
#include "kernels/cuda/qsa_attend.cuh"

namespace fnx::cuda {

namespace {

constexpr int kWarps = 2, kThreads = 32 * kWarps;
constexpr int kWarpKeys = kPartKeys / kWarps, kWarpDims = kHeadDim / kWarps;
constexpr int kKeyTiles = kWarpKeys / 8, kDimTiles = kWarpDims / 8;  // of a warp, as the tensor cores take them
// Four chunks of keys, then four of values, are a warp's of a part: 32 keys by 64 dims, and 16 keys by 128 dims. Rows
// lie without gaps; piece i of 16 bytes lies at i ^ row % 8, so that neither copies nor reads meet in a bank.
constexpr int kChunks = 4, kChunkBytes = 4096, kSlots = 3;
constexpr int kStepBytes = 32;  // sixteen dims
constexpr int kKeyRowBytes = kHeadDim / kChunks * 2, kValueRowBytes = kWarpDims * 2, kQueryRowBytes = kHeadDim * 2;
constexpr int kQueryBytes = kMostGroup * kQueryRowBytes;

struct RowTile {
  unsigned char query[kSplit][kQueryBytes];
  unsigned char ring[kWarps][kSlots][kChunkBytes];
  // Weights of the keys of each warp as the tensor cores take them, a step of sixteen keys after another; the gap
  // keeps the warps' apart in the banks.
  uint4 weights[kWarps][kSplit * kChunks * 16 + 4];
  float highest[kWarps][kMostGroup];
  float2 totals[kWarps][kMostGroup];
};

// A chunk row's piece of 16 bytes.
__device__ __forceinline__ int piece_at(int row, int row_bytes, int piece) {
  return row * row_bytes + (piece ^ row % 8) * 16;
}

// Key in the part of the warp's column `column`, of 32. Neighbours stay so, and the warps part at the last but one
// halving of the sum over the 64 keys, so that all before it are in a warp.
__device__ __forceinline__ int key_of_column(int warp, int column) {
  const int pair = column % 8 / 2;
  return column / 8 * 16 + pair % 2 * 8 + pair / 2 * 4 + warp * 2 + column % 2;
}

__device__ __forceinline__ void load_query(const QsaAttendParams& p, RowTile& tile, int r, int kv) {
  const int group = static_cast<int>(p.shape.heads / p.shape.kv_heads), d = threadIdx.x * 4;
  static_assert(kHeadDim == kThreads * 4);
  const float* q = p.query_gate + (int64_t{r} * p.shape.heads + kv * group) * 2 * kHeadDim + d;
#pragma unroll
  for (int head = 0; head < kMostGroup; ++head) {
    float4 v = make_float4(0, 0, 0, 0);
    if (head < group) v = *reinterpret_cast<const float4*>(q + head * 2 * kHeadDim);
    split3x4(v, reinterpret_cast<__nv_bfloat16*>(tile.query[0] + piece_at(head, kQueryRowBytes, d / 8)) + d % 8,
             kQueryBytes / 2);
  }
}

// Where a part's keys lie: lane l has keys l and l + 32. Found in steps of one read each, long before they are used.
class Places {
 public:
  __device__ __forceinline__ Places(const QsaShape& s, const KeyList& k)
      : shape_(s), list_(k), ratio_(static_cast<int>(s.ratio)), page_tokens_(static_cast<int>(s.page_tokens)) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      place_[j] = static_cast<int>(threadIdx.x % 32) + 32 * j;
      block_[j] = place_[j] / ratio_, within_[j] = place_[j] % ratio_;
    }
  }
  __device__ __forceinline__ void begin() {
#pragma unroll
    for (int j = 0; j < 2; ++j)
      if (place_[j] < list_.chosen) read_[j] = list_.selected[block_[j]];
  }
  __device__ __forceinline__ void find_pages() {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      if (place_[j] >= list_.count) continue;
      const bool chosen = place_[j] < list_.chosen;
      const int token = chosen ? read_[j] * ratio_ + within_[j] : list_.tail + place_[j] - list_.chosen;
      const int page = token / page_tokens_;
      token_[j] = token - page * page_tokens_;
      read_[j] = shape_.kv_table[list_.slot * shape_.table_width + page];
    }
  }
  // -1 beyond the list. The next part's are begun then.
  __device__ __forceinline__ void take(int (&places)[2]) {
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      places[j] = place_[j] < list_.count ? read_[j] * page_tokens_ + token_[j] : -1;
      place_[j] += kPartKeys;
      block_[j] += kPartKeys / ratio_, within_[j] += kPartKeys % ratio_;
      if (within_[j] >= ratio_) within_[j] -= ratio_, ++block_[j];
    }
  }

 private:
  const QsaShape& shape_;
  const KeyList& list_;
  const int ratio_, page_tokens_;
  int place_[2], block_[2], within_[2];  // in the list, of the selection and in its block
  int read_[2] = {}, token_[2] = {};
};

// Copies 16 bytes to shared memory; zeros, and nothing is read, where they are not `here`.
__device__ __forceinline__ void copy_here16(void* shared, const void* global, bool here) {
  const auto to = static_cast<uint32_t>(__cvta_generic_to_shared(shared));
  asm volatile(
      "{.reg .pred p; setp.eq.b32 p, %2, 0;\n"
      "cp.async.cg.shared.global [%0], [%1], 16, p;}" ::"r"(to),
      "l"(global), "r"(static_cast<int>(here))
      : "memory");
}

// A lane's pieces of one KV head's keys, or values. Places of far pages follow those of near ones.
struct Pieces {
  const char *near, *far;
  int first_far, stride;
  __device__ __forceinline__ Pieces(const QsaAttendParams& p, const KvPages& pages, int kv, int piece)
      : first_far(static_cast<int>(min(p.cache.near_tokens, int64_t{INT32_MAX}))),
        stride(static_cast<int>(p.shape.kv_heads) * kHeadDim * 2) {
    near = static_cast<const char*>(pages.near) + kv * kHeadDim * 2 + piece * 16;
    far = static_cast<const char*>(pages.far) + kv * kHeadDim * 2 + piece * 16 - int64_t{first_far} * stride;
  }
  __device__ __forceinline__ void copy(int place, int byte, unsigned char* to) const {
    copy_here16(to, (place < first_far ? near : far) + int64_t{place} * stride + byte, place >= 0);
  }
};

// Begins the copies of the warp's chunks to its ring, from byte `at` of that on.
constexpr int kCopies = kChunkBytes / 512;  // of a lane
struct Copies {
  static constexpr int kKeyPieces = kKeyRowBytes / 16, kValuePieces = kValueRowBytes / 16;  // of a row, a lane each
  int warp, lane;
  unsigned char* ring;
  Pieces key_pieces, value_pieces;
  __device__ __forceinline__ Copies(const QsaAttendParams& p, RowTile& tile, int kv)
      : warp(threadIdx.x / 32),
        lane(threadIdx.x % 32),
        ring(tile.ring[warp][0]),
        key_pieces(p, p.cache.keys, kv, lane % kKeyPieces),
        value_pieces(p, p.cache.values, kv, warp * kValuePieces + lane % kValuePieces) {}
  __device__ __forceinline__ void keys(const int (&places)[2], int chunk, int at) const {
    at += piece_at(lane / kKeyPieces, kKeyRowBytes, lane % kKeyPieces);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * (32 / kKeyPieces), from = key_of_column(warp, row + lane / kKeyPieces) % 32;
      key_pieces.copy(__shfl_sync(kFullWarp, places[i / (kCopies / 2)], from), chunk * kKeyRowBytes,
                      ring + (at ^ row % 8 * 16) + row * kKeyRowBytes);
    }
    copy_commit();
  }
  __device__ __forceinline__ void values(const int (&places)[2], int chunk, int at) const {
    const int half = chunk < kChunks / 2 ? places[0] : places[1];
    at += piece_at(lane / kValuePieces, kValueRowBytes, lane % kValuePieces);
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int row = i * (32 / kValuePieces);
      value_pieces.copy(__shfl_sync(kFullWarp, half, chunk * 16 + lane / kValuePieces + row), 0,
                        ring + (at ^ row % 8 * 16) + row * kValueRowBytes);
    }
    copy_commit();
  }
};

// score[i][n]: heads (g, g, g + 8, g + 8), columns 8 n + 2 t (+ 1), of the query's i-th number. `query`: of the dims.
__device__ __forceinline__ void score_chunk(const unsigned char* query, const unsigned char* keys,
                                            float (&score)[kSplit][kKeyTiles][4]) {
  const int lane = threadIdx.x % 32;
  const int at = piece_at(lane % 16, kQueryRowBytes, lane / 16);
  const int key_at = piece_at(lane / 16 * 8 + lane % 8, kKeyRowBytes, lane / 8 % 2);
#pragma unroll
  for (int k = 0; k < kKeyRowBytes; k += kStepBytes) {
    uint32_t b[kKeyTiles / 2][4];
#pragma unroll
    for (int n = 0; n < kKeyTiles / 2; ++n) load_matrices(b[n], keys + (key_at ^ k) + n * 16 * kKeyRowBytes);
#pragma unroll
    for (int i = 0; i < kSplit; ++i) {
      uint32_t a[4];
      load_matrices(a, query + (at ^ k) + i * kQueryBytes);
#pragma unroll
      for (int n = 0; n < kKeyTiles; ++n) mma_bf16(score[i][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }
}

// Two neighbours, each as kSplit bf16 numbers.
__device__ __forceinline__ void split_pair(float x, float y, uint32_t (&to)[kSplit]) {
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    const __nv_bfloat162 h = __floats2bfloat162_rn(x, y);
    const float2 f = __bfloat1622float2(h);
    to[i] = *reinterpret_cast<const uint32_t*>(&h);
    x -= f.x, y -= f.y;
  }
}

// Weights of the scores to the tile; the part's maxima and totals of heads g, g + 8. `keys`: how many are left.
__device__ __forceinline__ void weigh_part(RowTile& tile, int keys, const float (&score)[kSplit][kKeyTiles][4],
                                           float (&highest)[2], float (&total)[2]) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  float s[2][kKeyTiles][2];
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float sum = score[0][n][j] + score[1][n][j] + score[2][n][j];
      s[j / 2][n][j % 2] = __fmul_rn(sum, kScale);
    }
  if (keys < kPartKeys)
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i)
      if (key_of_column(warp, i / 2 * 8 + 2 * t + i % 2) >= keys) s[0][i / 2][i % 2] = s[1][i / 2][i % 2] = -INFINITY;
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float m = s[h][0][0];
#pragma unroll
    for (int i = 1; i < 2 * kKeyTiles; ++i) m = fmaxf(m, s[h][i / 2][i % 2]);
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 1));
    m = fmaxf(m, __shfl_xor_sync(kFullWarp, m, 2));
    if (t == 0) tile.highest[warp][g + 8 * h] = m;
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    highest[h] = fmaxf(tile.highest[0][g + 8 * h], tile.highest[1][g + 8 * h]);
#pragma unroll
    for (int i = 0; i < 2 * kKeyTiles; ++i) s[h][i / 2][i % 2] = expf(s[h][i / 2][i % 2] - highest[h]);
  }
  uint2* to = reinterpret_cast<uint2*>(tile.weights[warp]) + (g * 2 + t / 2) * 2 + t % 2;
#pragma unroll
  for (int n = 0; n < kKeyTiles; ++n) {
    uint32_t low[kSplit], high[kSplit];
    split_pair(s[0][n][0], s[0][n][1], low);
    split_pair(s[1][n][0], s[1][n][1], high);
#pragma unroll
    for (int i = 0; i < kSplit; ++i) to[(i * kChunks + n) * 32] = make_uint2(low[i], high[i]);
  }
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float u[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      static_assert(kKeyTiles == 4);
      u[j] = (s[h][0][j] + s[h][2][j]) + (s[h][1][j] + s[h][3][j]);
      u[j] += __shfl_xor_sync(kFullWarp, u[j], 1);
      u[j] += __shfl_xor_sync(kFullWarp, u[j], 2);
    }
    if (t == 0) tile.totals[warp][g + 8 * h] = make_float2(u[0], u[1]);
  }
  __syncthreads();
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float2 a = tile.totals[0][g + 8 * h], b = tile.totals[1][g + 8 * h];
    total[h] = (a.x + b.x) + (a.y + b.y);
  }
}

// sum[n]: heads (g, g, g + 8, g + 8), the warp's dims 8 n + 2 t (+ 1).
__device__ __forceinline__ void value_chunk(const RowTile& tile, int chunk, const unsigned char* values,
                                            float (&sum)[kDimTiles][4]) {
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, at = piece_at(lane % 16, kValueRowBytes, lane / 16);
  uint32_t a[kSplit][4];
#pragma unroll
  for (int i = 0; i < kSplit; ++i) {
    const uint4 w = tile.weights[t % 2][(i * kChunks + chunk) * 16 + g * 2 + t / 2];
    a[i][0] = w.x, a[i][1] = w.y, a[i][2] = w.z, a[i][3] = w.w;
  }
  constexpr int kTogether = 4;  // pairs of tiles, so that their chains run side by side
#pragma unroll
  for (int n0 = 0; n0 < kDimTiles / 2; n0 += kTogether) {
    uint32_t b[kTogether][4];
#pragma unroll
    for (int n = 0; n < kTogether; ++n) load_matrices_t(b[n], values + (at ^ (n0 + n) * kStepBytes));
#pragma unroll
    for (int i = 0; i < kSplit; ++i)
#pragma unroll
      for (int n = 0; n < 2 * kTogether; ++n)
        mma_bf16(sum[2 * n0 + n], a[i], b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
  }
}

template <int kOuter>
__device__ __forceinline__ void clear(float (&sums)[kOuter][4]) {
#pragma unroll
  for (int n = 0; n < kOuter; ++n)
#pragma unroll
    for (int j = 0; j < 4; ++j) sums[n][j] = 0;
}

// blockIdx: KV head, row.
__global__ void __launch_bounds__(kThreads, 4) attend_rows_kernel(QsaAttendParams p) {
  wait_previous();
  extern __shared__ __align__(128) unsigned char memory[];
  RowTile& tile = *reinterpret_cast<RowTile*>(memory);
  const int kv = blockIdx.x, r = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4;
  const KeyList list = key_list(p, r);
  if (list.count == 0) return;
  Places next(p.shape, list);
  const Copies copies(p, tile, kv);
  int places[2], slot = 0;  // slot: of the ring, read next
  next.begin(), next.find_pages(), next.take(places);
#pragma unroll
  for (int i = 0; i < kSlots; ++i) copies.keys(places, i, i * kChunkBytes);
  load_query(p, tile, r, kv);
  __syncthreads();

  // A chunk is there, and after it has been read its slot takes the one kSlots further on.
  const auto chunk_here = [&] {
    copy_wait<kSlots - 1>();
    __syncwarp();
    return tile.ring[warp][0] + slot;
  };
  const auto chunk_read = [&] {
    __syncwarp();
    const int free = slot;
    slot = slot + kChunkBytes == kSlots * kChunkBytes ? 0 : slot + kChunkBytes;
    return free;
  };
  static_assert(kSlots == kChunks - 1);

  float total[kDimTiles][4];
  Running run[2];
  for (int part = 0; part * kPartKeys < list.count; ++part) {
    next.begin();
    float highest[2], weight[2];
    {
      float score[kSplit][kKeyTiles][4];
#pragma unroll
      for (int i = 0; i < kSplit; ++i) clear(score[i]);
#pragma unroll 1
      for (int c = 0; c < kChunks; ++c) {
        score_chunk(tile.query[0] + c * kKeyRowBytes, chunk_here(), score);
        const int free = chunk_read();
        if (c == 0)
          copies.keys(places, kChunks - 1, free);
        else
          copies.values(places, c - 1, free);
      }
      weigh_part(tile, list.count - part * kPartKeys, score, highest, weight);
    }
    next.find_pages();
    float sum[kDimTiles][4];
    clear(sum);
#pragma unroll 1
    for (int c = 0; c < kChunks; ++c) {
      value_chunk(tile, c, chunk_here(), sum);
      const int free = chunk_read();
      if (c == 0) {
        copies.values(places, kChunks - 1, free);
        next.take(places);
      } else {
        copies.keys(places, c - 1, free);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 f = run[h].merge(highest[h], weight[h], part == 0);
#pragma unroll
      for (int n = 0; n < kDimTiles; ++n)
#pragma unroll
        for (int j = 2 * h; j < 2 * h + 2; ++j) total[n][j] = merged(total[n][j], sum[n][j], f, part == 0);
    }
  }
  copy_wait<0>();

  const int group = static_cast<int>(p.shape.heads / p.shape.kv_heads);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    if (g + 8 * h >= group) continue;
    const int64_t at = int64_t{r} * p.shape.heads + kv * group + g + 8 * h;
    const int first = warp * kWarpDims + lane % 4 * 2;
#pragma unroll
    for (int n = 0; n < kDimTiles; ++n) {
      const int d = first + 8 * n;
      const float2 gate = *reinterpret_cast<const float2*>(p.query_gate + (2 * at + 1) * kHeadDim + d);
      *reinterpret_cast<float2*>(p.out + at * kHeadDim + d) =
          make_float2(gated(total[n][2 * h], run[h].total, sigmoid(gate.x)),
                      gated(total[n][2 * h + 1], run[h].total, sigmoid(gate.y)));
    }
  }
}

}  // namespace

void attend_rows(const QsaAttendParams& p, cudaStream_t stream) {
  constexpr int kShared = sizeof(RowTile);
  static_assert(kShared <= 56 * 1024, "four blocks a multiprocessor");
  check_cuda(cudaFuncSetAttribute(attend_rows_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared),
             "attend_rows: shared memory of a block");
  launch("attend_rows", attend_rows_kernel,
         dim3(static_cast<unsigned>(p.shape.kv_heads), static_cast<unsigned>(p.shape.rows)), kThreads, kShared, stream,
         p);
}

}  // namespace fnx::cuda
