#include "kernels/cuda/gdn.h"

#include "kernels/cuda/device_math.cuh"
#include "kernels/cuda/gdn_prompt.cuh"

namespace fnx::cuda {

namespace {

constexpr int kDim = 128;  // keys and values of a head
constexpr int kMostTaps = 8;
constexpr int kChunk = 32;  // value columns of a block of the recurrence
constexpr int kHeadChunks = kDim / kChunk;
constexpr int kConvRows = 8;                         // of a prompt, convolved by one warp
constexpr int64_t kConvTogether = 128;               // rows from which they are
constexpr float kQueryScale = 0.08838834764831845f;  // 1 / sqrt(128)

__device__ __forceinline__ float& part(float4& v, int i) { return reinterpret_cast<float*>(&v)[i]; }

// The taps of four channels, and their sum over time.
struct Convolution {
  float4 w[kMostTaps];
  int taps;
  __device__ __forceinline__ Convolution(const GdnParams& p, int64_t ch) : taps(static_cast<int>(p.taps)) {
#pragma unroll
    for (int t = 0; t < kMostTaps; ++t) {
      if (t >= taps) break;
      const float* from = p.conv + ch * taps + t;
      w[t] = make_float4(__ldg(from), __ldg(from + taps), __ldg(from + 2 * taps), __ldg(from + 3 * taps));
    }
  }
  __device__ __forceinline__ static float4 add(float4 w, float4 x, float4 sum) {
    return make_float4(fmaf(w.x, x.x, sum.x), fmaf(w.y, x.y, sum.y), fmaf(w.z, x.z, sum.z), fmaf(w.w, x.w, sum.w));
  }
  __device__ __forceinline__ static float4 activated(float4 sum) {
    return make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
  }
  __device__ __forceinline__ float4 of_four(const float4* x) const {  // of four taps
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int t = 0; t < 4; ++t) sum = add(w[t], x[t], sum);
    return activated(sum);
  }
  template <class Row>
  __device__ __forceinline__ float4 of(Row row) const {  // row(tap): those channels of the tap's row
    float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int t = 0; t < kMostTaps; ++t) {
      if (t >= taps) break;
      sum = add(w[t], row(t), sum);
    }
    return activated(sum);
  }
};

// A warp's head of queries or keys over its length.
__device__ __forceinline__ float4 scaled_head(float4 c, bool query) {
  float scale = 1.0f / sqrtf(warp_sum(dot4(c, c, 0.0f)) + 1e-6f);
  if (query) scale *= kQueryScale;
  return make_float4(c.x * scale, c.y * scale, c.z * scale, c.w * scale);
}

// exp(g) and beta of a value head.
__device__ __forceinline__ float2 gates_of(const GdnParams& p, int64_t head, float a, float b) {
  const float g = -expf(p.a_log[head]) * softplus(a + p.dt_bias[head]);
  return make_float2(expf(g), sigmoid(b));
}

// One warp a head of a row, four channels a lane.
__global__ void __launch_bounds__(64, 8) gdn_conv_kernel(GdnParams p) {
  wait_previous();
  const int heads = static_cast<int>(2 * p.key_heads + p.value_heads), taps = static_cast<int>(p.taps);
  const int64_t unit = int64_t{blockIdx.x} * 2 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, head = static_cast<int>(unit % heads), r = static_cast<int>(unit / heads);
  if (r >= p.rows + p.lanes.count * p.trials) return;
  int slot, first_row, row, kept;  // row: of the lane; negative: tried by its last call and kept
  if (r < p.rows) {
    const LaneRow l = find_lane(p.lanes, r);
    slot = l.slot, first_row = l.first_row, row = r - l.first_row;
    if (slot < 0) return;
    kept = trial_of(p.lanes, l.lane).kept;
  } else {
    const int i = (r - static_cast<int>(p.rows)) / static_cast<int>(p.trials);
    const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[i];
    kept = trial_of(p.lanes, i).kept;
    slot = l.x, first_row = l.y, row = (r - static_cast<int>(p.rows)) % static_cast<int>(p.trials) - kept;
    if (row >= 0) return;
  }
  const int64_t channels = int64_t{heads} * kDim, ch = head * kDim + 4 * lane;
  const float* past = p.conv_state + int64_t{slot} * (taps - 1 + p.trials) * channels + ch;
  float4 c = Convolution(p, ch).of([&](int t) {
    const int i = row - (taps - 1 - t);
    return *reinterpret_cast<const float4*>(i >= 0 ? p.qkv + int64_t{first_row + i} * channels + ch
                                                   : past + (taps - 1 + kept + i) * channels);
  });
  if (head < 2 * p.key_heads) {
    c = scaled_head(c, head < p.key_heads);
  } else if (lane == 0) {
    const int64_t h = head - 2 * p.key_heads, at = r * p.value_heads + h;
    const float* before = p.tried + ((int64_t{slot} * p.trials + kept + row) * 2) * p.value_heads + h;
    const float b = row >= 0 ? p.b[at] : before[0], a = row >= 0 ? p.a[at] : before[p.value_heads];
    reinterpret_cast<float2*>(p.gates)[at] = gates_of(p, h, a, b);
  }
  *reinterpret_cast<float4*>(p.convolved + r * channels + ch) = c;
}

