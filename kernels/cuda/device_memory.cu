#include "kernels/cuda/device_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/host_threads.h"

namespace fnx::cuda {

Buffer DeviceMemory::device(size_t bytes, cudaStream_t stream) {
  const uint64_t size = (std::max<size_t>(bytes, 1) + 511) / 512 * 512;  // the allocator's own step
  if (plan_) {
    in_use_ += size;
    return Buffer(nullptr, bytes, Space::Device, [](std::byte*) {});
  }
  const auto refuse = [&](uint64_t limit, const char* way_out) {
    throw Error(ErrorKind::Unsupported, "cannot allocate " + std::to_string(bytes) +
                                            " bytes of device memory: " + std::to_string(in_use_) + " are in use of " +
                                            std::to_string(limit) + "; " + way_out);
  };
  if (limit_ != 0 && in_use_ + size > limit_)
    refuse(limit_, "raise --vram-limit, or lower --parallel, --chunk-rows or the context");
  void* data = nullptr;
  if (const cudaError_t e = cudaMalloc(&data, size); e != cudaSuccess) {
    cudaGetLastError();
    if (e != cudaErrorMemoryAllocation) check_cuda(e, "cudaMalloc");
    size_t free = 0, total = 0;
    check_cuda(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    refuse(in_use_ + free, "lower --parallel, --chunk-rows or the context, or take another --device");
  }
  in_use_ += size;
  Buffer buffer(static_cast<std::byte*>(data), bytes, Space::Device, [owner = shared_from_this(), size](std::byte* p) {
    cudaFree(p);
    owner->in_use_ -= size;
  });
  check_cuda(cudaMemsetAsync(data, 0, size, stream), "cudaMemset");
  check_cuda(cudaStreamSynchronize(stream), "cudaMemset");  // other streams use it too
  return buffer;
}

namespace {

// What of the machine's memory, or of this container's, is left.
uint64_t available_host_bytes() {
  uint64_t bytes = UINT64_MAX;
  std::ifstream info("/proc/meminfo");
  for (std::string line; std::getline(info, line);)
    if (line.starts_with("MemAvailable:")) bytes = std::strtoull(line.c_str() + 13, nullptr, 10) << 10;
  uint64_t most = 0, used = 0;
  if (std::ifstream("/sys/fs/cgroup/memory.max") >> most && std::ifstream("/sys/fs/cgroup/memory.current") >> used)
    bytes = std::min(bytes, most - std::min(most, used));
  return bytes;
}

// Pages of large memory are touched by several threads, which pinning by itself would do with one.
void touch(std::byte* data, size_t bytes) {
  constexpr size_t kPiece = size_t{16} << 20;
  on_host_threads(static_cast<int64_t>((bytes + kPiece - 1) / kPiece), [&](int64_t i) {
    const size_t at = static_cast<size_t>(i) * kPiece;
    for (size_t page = at; page < std::min(at + kPiece, bytes); page += 4096) data[page] = std::byte{};
  });
}

}  // namespace

Buffer DeviceMemory::pinned(size_t bytes) {
  if (plan_) return Buffer(nullptr, bytes, Space::Host, [](std::byte*) {});
  const auto refuse = [&] {
    throw Error(ErrorKind::Unsupported, "cannot pin " + std::to_string(bytes) + " bytes of host memory, " +
                                            std::to_string(available_host_bytes()) +
                                            " are available; take a machine with more, or a pack of fewer bits");
  };
  constexpr size_t kLarge = size_t{64} << 20;
  if (bytes < kLarge) {
    void* data = nullptr;
    if (const cudaError_t e = cudaHostAlloc(&data, std::max<size_t>(bytes, 1), cudaHostAllocMapped); e != cudaSuccess) {
      cudaGetLastError();
      if (e != cudaErrorMemoryAllocation) check_cuda(e, "cudaHostAlloc");
      refuse();
    }
    std::memset(data, 0, bytes);
    return Buffer(static_cast<std::byte*>(data), bytes, Space::Host, [](std::byte* p) { cudaFreeHost(p); });
  }
  if (bytes > available_host_bytes()) refuse();
  void* data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (data == MAP_FAILED) refuse();
  madvise(data, bytes, MADV_HUGEPAGE);
  touch(static_cast<std::byte*>(data), bytes);
  if (const cudaError_t e = cudaHostRegister(data, bytes, cudaHostRegisterMapped); e != cudaSuccess) {
    cudaGetLastError();
    munmap(data, bytes);
    if (e != cudaErrorMemoryAllocation) check_cuda(e, "cudaHostRegister");
    refuse();
  }
  return Buffer(static_cast<std::byte*>(data), bytes, Space::Host, [bytes](std::byte* p) {
    cudaHostUnregister(p);
    munmap(p, bytes);
  });
}

Uploader::Uploader(DeviceMemory& memory, cudaStream_t stream) : stream_(stream), idle_(memory.plan()) {
  if (idle_) return;
  for (int i = 0; i < 2; ++i) {
    half_[i] = memory.pinned(kBytes);
    check_cuda(cudaEventCreateWithFlags(&event_[i], cudaEventDisableTiming), "cudaEventCreate");
  }
}

Uploader::~Uploader() {
  if (idle_) return;
  cudaStreamSynchronize(stream_);
  for (CUevent_st* e : event_)
    if (e != nullptr) cudaEventDestroy(e);
}

void Uploader::seek(std::byte* to) {
  flush();
  to_ = to;
}

void Uploader::write(const void* from, size_t bytes) {
  if (idle_) return;
  const auto* next = static_cast<const std::byte*>(from);
  while (bytes > 0) {
    const size_t part = std::min(bytes, kBytes - filled_);
    std::memcpy(half_[now_].view(DType::U8, {static_cast<int64_t>(kBytes)}).data + filled_, next, part);
    filled_ += part, next += part, bytes -= part;
    if (filled_ == kBytes) flush();
  }
}

void Uploader::flush() {
  if (filled_ == 0) return;
  const std::byte* from = half_[now_].view(DType::U8, {static_cast<int64_t>(kBytes)}).data;
  check_cuda(cudaMemcpyAsync(to_, from, filled_, cudaMemcpyHostToDevice, stream_), "upload");
  check_cuda(cudaEventRecord(event_[now_], stream_), "upload");
  to_ += filled_;
  filled_ = 0;
  now_ = 1 - now_;
  check_cuda(cudaEventSynchronize(event_[now_]), "upload");  // the other half may be filled again
}

void Uploader::finish() {
  flush();
  if (!idle_) check_cuda(cudaStreamSynchronize(stream_), "upload");
}

}  // namespace fnx::cuda
