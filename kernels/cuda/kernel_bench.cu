// The measuring side of kernels/kernel_bench.h.
#include "kernels/kernel_bench.h"

#include <algorithm>

#include "kernels/cuda/exl3_decode.cuh"
#include "kernels/cuda/exl3_experts.h"
#include "kernels/cuda/kernel_bench_run.h"

namespace fnx {

namespace {

using namespace cuda;

__device__ uint32_t mix(uint64_t i) {
  uint64_t x = i * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  return static_cast<uint32_t>((x ^ (x >> 27)) >> 16);
}
__global__ void fill_bits_kernel(uint32_t* to, int64_t n, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = mix(seed + i);
}
// Scales: F16 of 0.5 to 1 with random signs.
__global__ void fill_scales_kernel(uint16_t* to, int64_t n, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = static_cast<uint16_t>(0x3800u | (mix(seed + i) & 0x83FFu));
}
__global__ void fill_rows_kernel(float* to, int64_t n, uint64_t seed) {
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += int64_t{gridDim.x} * blockDim.x)
    to[i] = static_cast<float>(mix(seed + i)) * 0x1p-31f - 1.0f;
}
__global__ void __launch_bounds__(512) read_kernel(const uint4* from, int64_t n, uint32_t* out) {
  uint32_t x = 0;
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (; i + 7 * step < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(from + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) x ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (x == 0x12345678u) *out = x;
}

constexpr int kDecodeLoops = 512;
// Decodes from registers and feeds the tensor cores, so that nothing but the decoding can be the limit.
template <exl3::Codebook Book, int HalfBits>
__global__ void __launch_bounds__(256, 4) decode_ceiling_kernel(uint32_t seed, float* out) {
  uint32_t bits[3] = {seed + threadIdx.x, seed * 3 + blockIdx.x, seed * 7 + threadIdx.x};
  float acc[4] = {};
  for (int i = 0; i < kDecodeLoops; ++i) {
    const uint32_t a[4] = {decode_pair<Book>(lane_state<HalfBits, 0>(bits), lane_state<HalfBits, 1>(bits)),
                           decode_pair<Book>(lane_state<HalfBits, 4>(bits), lane_state<HalfBits, 5>(bits)),
                           decode_pair<Book>(lane_state<HalfBits, 2>(bits), lane_state<HalfBits, 3>(bits)),
                           decode_pair<Book>(lane_state<HalfBits, 6>(bits), lane_state<HalfBits, 7>(bits))};
    mma_16816(acc, a, seed, seed);
#pragma unroll
    for (int w = 0; w < Width<HalfBits>::kAligned; ++w) bits[w] += 0x9E3779B9u;
  }
  if (acc[0] + acc[1] + acc[2] + acc[3] == 1.25f) *out = acc[0];
}

constexpr int kMmaLoops = 1024, kMmaChains = 8;
__global__ void __launch_bounds__(256) mma_ceiling_kernel(uint32_t seed, float* out) {
  const uint32_t a[4] = {mix(seed + threadIdx.x) & 0x3BFF3BFFu, mix(seed + 1) & 0x3BFF3BFFu, seed, seed + 1};
  const uint32_t b[2] = {mix(threadIdx.x) & 0x3BFF3BFFu, mix(threadIdx.x + 9) & 0x3BFF3BFFu};
  float acc[kMmaChains][4] = {};
  for (int i = 0; i < kMmaLoops; ++i)
#pragma unroll
    for (int c = 0; c < kMmaChains; ++c) mma_16816(acc[c], a, b[0], b[1]);
  float sum = 0;
#pragma unroll
  for (int c = 0; c < kMmaChains; ++c) sum += acc[c][0] + acc[c][1] + acc[c][2] + acc[c][3];
  if (sum == 1.25f) *out = sum;
}

class CudaBench final : public KernelBench {
 public:
  CudaBench(int index, int repeat) : run_(index, repeat) {}

  std::string device_name() const override { return run_.device().name; }
  std::string architecture() const override {
    return "sm_" + std::to_string(run_.device().major * 10 + run_.device().minor);
  }
  double l2_bytes() const override { return run_.device().l2CacheSize; }

  BenchSeries read_ceiling() override {
    BenchArena arena;
    const int64_t bytes = int64_t{4} << 30;
    const auto* from = reinterpret_cast<const uint4*>(arena.bits(bytes / 2, 1));
    auto* out = arena.take<uint32_t>(1);
    BenchSeries s = run_.replay(1, [&](int) {
      read_kernel<<<run_.device().multiProcessorCount * 4, 512, 0, run_.stream()>>>(from, bytes / 16, out);
    });
    s.bytes = static_cast<double>(bytes);
    return s;
  }
  BenchSeries copy_ceiling() override {
    BenchArena arena;
    const int64_t bytes = int64_t{2} << 30;
    auto *from = arena.bits(bytes / 2, 1), *to = arena.take<uint16_t>(bytes / 2);
    BenchSeries s = run_.replay(
        1, [&](int) { check_cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, run_.stream()), "copy"); });
    s.bytes = 2.0 * bytes;
    return s;
  }
  BenchSeries decode_ceiling(exl3::Codebook book, int half_bits) override {
    BenchArena arena;
    auto* out = arena.take<float>(1);
    const int blocks = run_.device().multiProcessorCount * 8 * 8;
    BenchSeries s = run_.replay(1, [&](int) { launch_decode_ceiling(book, half_bits, blocks, out); });
    s.values = 8.0 * 256 * blocks * kDecodeLoops;
    return s;
  }
  BenchSeries mma_ceiling() override {
    BenchArena arena;
    auto* out = arena.take<float>(1);
    const int blocks = run_.device().multiProcessorCount * 16;
    BenchSeries s = run_.replay(1, [&](int) { mma_ceiling_kernel<<<blocks, 256, 0, run_.stream()>>>(12345u, out); });
    s.flops = 4096.0 * 8 * blocks * kMmaLoops * kMmaChains;
    return s;
  }