// The same for prompts without tried rows: one warp a head of kConvRows rows.
__global__ void __launch_bounds__(64, 8) gdn_conv_prompt_kernel(GdnParams p) {
  const int heads = static_cast<int>(2 * p.key_heads + p.value_heads), history = static_cast<int>(p.taps) - 1;
  const int64_t unit = int64_t{blockIdx.x} * 2 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32, head = static_cast<int>(unit % heads);
  const int first = static_cast<int>(unit / heads) * kConvRows;
  const int64_t channels = int64_t{heads} * kDim, ch = head * kDim + 4 * lane;
  const Convolution conv(p, ch);
  wait_previous();
  const auto put = [&](int r, float4 c) {
    if (head < 2 * p.key_heads) {
      c = scaled_head(c, head < p.key_heads);
    } else if (lane == 0) {
      const int64_t h = head - 2 * p.key_heads, at = r * p.value_heads + h;
      reinterpret_cast<float2*>(p.gates)[at] = gates_of(p, h, p.a[at], p.b[at]);
    }
    *reinterpret_cast<float4*>(p.convolved + r * channels + ch) = c;
  };
  LaneRow l = find_lane(p.lanes, first);
  if (history == 3 && l.slot >= 0 && first - l.first_row >= 3 && first + kConvRows <= l.first_row + l.rows) {
    const float* from = p.qkv + (int64_t{first} - 3) * channels + ch;
    float4 x[kConvRows + 3];  // all rows that these see
#pragma unroll
    for (int i = 0; i < kConvRows + 3; ++i) x[i] = *reinterpret_cast<const float4*>(from + i * channels);
#pragma unroll
    for (int i = 0; i < kConvRows; ++i) put(first + i, conv.of_four(x + i));
    return;
  }
#pragma unroll 1
  for (int r = first; r < min(first + kConvRows, static_cast<int>(p.rows)); ++r) {
    if (r > first) l = find_lane(p.lanes, r);
    if (l.slot < 0) continue;
    const float* past = p.conv_state + l.slot * (history + p.trials) * channels + ch;
    put(r, conv.of([&](int t) {
      const int i = r - l.first_row - (history - t);  // row of the lane; negative: from the state
      return *reinterpret_cast<const float4*>(i >= 0 ? p.qkv + int64_t{l.first_row + i} * channels + ch
                                                     : past + (history + i) * channels);
    }));
  }
}

// What one token of one head brings to a lane: 8 keys, 8 queries, 4 values, decay and beta.
struct Token {
  float4 k[2], q[2], v;
  float2 gates;
};

constexpr int kAhead = 4;            // tokens loaded ahead of their use
constexpr int64_t kRowLanes = 8;     // lanes of one row up to which blocks convolve by themselves
constexpr int64_t kPromptRows = 32;  // rows a lane from which a launch takes the kernel for prompts

// Four warps of eight value columns. Lane 2 i + j holds keys 8 i .. 8 i + 7 of columns 4 j .. 4 j + 3.
struct Place {
  int key, column;
  __device__ explicit Place(int chunk)
      : key(threadIdx.x % 32 / 2 * 8), column(chunk * kChunk + threadIdx.x / 32 * 8 + threadIdx.x % 2 * 4) {}
};

// One token: the state decays and takes it in; returns the lane's columns of o.
__device__ __forceinline__ float4 step(float4 (&s)[8], Token x) {
  float4 m = make_float4(0, 0, 0, 0), o = m, d;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float k = part(x.k[j / 4], j % 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      part(s[j], c) *= x.gates.x;
      part(m, c) = fmaf(part(s[j], c), k, part(m, c));
    }
  }
