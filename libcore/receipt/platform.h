// The machine, without anything that names it.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "libcore/receipt/receipt.h"

namespace fnx {

struct CpuInfo {
  std::string name;
  int threads = 0;
  uint64_t ram_bytes = 0;
};

struct GpuInfo {
  int index = 0;
  std::string name;          // "NVIDIA GeForce RTX 5060 Ti"
  std::string architecture;  // "sm_120"
  uint64_t memory_bytes = 0, l2_bytes = 0;
};

CpuInfo cpu_info();
// GPUs that this build can drive; empty without the cuda backend, a driver or a device. Never throws.
std::vector<GpuInfo> list_gpus();

// The receipt's `platform` block.
Json platform_block();

}  // namespace fnx