  BenchSeries linear(int64_t in, int64_t out, exl3::Codebook book, int half_bits, int64_t rows, bool cold,
                     const std::string& path) override {
    BenchArena arena;
    const int64_t words = in / 16 * (out / 16) * exl3::tile_words(half_bits);
    const int copies = cold ? run_.copies_of(2 * words) : 1;
    std::vector<Exl3Linear> calls(copies);
    const int splits = exl3_splits(in, out);
    const size_t bytes = exl3_workspace_bytes(in, out, rows);
    auto* workspace = arena.take<std::byte>(bytes);
    const float* x = arena.rows(rows * in, 5);
    float* y = arena.take<float>(rows * out);
    const uint16_t *suh = arena.scales(in, 3), *svh = arena.scales(out, 4);
    for (int c = 0; c < copies; ++c) {
      Exl3Linear& p = calls[c];
      p.weight = {in, out, splits, book, half_bits, arena.bits(words, 1000003u * (c + 1)), suh, svh, nullptr};
      p.rows = rows, p.x = x, p.y = y, p.workspace = workspace, p.workspace_bytes = bytes;
    }
    BenchSeries s = run_.rotate(copies, [&](int copy) {
      const Exl3Linear& p = calls[copy];
      path == "few"    ? exl3_linear_few(p, run_.stream())
      : path == "many" ? exl3_linear_many(p, run_.stream())
                       : exl3_linear(p, run_.stream());
    });
    s.bytes = 2.0 * words + 4.0 * rows * (in + out) + 2.0 * (in + out);
    s.values = 1.0 * in * out, s.flops = 2.0 * rows * in * out;
    return s;
  }

