// The kernel contract: every kernel through its gates, every control red. Tests and fnx-kernel-contract run the same.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "kernels/contract/controls.h"

namespace fnx::contract {

// Every kernel with a record.
const KernelList& registry();
// Launch functions of kernels/cuda that need a record; those without one are limit problems.
const std::vector<std::string>& launch_functions();

struct Options {
  std::vector<std::string> filters;  // parts of kernel ids; empty: all
  std::array<bool, 4> gates = {true, true, true, true};
  bool device = false;  // the CUDA kernels; otherwise the host implementations
  bool small = false;   // the host's shapes on the device too
  double seconds = 0;   // time cap; 0: none
  std::function<bool()> stopping;
  std::function<void(const std::string& kernel, size_t done, size_t total)> progress;
};

struct KernelReport {
  const Kernel* kernel = nullptr;
  std::array<GateResult, 4> gates;  // gate g at [g - 1]
  Comparison values;                // of gate 2, all shapes
  std::vector<std::pair<std::string, Comparison>> by_shape;
  GateResult against_cpu;  // the host implementation beside kernels/cpu
  std::vector<ControlResult> controls;
  std::vector<SymbolResources> resources;
  double seconds = 0;

  // Every gate that was asked for passed; on the host, gate 1 does not count.
  bool passed(const Options& options) const;
};

struct Report {
  std::vector<KernelReport> kernels;
  std::vector<std::string> limit_problems;
  bool completed = true;

  size_t kernels_passed(const Options& options) const;
  size_t controls_run() const;
  size_t controls_red() const;
  // Everything passed, every control is red, nothing is missing.
  bool sound(const Options& options) const;
};

// Runs `kernels`, by default the registry's. On the host, gate 1 is not run.
Report run_contract(const Options& options, const KernelList& kernels = registry());

// True when `id` holds one of the filters, or there is none.
bool selected(const Options& options, const std::string& id);

}  // namespace fnx::contract
