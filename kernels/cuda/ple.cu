#include "kernels/cuda/ple.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/device_math.cuh"
#include "kernels/exl3.h"

namespace fnx::cuda {

namespace {

// The mul1 codebook: an integer up to 2044 times an 11-bit number plus one is exact before the fma's one rounding.
__device__ __forceinline__ float decode_mul1(uint32_t state) {
  const uint32_t v = (state & 0xFFFF) * exl3::kMul1;
  const uint32_t sum = __dp4a(v, 0x01010101u, 0u);
  const float scale = __half2float(__ushort_as_half(0x1EEE)), offset = __half2float(__ushort_as_half(0xC931));
  return __half2float(__float2half_rn(fmaf(1024.0f + static_cast<float>(sum), scale, offset)));
}

__global__ void __launch_bounds__(256) ngram_decode_kernel(NgramDecodeParams p) {
  wait_previous();
  const int64_t i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.rows * p.heads * p.dim) return;
  const int dim = static_cast<int>(p.dim), d = static_cast<int>(i % dim);
  const int64_t site = i / dim;
  const float bias = p.bias != nullptr ? p.bias[site % p.heads * dim + d] : 0.0f;
  if (p.bits == 0) {
    const float v = p.dtype == DType::F32    ? static_cast<const float*>(p.packed)[i]
                    : p.dtype == DType::BF16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(p.packed)[i])
                                             : __half2float(static_cast<const __half*>(p.packed)[i]);
    p.out[i] = p.bias != nullptr ? v + bias : v;
    return;
  }
  const int bits = p.bits;
  const uint16_t* words = static_cast<const uint16_t*>(p.packed) + site * (1 + dim * bits / 16);
  // Bits of the state: the low ones from this value's place, the next from the value before, around the ring.
  uint32_t state = 0;
  for (int m = 0; m < 16; m += bits) {
    const int bit = ((d - m / bits) % dim + dim) % dim * bits;
    uint32_t window = words[1 + bit / 16];
    if (bit % 16 + bits > 16) window |= uint32_t{words[2 + bit / 16]} << 16;
    state |= (window >> (bit % 16) & ((1u << bits) - 1)) << m;
  }
  p.out[i] = __fadd_rn(__fmul_rn(decode_mul1(state), __half2float(__ushort_as_half(words[0]))), bias);
}

// One block a stream of a row: the gate and the normed, gated value.
__global__ void __launch_bounds__(256) ple_gate_kernel(PleMixParams p) {
  wait_previous();
  __shared__ float sums[8];
  const int64_t site = blockIdx.x, row = site / p.streams, stream = site % p.streams;
  const int hidden = static_cast<int>(p.hidden);
  const float *key = p.key + site * hidden, *query = p.stack + site * hidden, *value = p.value + row * hidden;
  const float *wk = p.norm_key + stream * hidden, *wq = p.norm_query + stream * hidden;
  float kk = 0, qq = 0;
  for (int h = threadIdx.x; h < hidden; h += 256) {
    kk = fmaf(key[h], key[h], kk);
    qq = fmaf(query[h], query[h], qq);
  }
  const float n = static_cast<float>(hidden);
  const float ks = 1.0f / sqrtf(block_sum<8>(kk, sums) / n + p.key_eps);
  const float qs = 1.0f / sqrtf(block_sum<8>(qq, sums) / n + p.query_eps);
  float kq = 0;
  for (int h = threadIdx.x; h < hidden; h += 256)
    kq = fmaf(key[h] * ks * (1.0f + wk[h]), query[h] * qs * (1.0f + wq[h]), kq);
  const float raw = block_sum<8>(kq, sums) / sqrtf(n);
  const float root = sqrtf(fmaxf(fabsf(raw), 1e-6f));
  const float gate = sigmoid(raw > 0 ? root : raw < 0 ? -root : raw);
  float ww = 0;
  for (int h = threadIdx.x; h < hidden; h += 256) {
    const float w = __fmul_rn(gate, value[h]);
    ww = fmaf(w, w, ww);
  }
  const float ws = 1.0f / sqrtf(block_sum<8>(ww, sums) / n + p.conv_eps);
  for (int h = threadIdx.x; h < hidden; h += 256)
    p.normed[site * hidden + h] = __fmul_rn(gate, value[h]) * ws * (1.0f + p.norm_conv[stream * hidden + h]);
  if (threadIdx.x == 0) p.gate[site] = gate;
}