#pragma unroll
  for (int width = 16; width >= 2; width /= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) part(m, c) += __shfl_xor_sync(kFullWarp, part(m, c), width);
#pragma unroll
  for (int c = 0; c < 4; ++c) part(d, c) = (part(x.v, c) - part(m, c)) * x.gates.y;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float k = part(x.k[j / 4], j % 4), q = part(x.q[j / 4], j % 4);
#pragma unroll
    for (int c = 0; c < 4; ++c) {
      part(s[j], c) = fmaf(k, part(d, c), part(s[j], c));
      part(o, c) = fmaf(part(s[j], c), q, part(o, c));
    }
  }
#pragma unroll
  for (int width = 16; width >= 2; width /= 2)
#pragma unroll
    for (int c = 0; c < 4; ++c) part(o, c) += __shfl_xor_sync(kFullWarp, part(o, c), width);
  return o;
}

__device__ __forceinline__ void put(const GdnParams& p, int64_t row, int head, int column, float4 o) {
  if (threadIdx.x % 32 < 2) *reinterpret_cast<float4*>(p.out + (row * p.value_heads + head) * kDim + column) = o;
}

__device__ void recur(const GdnParams& p, int lane_index, int head, int chunk) {
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[lane_index];
  const Place at(chunk);
  const int64_t channels = (2 * p.key_heads + p.value_heads) * kDim;
  const int64_t key_head = head / (p.value_heads / p.key_heads);
  float* state = p.delta + ((int64_t{l.x} * p.value_heads + head) * kDim + at.key) * kDim + at.column;
  const LaneTrial trial = trial_of(p.lanes, lane_index);
  const int kept = trial.kept, rows = kept + l.z, sure = rows - trial.tried;
  const int64_t kept_row = p.rows + lane_index * p.trials;
  float4 s[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i] = *reinterpret_cast<const float4*>(state + i * kDim);

  const auto load = [&](int i) {
    Token x;
    const int64_t r = i < kept ? kept_row + i : l.y + i - kept;
    const float* c = p.convolved + r * channels;
    const float4* q = reinterpret_cast<const float4*>(c + key_head * kDim + at.key);
    const float4* k = reinterpret_cast<const float4*>(c + (p.key_heads + key_head) * kDim + at.key);
    x.q[0] = q[0], x.q[1] = q[1], x.k[0] = k[0], x.k[1] = k[1];
    x.v = *reinterpret_cast<const float4*>(c + (2 * p.key_heads + head) * kDim + at.column);
    x.gates = reinterpret_cast<const float2*>(p.gates)[r * p.value_heads + head];
    return x;
  };
  wait_previous();  // the state is not of the previous launch, which is gdn_conv
  Token ring[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < rows) ring[i] = load(i);
  for (int first = 0; first < rows; first += kAhead)
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= rows) break;
      const float4 o = step(s, ring[i]);
      if (first + i >= kept) put(p, l.y + first + i - kept, head, at.column, o);
      if (first + i + 1 == sure)
#pragma unroll
        for (int j = 0; j < 8; ++j) *reinterpret_cast<float4*>(state + j * kDim) = s[j];
      if (first + i + kAhead < rows) ring[i] = load(first + i + kAhead);
    }
}

