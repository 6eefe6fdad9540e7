#include "kernels/cuda/device_memory.h"

#include <algorithm>
#include <cstring>

#include "kernels/cuda/device.cuh"

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

Buffer DeviceMemory::pinned(size_t bytes) {
  if (plan_) return Buffer(nullptr, bytes, Space::Host, [](std::byte*) {});
  void* data = nullptr;
  if (const cudaError_t e = cudaHostAlloc(&data, std::max<size_t>(bytes, 1), cudaHostAllocDefault); e != cudaSuccess) {
    cudaGetLastError();
    if (e != cudaErrorMemoryAllocation) check_cuda(e, "cudaHostAlloc");
    throw Error(ErrorKind::Unsupported, "cannot pin " + std::to_string(bytes) + " bytes of host memory");
  }
  std::memset(data, 0, bytes);
  return Buffer(static_cast<std::byte*>(data), bytes, Space::Host, [](std::byte* p) { cudaFreeHost(p); });
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
