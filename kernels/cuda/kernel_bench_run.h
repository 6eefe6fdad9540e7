// What the benchmark's files share: memory of a measurement, replayed launches. Errors are Device.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/cuda/device.cuh"
#include "kernels/kernel_bench.h"

namespace fnx::cuda {

// Device memory for the time of one series.
class BenchArena {
 public:
  BenchArena() = default;
  BenchArena(const BenchArena&) = delete;
  ~BenchArena();

  // n elements, 256-byte aligned and zero-filled.
  template <class T>
  T* take(int64_t n) {
    return static_cast<T*>(take_bytes(std::max<size_t>(256, n * sizeof(T))));
  }
  template <class T>
  T* put(const std::vector<T>& from) {
    T* to = take<T>(static_cast<int64_t>(from.size()));
    check_cuda(cudaMemcpy(to, from.data(), from.size() * sizeof(T), cudaMemcpyHostToDevice), "copy");
    return to;
  }
  uint16_t* bits(int64_t words, uint64_t seed);
  uint16_t* scales(int64_t n, uint64_t seed);  // F16 of 0.5 to 1 with random signs; read as BF16 under 0.01
  float* rows(int64_t n, uint64_t seed);       // uniform in [-1, 1)

 private:
  void* take_bytes(size_t bytes);
  std::vector<void*> owned_;
};

// A device and the stream on which it is measured.
class BenchRun {
 public:
  BenchRun(int index, int repeat);
  BenchRun(const BenchRun&) = delete;
  ~BenchRun();

  const cudaDeviceProp& device() const { return device_; }
  cudaStream_t stream() const { return stream_; }
  // How many copies of `bytes` hold three times what the L2 does, at least two.
  int copies_of(int64_t bytes) const;
  // Captures `launches` calls of f into a graph, replays it twice to warm up and then `repeat` times.
  BenchSeries replay(int launches, const std::function<void(int)>& f);
  // The same with a copy in place of a launch's number, every copy at least once.
  BenchSeries rotate(int copies, const std::function<void(int)>& f);

 private:
  int repeat_;
  cudaDeviceProp device_{};
  cudaStream_t stream_{};
  cudaEvent_t begin_{}, end_{};
};

// kernels/cuda/kernel_bench_ops.cu, and those of sparse attention.
BenchSeries bench_operation(BenchRun& run, const BenchOperation& op);
BenchSeries bench_qsa(BenchRun& run, const BenchOperation& op);

}  // namespace fnx::cuda
