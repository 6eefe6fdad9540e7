// A kernel's operands in device memory; what a family's launch is given. Plain C++: the CUDA calls are in kernels/cuda.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "kernels/contract/kernel.h"

struct CUstream_st;

namespace fnx::contract {

class DeviceProblem {
 public:
  virtual ~DeviceProblem() = default;
  // Address of an operand's first element; null when the problem has none of that name.
  virtual void* at(std::string_view operand) = 0;
  // A workspace of the kernel, 256-byte aligned. Zero-filled when it is made or grows, and kept between launches.
  virtual void* workspace(const std::string& name, size_t bytes) = 0;
  // The same with bytes that are 0xff before every launch: what a kernel reads there it must have written.
  virtual void* scratch(const std::string& name, size_t bytes) = 0;
  // Bytes from the host in a workspace.
  virtual void* constant(const std::string& name, const void* data, size_t bytes) = 0;
  virtual CUstream_st* stream() = 0;

  template <class T>
  T* get(std::string_view operand) {
    return static_cast<T*>(at(operand));
  }
  // At least one element.
  template <class T>
  T* scratch_of(const std::string& name, int64_t count) {
    return static_cast<T*>(scratch(name, static_cast<size_t>(count > 0 ? count : 1) * sizeof(T)));
  }
};

using Enqueue = std::function<void(const Problem&, DeviceProblem&)>;

// True when this build holds the CUDA kernels and a device is present.
bool device_present();
// "sm_90"; empty without a device.
std::string device_architecture();
// Copies operands in, launches, waits, copies everything back. `replay` launches through a captured graph, twice, from
// the same operands. Empty without the CUDA kernels.
Implementation device_implementation(Enqueue enqueue);
// Every kernel that a captured launch of `problem` holds, with its function's attributes.
std::vector<SymbolResources> launched_symbols(const Enqueue& enqueue, const Problem& problem);

}  // namespace fnx::contract
