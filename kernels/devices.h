// The GPUs that this build can drive, without the CUDA headers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace fnx {

struct GpuInfo {
  int index = 0;
  std::string name;          // "NVIDIA GeForce RTX 5060 Ti"
  std::string architecture;  // "sm_120"
  uint64_t memory_bytes = 0, l2_bytes = 0;
};

// Empty without the cuda backend, a driver or a device. Never throws.
std::vector<GpuInfo> list_gpus();

// Bytes of the current device's memory that nobody uses; 0 without a device. Never throws.
uint64_t free_device_bytes();

// "13.0", the newest CUDA that the driver runs and the one that was built in; "none" where there is no such thing.
std::string cuda_driver_version();
std::string cuda_runtime_version();

}  // namespace fnx
