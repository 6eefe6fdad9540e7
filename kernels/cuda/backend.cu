// Memory, streams, events and graphs of the cuda backend.
#include "kernels/cuda/backend.h"

#include "kernels/cuda/device.cuh"
#include "kernels/devices.h"

namespace fnx {

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions& options) {
  return std::make_unique<cuda::CudaBackend>(options);
}

namespace cuda {

namespace {

struct CudaEvent : Event {
  explicit CudaEvent(bool timed) {
    check_cuda(cudaEventCreateWithFlags(&handle, timed ? cudaEventDefault : cudaEventDisableTiming), "cudaEventCreate");
  }
  ~CudaEvent() override { cudaEventDestroy(handle); }
  void wait() override { check_cuda(cudaEventSynchronize(handle), "waiting for the device"); }
  cudaEvent_t handle = nullptr;
};

struct NoEvent : Event {
  void wait() override {}
};

struct CudaGraph : Graph {
  ~CudaGraph() override { cudaGraphExecDestroy(handle); }
  void launch(Stream& stream) override {
    check_cuda(cudaGraphLaunch(handle, static_cast<BackendStream&>(stream).handle()), "graph launch");
  }
  uint64_t bytes() const override { return measured; }
  int64_t launches() const override { return static_cast<int64_t>(nodes); }
  cudaGraphExec_t handle = nullptr;
  uint64_t measured = 0;
  size_t nodes = 0;
};

}  // namespace

cudaStream_t stream_handle(Stream& stream) { return static_cast<BackendStream&>(stream).handle(); }

BackendStream::BackendStream(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {
  if (!memory_->plan()) check_cuda(cudaStreamCreateWithFlags(&handle_, cudaStreamNonBlocking), "cudaStreamCreate");
}

BackendStream::~BackendStream() {
  if (handle_ == nullptr) return;
  cudaStreamSynchronize(handle_);
  cudaStreamDestroy(handle_);
}

void BackendStream::synchronize() {
  if (handle_ != nullptr) check_cuda(cudaStreamSynchronize(handle_), "the device");
}

void* BackendStream::area(Area which, size_t bytes) {
  const auto i = static_cast<size_t>(which);
  if (measuring_) {
    need_[i] = std::max(need_[i], bytes);
    return nullptr;
  }
  if (areas_[i].bytes() < bytes)
    throw Error(ErrorKind::Internal, "an operation needs " + std::to_string(bytes) + " bytes of workspace " +
                                         std::to_string(i) + ", " + std::to_string(areas_[i].bytes()) +
                                         " were reserved");
  return areas_[i].view(DType::U8, {0}).data;
}

void BackendStream::reserve(const std::function<void()>& calls) {
  measuring_ = true;
  try {
    calls();
  } catch (...) {
    measuring_ = false;
    throw;
  }
  measuring_ = false;
  for (size_t i = 0; i < areas_.size(); ++i) {
    if (areas_[i].bytes() >= need_[i]) continue;
    synchronize();
    areas_[i] = {};
    areas_[i] = memory_->device(need_[i], handle_);
  }
}

CudaBackend::CudaBackend(const CudaOptions& options)
    : memory_(std::make_shared<DeviceMemory>(options.memory_limit, options.plan)) {
  if (options.plan) return;
  const std::vector<GpuInfo> gpus = list_gpus();
  if (options.device < 0 || options.device >= static_cast<int>(gpus.size()))
    throw Error(ErrorKind::Unsupported, "there is no GPU " + std::to_string(options.device) + ": this machine has " +
                                            std::to_string(gpus.size()) + "; see --list-devices, or use --backend cpu");
  check_cuda(cudaSetDevice(options.device), "cudaSetDevice");
  check_cuda(cudaStreamCreateWithFlags(&load_stream_, cudaStreamNonBlocking), "cudaStreamCreate");
}

CudaBackend::~CudaBackend() {
  uploader_.reset();
  if (load_stream_ != nullptr) cudaStreamDestroy(load_stream_);
}

std::unique_ptr<Event> CudaBackend::make_event() {
  if (memory_->plan()) return std::make_unique<NoEvent>();
  return std::make_unique<CudaEvent>(false);
}

std::unique_ptr<Event> CudaBackend::make_timed_event() {
  if (memory_->plan()) return std::make_unique<NoEvent>();
  return std::make_unique<CudaEvent>(true);
}

double CudaBackend::elapsed_ns(Event& from, Event& to) {
  from.wait(), to.wait();
  float ms = 0;
  check_cuda(cudaEventElapsedTime(&ms, static_cast<CudaEvent&>(from).handle, static_cast<CudaEvent&>(to).handle),
             "cudaEventElapsedTime");
  return double{ms} * 1e6;
}

void CudaBackend::record(Stream& stream, Event& event) {
  if (memory_->plan()) return;
  check_cuda(cudaEventRecord(static_cast<CudaEvent&>(event).handle, static_cast<BackendStream&>(stream).handle()),
             "cudaEventRecord");
}

void CudaBackend::wait(Stream& stream, Event& event) {
  if (memory_->plan()) return;
  check_cuda(
      cudaStreamWaitEvent(static_cast<BackendStream&>(stream).handle(), static_cast<CudaEvent&>(event).handle, 0),
      "cudaStreamWaitEvent");
}

Buffer CudaBackend::allocate(size_t bytes, Space space) {
  return space == Space::Host ? memory_->pinned(bytes) : memory_->device(bytes, load_stream_);
}

void CudaBackend::reserve(Stream& stream, const std::function<void()>& calls) {
  static_cast<BackendStream&>(stream).reserve(calls);
}

std::unique_ptr<Graph> CudaBackend::capture(Stream& stream, const std::function<void()>& calls) {
  auto& s = static_cast<BackendStream&>(stream);
  struct Recorded {
    ~Recorded() {
      if (handle != nullptr) cudaGraphDestroy(handle);
    }
    cudaGraph_t handle = nullptr;
  } recorded;
  check_cuda(cudaStreamBeginCapture(s.handle(), cudaStreamCaptureModeThreadLocal), "begin of a capture");
  try {
    calls();
  } catch (...) {
    cudaStreamEndCapture(s.handle(), &recorded.handle);
    cudaGetLastError();
    throw;
  }
  if (const cudaError_t e = cudaStreamEndCapture(s.handle(), &recorded.handle); e != cudaSuccess) {
    cudaGetLastError();
    check_cuda(e, "end of a capture");
  }
  auto graph = std::make_unique<CudaGraph>();
  check_cuda(cudaGraphGetNodes(recorded.handle, nullptr, &graph->nodes), "cudaGraphGetNodes");
  const uint64_t before = free_device_bytes();
  check_cuda(cudaGraphInstantiate(&graph->handle, recorded.handle, 0), "cudaGraphInstantiate");
  check_cuda(cudaGraphUpload(graph->handle, s.handle()), "cudaGraphUpload");
  const uint64_t after = free_device_bytes();
  graph->measured = before > after ? before - after : 0;
  return graph;
}

void CudaBackend::copy(Stream& stream, View dst, View src) {
  auto& s = static_cast<BackendStream&>(stream);
  if (dst.bytes() != src.bytes())
    throw Error(ErrorKind::Internal,
                "copy of " + std::to_string(src.bytes()) + " bytes into " + std::to_string(dst.bytes()));
  if (dst.bytes() > 0 && s.running())
    check_cuda(cudaMemcpyAsync(dst.data, src.data, dst.bytes(), cudaMemcpyDefault, s.handle()), "copy");
}

void CudaBackend::join_columns(Stream& stream, std::span<const View> parts, View out) {
  auto& s = static_cast<BackendStream&>(stream);
  std::byte* to = out.data;
  const int64_t item = static_cast<int64_t>(dtype_size(out.dtype)), pitch = out.row_size() * item;
  for (const View& p : parts) {
    const int64_t width = p.row_size() * item;
    if (p.shape[0] > 0 && s.running())
      check_cuda(cudaMemcpy2DAsync(to, pitch, p.data, width, width, p.shape[0], cudaMemcpyDeviceToDevice, s.handle()),
                 "copy of columns");
    to += width;
  }
}

void CudaBackend::clear(Stream& stream, View dst) {
  auto& s = static_cast<BackendStream&>(stream);
  if (dst.bytes() > 0 && s.running()) check_cuda(cudaMemsetAsync(dst.data, 0, dst.bytes(), s.handle()), "clear");
}

}  // namespace cuda
}  // namespace fnx
