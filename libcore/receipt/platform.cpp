#include "libcore/receipt/platform.h"

#include <unistd.h>

#include <fstream>

namespace fnx {

CpuInfo cpu_info() {
  CpuInfo info;
  info.threads = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  info.ram_bytes = static_cast<uint64_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
  std::ifstream cpuinfo("/proc/cpuinfo");
  for (std::string line; std::getline(cpuinfo, line);) {
    if (line.rfind("model name", 0) != 0) continue;
    const size_t colon = line.find(':');
    if (colon != std::string::npos && colon + 2 < line.size()) info.name = line.substr(colon + 2);
    break;
  }
  if (info.name.empty()) info.name = "unknown";
  return info;
}

Json platform_block() {
  const CpuInfo cpu = cpu_info();
  Json block = Json::object();
  block["gpus"] = Json::array();
  for (const GpuInfo& gpu : list_gpus())
    block["gpus"].push_back(Json{{"index", gpu.index},
                                 {"name", gpu.name},
                                 {"architecture", gpu.architecture},
                                 {"memory_bytes", gpu.memory_bytes},
                                 {"l2_bytes", gpu.l2_bytes}});
  block["driver"] = cuda_driver_version();
  block["cuda_runtime"] = cuda_runtime_version();
  block["nccl"] = "none";
  block["cpu"] = Json{{"name", cpu.name}, {"threads", cpu.threads}};
  block["ram_bytes"] = cpu.ram_bytes;
  return block;
}

}  // namespace fnx
