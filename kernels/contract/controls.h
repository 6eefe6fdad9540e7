// Faults that every kernel's gates must see, planted around any implementation.
#pragma once

#include "kernels/contract/gates.h"

namespace fnx::contract {

// The faults that need no knowledge of the kernel, then the kernel's own.
std::vector<Control> all_controls(const Kernel& kernel);

// A control that changes what the implementation is given; the judge sees the true inputs.
Control tamper_control(std::string name, int gate, std::function<void(Problem&)> tamper);
// A control that changes what the implementation left.
Control spoil_control(std::string name, int gate, std::function<void(const Problem& given, Problem& done)> spoil);
// A control that is another host implementation.
Control host_control(std::string name, int gate, std::function<void(Problem&)> faulty);

struct ControlResult {
  std::string name;
  int gate = 0;
  std::string where;  // "host", "device"
  bool red = false;
  std::string detail;  // what the gate said
};

// Runs the control's gate on the kernel's host shapes with every kind of input.
ControlResult run_control(const Kernel& kernel, const Control& control, const Implementation& sound,
                          const Deadline& deadline);

}  // namespace fnx::contract
