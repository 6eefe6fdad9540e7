#include "kernels/cuda/gdn.h"

#include "kernels/cuda/device_math.cuh"

namespace fnx::cuda {

namespace {

constexpr int kDim = 128;  // keys and values of a head
constexpr int kMostTaps = 8;
constexpr int kChunk = 32;  // value columns of a block of the recurrence
constexpr int kHeadChunks = kDim / kChunk;
constexpr float kQueryScale = 0.08838834764831845f;  // 1 / sqrt(128)

__device__ __forceinline__ float& part(float4& v, int i) { return reinterpret_cast<float*>(&v)[i]; }

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
  float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int t = 0; t < kMostTaps; ++t) {
    if (t >= taps) break;
    const int i = row - (taps - 1 - t);
    const float* from =
        i >= 0 ? p.qkv + int64_t{first_row + i} * channels + ch : past + (taps - 1 + kept + i) * channels;
    const float4 x = *reinterpret_cast<const float4*>(from);
    const float* w = p.conv + ch * taps + t;
    sum = make_float4(fmaf(__ldg(w), x.x, sum.x), fmaf(__ldg(w + taps), x.y, sum.y),
                      fmaf(__ldg(w + 2 * taps), x.z, sum.z), fmaf(__ldg(w + 3 * taps), x.w, sum.w));
  }
  float4 c = make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
  if (head < 2 * p.key_heads) {
    float scale = 1.0f / sqrtf(warp_sum(dot4(c, c, 0.0f)) + 1e-6f);
    if (head < p.key_heads) scale *= kQueryScale;
    c = make_float4(c.x * scale, c.y * scale, c.z * scale, c.w * scale);
  } else if (lane == 0) {
    const int64_t h = head - 2 * p.key_heads, at = r * p.value_heads + h;
    const float* before = p.tried + ((int64_t{slot} * p.trials + kept + row) * 2) * p.value_heads + h;
    const float b = row >= 0 ? p.b[at] : before[0], a = row >= 0 ? p.a[at] : before[p.value_heads];
    const float g = -expf(p.a_log[h]) * softplus(a + p.dt_bias[h]);
    reinterpret_cast<float2*>(p.gates)[at] = make_float2(expf(g), sigmoid(b));
  }
  *reinterpret_cast<float4*>(p.convolved + r * channels + ch) = c;
}

// What one token of one head brings to a lane: 8 keys, 8 queries, 4 values, decay and beta.
struct Token {
  float4 k[2], q[2], v;
  float2 gates;
};

constexpr int kAhead = 4;  // tokens loaded ahead of their use

// Four warps of eight value columns. Lane 2 i + j holds keys 8 i .. 8 i + 7 of columns 4 j .. 4 j + 3.
__device__ void recur(const GdnParams& p, int lane_index, int head, int chunk) {
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[lane_index];
  const int lane = threadIdx.x % 32, key = lane / 2 * 8, column = chunk * kChunk + threadIdx.x / 32 * 8 + lane % 2 * 4;
  const int64_t channels = (2 * p.key_heads + p.value_heads) * kDim;
  const int64_t key_head = head / (p.value_heads / p.key_heads);
  float* state = p.delta + ((int64_t{l.x} * p.value_heads + head) * kDim + key) * kDim + column;
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
    const float4* q = reinterpret_cast<const float4*>(c + key_head * kDim + key);
    const float4* k = reinterpret_cast<const float4*>(c + (p.key_heads + key_head) * kDim + key);
    x.q[0] = q[0], x.q[1] = q[1], x.k[0] = k[0], x.k[1] = k[1];
    x.v = *reinterpret_cast<const float4*>(c + (2 * p.key_heads + head) * kDim + column);
    x.gates = reinterpret_cast<const float2*>(p.gates)[r * p.value_heads + head];
    return x;
  };
  wait_previous();  // the state is not of the previous launch, which is gdn_conv
  Token ring[kAhead];
#pragma unroll
  for (int i = 0; i < kAhead; ++i)
    if (i < rows) ring[i] = load(i);
  const auto step = [&](const Token& token, int i) {
    Token x = token;
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
    if (lane < 2 && i >= kept)
      *reinterpret_cast<float4*>(p.out + (int64_t{l.y + i - kept} * p.value_heads + head) * kDim + column) = o;
    if (i + 1 == sure)
#pragma unroll
      for (int j = 0; j < 8; ++j) *reinterpret_cast<float4*>(state + j * kDim) = s[j];
  };
  for (int first = 0; first < rows; first += kAhead)
#pragma unroll
    for (int i = 0; i < kAhead; ++i) {
      if (first + i >= rows) break;
      step(ring[i], first + i);
      if (first + i + kAhead < rows) ring[i] = load(first + i + kAhead);
    }
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

// One warp a head of a row.
__global__ void __launch_bounds__(128) gdn_norm_kernel(GdnParams p) {
  wait_previous();
  const int64_t unit = int64_t{blockIdx.x} * 4 + threadIdx.x / 32;
  if (unit >= p.rows * p.value_heads) return;
  const int lane = threadIdx.x % 32;
  float4& out = reinterpret_cast<float4*>(p.out + unit * kDim)[lane];
  float4 o = out, z = reinterpret_cast<const float4*>(p.z + unit * kDim)[lane];
  float4 w = reinterpret_cast<const float4*>(p.norm)[lane];
  const float scale = 1.0f / sqrtf(warp_sum(dot4(o, o, 0.0f)) / static_cast<float>(kDim) + p.eps);
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const float gate = p.silu_gate ? silu(part(z, c)) : sigmoid(part(z, c));
    part(o, c) = part(w, c) * (part(o, c) * scale) * gate;
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

}  // namespace

void gdn_conv(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  const int64_t rows = p.rows + p.lanes.count * p.trials;
  if (rows == 0) return;
  launch("gdn_conv", gdn_conv_kernel, blocks_of(rows * (2 * p.key_heads + p.value_heads), 2), 64, 0, stream, p);
}

void gdn_recurrence(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  if (p.lanes.count == 0) return;
  const auto blocks = static_cast<unsigned>(p.value_heads * kHeadChunks + 2 * p.key_heads + p.value_heads);
  launch("gdn_recurrence", gdn_recurrence_kernel, dim3(blocks, static_cast<unsigned>(p.lanes.count)), 128, 0, stream,
         p);
}

void gdn_norm(const GdnParams& p, cudaStream_t stream) {
  check_gdn(p);
  if (p.rows == 0) return;
  launch("gdn_norm", gdn_norm_kernel, blocks_of(p.rows * p.value_heads, 4), 128, 0, stream, p);
}

void gdn(const GdnParams& p, cudaStream_t stream) {
  gdn_conv(p, stream);
  gdn_recurrence(p, stream);
  gdn_norm(p, stream);
}

}  // namespace fnx::cuda