// One row a lane, none tried: blocks of a value chunk of a head convolve what they need of the row by themselves; warp
// 0 the queries, warp 1 the keys, warp 2 the values, warp 3 finds the gates. blockIdx.y: the lane.
__global__ void __launch_bounds__(128) gdn_row_kernel(GdnParams p) {
  __shared__ __align__(16) float row[2 * kDim + kChunk];
  __shared__ float2 gates;
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[blockIdx.y];
  const int head = blockIdx.x / kHeadChunks, chunk = blockIdx.x % kHeadChunks, taps = static_cast<int>(p.taps);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int key_head = head / static_cast<int>(p.value_heads / p.key_heads);
  const int64_t channels = (2 * p.key_heads + p.value_heads) * kDim;
  const Place at(chunk);
  float* state = p.delta + ((int64_t{l.x} * p.value_heads + head) * kDim + at.key) * kDim + at.column;
  const int64_t source = warp == 0 ? key_head : warp == 1 ? p.key_heads + key_head : 2 * p.key_heads + head;
  const int64_t ch = source * kDim + (warp < 2 ? 4 * lane : chunk * kChunk + lane % 8 * 4);
  const Convolution conv(p, ch);
  float4 x[kMostTaps], s[8];
#pragma unroll
  for (int t = 0; t + 1 < kMostTaps; ++t)
    if (t + 1 < taps)
      x[t] = *reinterpret_cast<const float4*>(p.conv_state + (l.x * (taps - 1 + p.trials) + t) * channels + ch);
#pragma unroll
  for (int i = 0; i < 8; ++i) s[i] = *reinterpret_cast<const float4*>(state + i * kDim);
  wait_previous();  // the states are not of the previous launch
  if (warp < 3) {
    const float4 now = *reinterpret_cast<const float4*>(p.qkv + l.y * channels + ch);
    float4 c = conv.of([&](int t) { return t + 1 == taps ? now : x[t]; });
    if (warp < 2) c = scaled_head(c, warp == 0);
    if (warp < 2 || lane < 8) reinterpret_cast<float4*>(row)[threadIdx.x] = c;
  } else if (lane == 0) {
    const int64_t from = l.y * p.value_heads + head;
    gates = gates_of(p, head, p.a[from], p.b[from]);
  }
  __syncthreads();
  const float4* from = reinterpret_cast<const float4*>(row);
  Token token;
#pragma unroll
  for (int i = 0; i < 2; ++i) token.q[i] = from[at.key / 4 + i], token.k[i] = from[(kDim + at.key) / 4 + i];
  token.v = from[(2 * kDim + at.column - chunk * kChunk) / 4];
  token.gates = gates;
  put(p, l.y, head, at.column, step(s, token));
#pragma unroll
  for (int i = 0; i < 8; ++i) *reinterpret_cast<float4*>(state + i * kDim) = s[i];
}

// Keeps the last taps - 1 rows of qkv, and what tried rows bring.
__device__ void keep_rows(const GdnParams& p, int lane_index, int block) {
  wait_previous();
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[lane_index];
  const int64_t channels = (2 * p.key_heads + p.value_heads) * kDim, history = p.taps - 1;
  const int64_t ch = int64_t{block} * 128 + threadIdx.x;
  const LaneTrial trial = trial_of(p.lanes, lane_index);
  keep_history(p.conv_state + l.x * (history + p.trials) * channels + ch, p.qkv + l.y * channels + ch, channels,
               history, l.z, trial);
  if (block > 0) return;
  const int heads = static_cast<int>(p.value_heads);
  for (int i = threadIdx.x; i < trial.tried * heads; i += 128) {
    const int64_t row = i / heads, h = i % heads, from = (l.y + l.z - trial.tried + row) * heads + h;
    float* to = p.tried + (l.x * p.trials + row) * 2 * heads + h;
    to[0] = p.b[from], to[heads] = p.a[from];
  }
}

// blockIdx.x: value chunks of heads, then groups of 128 channels of the convolution's state; blockIdx.y: the lane.
__global__ void __launch_bounds__(128) gdn_recurrence_kernel(GdnParams p) {
  const int chunks = static_cast<int>(p.value_heads) * kHeadChunks, x = blockIdx.x;
  if (x < chunks)
    recur(p, blockIdx.y, x / kHeadChunks, x % kHeadChunks);
  else
    keep_rows(p, blockIdx.y, x - chunks);
}

// The same for prompts without tried rows: blocks of 16 value columns of Heads value heads of a key head.
template <int Heads>
__global__ void __launch_bounds__(128, 2) gdn_prompt_kernel(GdnParams p) {
  constexpr int kChunks = kDim / gdn_prompt::kColumns;
  const int blocks = static_cast<int>(p.value_heads) / Heads * kChunks, x = blockIdx.x;
  if (x < blocks)
    gdn_prompt::recur<Heads>(p, blockIdx.y, x / kChunks * Heads, x % kChunks);
  else
    keep_rows(p, blockIdx.y, x - blocks);
}

// Blocks do not start early, for then they would crowd on the multiprocessors that are free first.
template <int Heads>
void launch_prompt(const GdnParams& p, unsigned kept, cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(p.value_heads / Heads * (kDim / gdn_prompt::kColumns));
  launch("gdn_recurrence", gdn_prompt_kernel<Heads>, dim3(blocks + kept, static_cast<unsigned>(p.lanes.count)), 128, 0,
         false, stream, p);
}

