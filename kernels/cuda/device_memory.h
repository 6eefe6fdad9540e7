// The one owner of the backend's memory: device allocations under a limit, pinned host memory, streamed uploads.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "kernels/cuda/stream.h"
#include "kernels/view.h"

struct CUevent_st;

namespace fnx::cuda {

// Allocations keep it alive; it is for the device that was current when it was made.
class DeviceMemory : public std::enable_shared_from_this<DeviceMemory> {
 public:
  // limit in bytes; 0: what the device has free. A plan only counts: its buffers have no memory.
  DeviceMemory(uint64_t limit, bool plan) : limit_(limit), plan_(plan) {}

  // 256-byte aligned, zero-filled on `stream`. Throws Unsupported with bytes asked, in use and the limit.
  Buffer device(size_t bytes, cudaStream_t stream);
  // Pinned, mapped at the same address, and zero-filled.
  Buffer pinned(size_t bytes);
  uint64_t in_use() const { return in_use_; }
  bool plan() const { return plan_; }

 private:
  uint64_t limit_;
  bool plan_;
  std::atomic<uint64_t> in_use_{0};
};

// Copies host memory of any kind to the device through two pinned buffers, so that at most these are read ahead.
class Uploader {
 public:
  Uploader(DeviceMemory& memory, cudaStream_t stream);
  ~Uploader();
  Uploader(const Uploader&) = delete;
  Uploader& operator=(const Uploader&) = delete;

  // What follows goes to `to` and on from there.
  void seek(std::byte* to);
  void write(const void* from, size_t bytes);
  // Returns when everything written has arrived.
  void finish();

 private:
  void flush();
  static constexpr size_t kBytes = size_t{16} << 20;
  Buffer half_[2];
  CUevent_st* event_[2] = {};
  cudaStream_t stream_;
  bool idle_;  // in a plan
  std::byte* to_ = nullptr;
  size_t filled_ = 0;
  int now_ = 0;
};

}  // namespace fnx::cuda