  BenchSeries experts(int64_t hidden, int64_t width, exl3::Codebook book, int half_bits, int64_t experts, int64_t slots,
                      int64_t rows, const std::string& path) override {
    BenchArena arena;
    const int64_t words = hidden / 16 * (width / 16) * exl3::tile_words(half_bits);
    const uint16_t *wide = arena.scales(hidden, 3), *narrow = arena.scales(width, 4);
    const uint16_t* trellis = arena.bits(words * 3 * experts, 77);
    std::vector<Exl3Expert> table(experts);
    for (int64_t e = 0; e < experts; ++e) {
      const uint16_t* t = trellis + words * 3 * e;
      table[e] = {
          {t, wide, narrow, half_bits}, {t + words, wide, narrow, half_bits}, {t + 2 * words, narrow, wide, half_bits}};
    }
    auto* device_table = arena.take<Exl3Expert>(experts);
    check_cuda(cudaMemcpy(device_table, table.data(), experts * sizeof(Exl3Expert), cudaMemcpyHostToDevice), "copy");
    // Launch after launch takes other experts; a row's experts are all different.
    const int sets = static_cast<int>(std::max<int64_t>(1, experts / std::max<int64_t>(1, slots * rows)));
    std::vector<int32_t> ids(sets * rows * slots);
    std::vector<uint8_t> used(experts);
    for (int64_t i = 0; i < sets * rows; ++i)
      for (int64_t j = 0; j < slots; ++j) {
        ids[i * slots + j] = static_cast<int32_t>((i * slots + j) % experts);
        if (i < rows) used[ids[i * slots + j]] = 1;
      }
    auto* device_ids = arena.take<int32_t>(ids.size());
    check_cuda(cudaMemcpy(device_ids, ids.data(), ids.size() * 4, cudaMemcpyHostToDevice), "copy");
    Exl3Experts p;
    p.rows = rows, p.slots_per_row = slots, p.experts = experts, p.hidden = hidden, p.width = width, p.codebook = book;
    p.table = device_table, p.x = arena.rows(rows * hidden, 5), p.slots = arena.take<float>(rows * slots * hidden);
    p.workspace_bytes = exl3_experts_workspace_bytes(rows, slots, experts, hidden, width);
    p.workspace = arena.take<std::byte>(p.workspace_bytes);
    BenchSeries s = run_.rotate(sets, [&](int set) {
      p.ids = device_ids + set * rows * slots;
      path == "few"    ? exl3_experts_few(p, run_.stream())
      : path == "many" ? exl3_experts_many(p, run_.stream())
                       : exl3_experts(p, run_.stream());
    });
    const auto distinct = static_cast<double>(std::count(used.begin(), used.end(), 1));
    s.bytes = distinct * 6.0 * words + 4.0 * rows * hidden * (slots + 1);
    s.values = distinct * 3.0 * hidden * width, s.flops = 6.0 * rows * slots * hidden * width;
    return s;
  }

  BenchSeries operation(const BenchOperation& operation) override { return bench_operation(run_, operation); }

 private:
  void launch_decode_ceiling(exl3::Codebook book, int half_bits, int blocks, float* out) {
    const auto run = [&](auto* kernel) { kernel<<<blocks, 256, 0, run_.stream()>>>(99u, out); };
    using exl3::Codebook;
    if (book == Codebook::Mcg) return run(decode_ceiling_kernel<Codebook::Mcg, 8>);
    if (book == Codebook::ThreeInst) return run(decode_ceiling_kernel<Codebook::ThreeInst, 8>);
    switch (half_bits) {
      case 6:
        return run(decode_ceiling_kernel<Codebook::Mul1, 6>);
      case 10:
        return run(decode_ceiling_kernel<Codebook::Mul1, 10>);
      case 12:
        return run(decode_ceiling_kernel<Codebook::Mul1, 12>);
      default:
        return run(decode_ceiling_kernel<Codebook::Mul1, 8>);
    }
  }

  BenchRun run_;
};

}  // namespace