__global__ void __launch_bounds__(256) ple_conv_kernel(PleMixParams p) {
  wait_previous();
  const int64_t wide = p.streams * p.hidden, i = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (i >= p.rows * wide) return;
  const int64_t r = i / wide, ch = i % wide, history = (p.taps - 1) * p.dilation;
  const LaneRow l = find_lane(p.lanes, static_cast<int>(r));
  if (l.slot < 0) return;
  const int64_t kept = trial_of(p.lanes, l.lane).kept;
  const float* past = p.state + int64_t{l.slot} * (history + p.trials) * wide + ch;
  float sum = 0;
  for (int64_t t = 0; t < p.taps; ++t) {
    const int64_t j = r - l.first_row - (p.taps - 1 - t) * p.dilation;  // row of the lane; negative: from the state
    const float c = j >= 0 ? p.normed[(l.first_row + j) * wide + ch] : past[(history + kept + j) * wide];
    sum = fmaf(p.conv[ch * p.taps + t], c, sum);
  }
  const float w = __fmul_rn(p.gate[r * p.streams + ch / p.hidden], p.value[r * p.hidden + ch % p.hidden]);
  p.stack[i] += __fadd_rn(w, silu(sum));
}

// Keeps the last rows of c. blockIdx.y: the lane.
__global__ void __launch_bounds__(256) ple_keep_kernel(PleMixParams p) {
  wait_previous();
  const int64_t wide = p.streams * p.hidden, ch = int64_t{blockIdx.x} * 256 + threadIdx.x;
  if (ch >= wide) return;
  const int4 l = reinterpret_cast<const int4*>(p.lanes.table)[blockIdx.y];
  const int64_t history = (p.taps - 1) * p.dilation;
  keep_history(p.state + l.x * (history + p.trials) * wide + ch, p.normed + l.y * wide + ch, wide, history, l.z,
               trial_of(p.lanes, blockIdx.y));
}

}  // namespace

void ngram_decode(const NgramDecodeParams& p, cudaStream_t stream) {
  require(p.rows >= 0 && p.heads > 0 && p.dim > 0 && p.bits >= 0 && p.bits <= 8 && p.dim * p.bits % 16 == 0,
          "ngram_decode", "0 to 8 bits and whole words a row (bits, heads, dim, rows)",
          {p.bits, p.heads, p.dim, p.rows});
  require(p.bits > 0 || p.dtype == DType::F16 || p.dtype == DType::BF16 || p.dtype == DType::F32, "ngram_decode",
          "F16, BF16 or F32 rows at 0 bits (bytes of an element)", {static_cast<int64_t>(dtype_size(p.dtype))});
  if (p.rows == 0) return;
  launch("ngram_decode", ngram_decode_kernel, blocks_of(p.rows * p.heads * p.dim, 256), 256, 0, stream, p);
}

void ple_mix(const PleMixParams& p, cudaStream_t stream) {
  require(p.rows >= 0 && p.streams > 0 && p.hidden > 0 && p.taps >= 2 && p.dilation >= 1 && p.lanes.count < 65536 &&
              (p.trials > 0 || p.lanes.trials == nullptr),
          "ple_mix", "positive sizes, 2 taps or more (rows, streams, H, taps, dilation, lanes)",
          {p.rows, p.streams, p.hidden, p.taps, p.dilation, p.lanes.count});
  if (p.lanes.count == 0) return;
  const int64_t wide = p.streams * p.hidden;
  if (p.rows > 0) {
    launch("ple_gate", ple_gate_kernel, static_cast<unsigned>(p.rows * p.streams), 256, 0, stream, p);
    launch("ple_conv", ple_conv_kernel, blocks_of(p.rows * wide, 256), 256, 0, stream, p);
  }
  launch("ple_keep", ple_keep_kernel, dim3(blocks_of(wide, 256), static_cast<unsigned>(p.lanes.count)), 256, 0, stream,
         p);
}

}  // namespace fnx::cuda