// One warp a head of a row. Blocks beyond, where a launch has them, keep the convolution's rows of lane blockIdx.y.
__global__ void __launch_bounds__(128) gdn_norm_kernel(GdnParams p, int norm_blocks) {
  let_next_start();  // what follows reads nothing but weights before it has waited
  if (static_cast<int>(blockIdx.x) >= norm_blocks) return keep_rows(p, blockIdx.y, blockIdx.x - norm_blocks);
  const int64_t unit = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  const float4 w = __ldg(reinterpret_cast<const float4*>(p.norm) + lane);
  wait_previous();
  if (unit >= p.rows * p.value_heads || blockIdx.y > 0) return;
  float4& out = reinterpret_cast<float4*>(p.out + unit * kDim)[lane];
  float4 o = out, z = reinterpret_cast<const float4*>(p.z + unit * kDim)[lane], weight = w;
  const float scale = 1.0f / sqrtf(warp_sum(dot4(o, o, 0.0f)) / static_cast<float>(kDim) + p.eps);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float gate = p.silu_gate ? silu(part(z, c)) : sigmoid(part(z, c));
    part(o, c) = part(weight, c) * (part(o, c) * scale) * gate;
  }
  out = o;
}

void check_gdn(const GdnParams& p) {
  require(p.key_heads > 0 && p.value_heads > 0 && p.value_heads % p.key_heads == 0 && p.taps >= 2 &&
              p.taps <= kMostTaps && p.rows >= 0 && p.lanes.count >= 0 && p.lanes.count < 65536 && p.trials >= 0 &&
              (p.trials > 0 || p.lanes.trials == nullptr),
          "gdn", "value heads a multiple of key heads, 2 to 8 taps (key heads, value heads, taps, rows, lanes, trials)",
          {p.key_heads, p.value_heads, p.taps, p.rows, p.lanes.count, p.trials});
  require(aligned16({p.qkv, p.z, p.out, p.conv_state, p.delta, p.convolved, p.norm, p.gates, p.lanes.table}), "gdn",
          "16-byte alignment (rows)", {p.rows});
}

// Every lane has one row and none tried.
void gdn_rows(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  const auto lanes = static_cast<unsigned>(p.lanes.count);
  launch("gdn_row", gdn_row_kernel, dim3(static_cast<unsigned>(p.value_heads * kHeadChunks), lanes), 128, 0, stream, p);
  const unsigned blocks = blocks_of(p.rows * p.value_heads, 4);
  const auto keep = static_cast<unsigned>(2 * p.key_heads + p.value_heads);
  launch("gdn_norm", gdn_norm_kernel, dim3(blocks + keep, lanes), 128, 0, stream, p, static_cast<int>(blocks));
}

}  // namespace

void gdn_conv(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  const int64_t rows = p.rows + p.lanes.count * p.trials;
  if (rows == 0) return;
  const int64_t heads = 2 * p.key_heads + p.value_heads;
  if (p.lanes.trials == nullptr && p.rows >= kConvTogether)
    launch("gdn_conv", gdn_conv_prompt_kernel, blocks_of(blocks_of(p.rows, kConvRows) * heads, 2), 64, 0, stream, p);
  else
    launch("gdn_conv", gdn_conv_kernel, blocks_of(rows * heads, 2), 64, 0, stream, p);
}

void gdn_recurrence(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  if (p.lanes.count == 0) return;
  const auto lanes = static_cast<unsigned>(p.lanes.count), heads = static_cast<unsigned>(p.value_heads);
  const auto kept = static_cast<unsigned>(2 * p.key_heads + p.value_heads);  // blocks that keep rows
  const int64_t group = p.value_heads / p.key_heads;
  if (p.lanes.trials != nullptr || p.rows < kPromptRows * p.lanes.count)
    launch("gdn_recurrence", gdn_recurrence_kernel, dim3(heads * kHeadChunks + kept, lanes), 128, 0, stream, p);
  else if (group % 3 == 0)
    launch_prompt<3>(p, kept, stream);
  else if (group % 2 == 0)
    launch_prompt<2>(p, kept, stream);
  else
    launch_prompt<1>(p, kept, stream);
}

void gdn_norm(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  if (p.rows == 0) return;
  const unsigned blocks = blocks_of(p.rows * p.value_heads, 4);
  launch("gdn_norm", gdn_norm_kernel, blocks, 128, 0, stream, p, static_cast<int>(blocks));
}

void gdn(const GdnParams& p, cudaStream_t stream) {
  if (p.lanes.trials == nullptr && p.rows > 0 && p.rows == p.lanes.count && p.rows <= kRowLanes)
    return gdn_rows(p, stream);
  gdn_conv(p, stream);
  gdn_recurrence(p, stream);
  gdn_norm(p, stream);
}

}  // namespace fnx::cuda