namespace cuda {

BenchArena::~BenchArena() {
  for (void* p : owned_) cudaFree(p);
}
void* BenchArena::take_bytes(size_t bytes) {
  void* p = nullptr;
  check_cuda(cudaMalloc(&p, bytes), "allocation for a measurement");
  owned_.push_back(p);
  check_cuda(cudaMemset(p, 0, bytes), "memset");
  return p;
}
uint16_t* BenchArena::bits(int64_t words, uint64_t seed) {
  auto* p = take<uint16_t>(words);
  fill_bits_kernel<<<1024, 256>>>(reinterpret_cast<uint32_t*>(p), words / 2, seed);
  return p;
}
uint16_t* BenchArena::scales(int64_t n, uint64_t seed) {
  auto* p = take<uint16_t>(n);
  fill_scales_kernel<<<1024, 256>>>(p, n, seed);
  return p;
}
float* BenchArena::rows(int64_t n, uint64_t seed) {
  auto* p = take<float>(n);
  fill_rows_kernel<<<1024, 256>>>(p, n, seed);
  return p;
}

BenchRun::BenchRun(int index, int repeat) : repeat_(repeat) {
  check_cuda(cudaSetDevice(index), "cudaSetDevice");
  check_cuda(cudaGetDeviceProperties(&device_, index), "cudaGetDeviceProperties");
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
  check_cuda(cudaEventCreate(&begin_), "cudaEventCreate");
  check_cuda(cudaEventCreate(&end_), "cudaEventCreate");
}
BenchRun::~BenchRun() { cudaEventDestroy(begin_), cudaEventDestroy(end_), cudaStreamDestroy(stream_); }

int BenchRun::copies_of(int64_t bytes) const {
  constexpr int64_t kMostCopies = 2048;
  return static_cast<int>(std::clamp<int64_t>(3 * int64_t{device_.l2CacheSize} / bytes + 1, 2, kMostCopies));
}

BenchSeries BenchRun::rotate(int copies, const std::function<void(int)>& f) {
  constexpr int kLeastLaunches = 20;
  BenchSeries s = replay(std::max(copies, kLeastLaunches), [&](int i) { f(i % copies); });
  s.copies = copies;
  return s;
}

BenchSeries BenchRun::replay(int launches, const std::function<void(int)>& f) {
  check_cuda(cudaDeviceSynchronize(), "preparing a measurement");
  cudaGraph_t graph;
  cudaGraphExec_t exec;
  check_cuda(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "capture");
  for (int i = 0; i < launches; ++i) f(i);
  check_cuda(cudaStreamEndCapture(stream_, &graph), "capture");
  check_cuda(cudaGraphInstantiate(&exec, graph, 0), "graph");
  BenchSeries s;
  s.launches = launches;
  for (int i = -2; i < repeat_; ++i) {
    check_cuda(cudaEventRecord(begin_, stream_), "event");
    check_cuda(cudaGraphLaunch(exec, stream_), "graph");
    check_cuda(cudaEventRecord(end_, stream_), "event");
    check_cuda(cudaEventSynchronize(end_), "measured launches");
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin_, end_), "event");
    if (i >= 0) s.us.push_back(1000.0 * ms / launches);
  }
  cudaGraphExecDestroy(exec), cudaGraphDestroy(graph);
  return s;
}

}  // namespace cuda

std::unique_ptr<KernelBench> KernelBench::open(int index, int repeat) {
  int count = 0;
  const cudaError_t code = cudaGetDeviceCount(&count);
  if (code != cudaSuccess || index < 0 || index >= count)
    throw Error(ErrorKind::Unsupported,
                "no cuda device " + std::to_string(index) + ": " +
                    (code != cudaSuccess ? cudaGetErrorString(code) : std::to_string(count) + " found"));
  return std::make_unique<CudaBench>(index, repeat);
}

}  // namespace fnx
