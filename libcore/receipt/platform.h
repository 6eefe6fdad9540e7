// The machine, without anything that names it.
#pragma once

#include <cstdint>
#include <string>

#include "kernels/devices.h"
#include "libcore/receipt/receipt.h"

namespace fnx {

struct CpuInfo {
  std::string name;
  int threads = 0;
  uint64_t ram_bytes = 0;
};

CpuInfo cpu_info();

// The receipt's `platform` block.
Json platform_block();

}  // namespace fnx
