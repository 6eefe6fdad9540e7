// fnx-inspect --plan: where a checkpoint would lie on a card of a given size.
#pragma once

#include <string>

#include "libcore/cli/tool.h"

namespace fnx {

struct PlanOptions {
  bool plan = false;
  std::string vram = "16GiB", ram = "64GiB", reserve = "1GiB";
  int64_t context = 8192, parallel = 1, kv_device_tokens = 0;
  double hit_ratio = 0.9, link_gbps = 25, read_gbps = 0;

  void add(CLI::App& app);
};

// Prints the plan of a checkpoint folder or synthetic model and keeps it in the receipt; a gate says whether it fits.
void run_plan(const PlanOptions& options, const std::string& model, const std::string& format, ToolRun& run);

}  // namespace fnx
