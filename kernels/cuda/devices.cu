#include "kernels/devices.h"

#include <cuda_runtime_api.h>

namespace fnx {

namespace {
std::string version_text(int version) {
  return version == 0 ? "none" : std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}
}  // namespace

std::vector<GpuInfo> list_gpus() {
  std::vector<GpuInfo> list;
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp p{};
    if (cudaGetDeviceProperties(&p, i) != cudaSuccess) continue;
    list.push_back({i, p.name, "sm_" + std::to_string(p.major * 10 + p.minor), p.totalGlobalMem,
                    static_cast<uint64_t>(p.l2CacheSize)});
  }
  cudaGetLastError();  // a machine without a driver is no error of a later call
  return list;
}

uint64_t free_device_bytes() {
  size_t free = 0, total = 0;
  if (cudaMemGetInfo(&free, &total) == cudaSuccess) return free;
  cudaGetLastError();
  return 0;
}

std::string cuda_driver_version() {
  int version = 0;
  if (cudaDriverGetVersion(&version) != cudaSuccess) cudaGetLastError();
  return version_text(version);
}

std::string cuda_runtime_version() {
  int version = 0;
  if (cudaRuntimeGetVersion(&version) != cudaSuccess) cudaGetLastError();
  return version_text(version);
}

}  // namespace fnx
