// Memory, copies, graphs and function attributes for the kernel contract and the benchmark; never on the engine's path.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

struct CUstream_st;

namespace fnx::cuda {

struct DeviceInfo {
  std::string name, architecture;  // "sm_90"
  uint64_t memory_bytes = 0, l2_bytes = 0;
};
// Device 0; empty without a driver or a device. Never throws.
std::optional<DeviceInfo> device_info();

// One kernel node of a captured launch.
struct LaunchedKernel {
  std::string name;  // mangled
  int registers = 0, max_threads = 0, threads = 0;
  int64_t static_shared_bytes = 0, dynamic_shared_bytes = 0, local_bytes = 0;
};

// All errors are Device.
class Harness {
 public:
  Harness();
  ~Harness();
  Harness(const Harness&) = delete;
  Harness& operator=(const Harness&) = delete;

  CUstream_st* stream();
  // A buffer of that name, as long as the largest `bytes` asked for, 256-byte aligned. `zeroed`: zero-filled
  // whenever it is made anew; otherwise its content is undefined.
  void* buffer(const std::string& name, size_t bytes, bool zeroed);
  // In stream order.
  void fill(void* device, uint8_t value, size_t bytes);
  // Pageable host memory, in stream order; upload returns after it was read, download after it was written.
  void upload(void* device, const void* host, size_t bytes);
  void download(void* host, const void* device, size_t bytes);
  void synchronize();
  // Captures what `launch` puts on the stream into a graph, in place of the one before.
  void capture(const std::function<void()>& launch);
  void replay();
  std::vector<LaunchedKernel> captured_kernels();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace fnx::cuda
