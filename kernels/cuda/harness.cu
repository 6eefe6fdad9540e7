#include "kernels/cuda/harness.h"

#include <cuda_runtime_api.h>

#include <map>

#include "kernels/error.h"

namespace fnx::cuda {

namespace {

void must(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  throw Error(ErrorKind::Device, std::string(what) + ": " + cudaGetErrorString(status) + " (" +
                                     std::to_string(static_cast<int>(status)) + ")");
}

struct DeviceBuffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~DeviceBuffer() { cudaFree(data); }
};

}  // namespace

struct Harness::State {
  cudaStream_t stream = nullptr;
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t executable = nullptr;
  std::map<std::string, DeviceBuffer> buffers;

  void drop_graph() {
    if (executable != nullptr) cudaGraphExecDestroy(executable);
    if (graph != nullptr) cudaGraphDestroy(graph);
    executable = nullptr;
    graph = nullptr;
  }
  ~State() {
    drop_graph();
    if (stream != nullptr) cudaStreamDestroy(stream);
  }
};

std::optional<DeviceInfo> device_info() {
  int count = 0;
  cudaDeviceProp properties{};
  if (cudaGetDeviceCount(&count) != cudaSuccess || count == 0 ||
      cudaGetDeviceProperties(&properties, 0) != cudaSuccess) {
    cudaGetLastError();
    return {};
  }
  return DeviceInfo{properties.name, "sm_" + std::to_string(properties.major * 10 + properties.minor),
                    properties.totalGlobalMem, static_cast<uint64_t>(properties.l2CacheSize)};
}

Harness::Harness() : state_(std::make_unique<State>()) {
  must(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
}

Harness::~Harness() = default;

CUstream_st* Harness::stream() { return state_->stream; }

void* Harness::buffer(const std::string& name, size_t bytes, bool zeroed) {
  DeviceBuffer& b = state_->buffers[name];
  if (b.bytes >= bytes && b.data != nullptr) return b.data;
  synchronize();
  must(cudaFree(b.data), "cudaFree");
  b.data = nullptr;
  b.bytes = bytes;  // exactly, so that a memory checker sees the end
  must(cudaMalloc(&b.data, b.bytes), "cudaMalloc");
  if (zeroed) must(cudaMemsetAsync(b.data, 0, b.bytes, state_->stream), "cudaMemset");
  return b.data;
}

void Harness::fill(void* device, uint8_t value, size_t bytes) {
  must(cudaMemsetAsync(device, value, bytes, state_->stream), "cudaMemset");
}

void Harness::upload(void* device, const void* host, size_t bytes) {
  // From pageable memory: returns once the bytes are staged.
  must(cudaMemcpyAsync(device, host, bytes, cudaMemcpyHostToDevice, state_->stream), "copy to the device");
}

void Harness::download(void* host, const void* device, size_t bytes) {
  // To pageable memory: returns once the bytes are there.
  must(cudaMemcpyAsync(host, device, bytes, cudaMemcpyDeviceToHost, state_->stream), "copy from the device");
}

void Harness::synchronize() { must(cudaStreamSynchronize(state_->stream), "the launch"); }

void Harness::capture(const std::function<void()>& launch) {
  state_->drop_graph();
  must(cudaStreamBeginCapture(state_->stream, cudaStreamCaptureModeRelaxed), "begin capture");
  try {
    launch();
  } catch (...) {
    cudaStreamEndCapture(state_->stream, &state_->graph);
    throw;
  }
  must(cudaStreamEndCapture(state_->stream, &state_->graph), "end capture");
  must(cudaGraphInstantiate(&state_->executable, state_->graph, 0), "instantiate the graph");
}

void Harness::replay() { must(cudaGraphLaunch(state_->executable, state_->stream), "launch the graph"); }

std::vector<LaunchedKernel> Harness::captured_kernels() {
  size_t count = 0;
  must(cudaGraphGetNodes(state_->graph, nullptr, &count), "nodes of the graph");
  std::vector<cudaGraphNode_t> nodes(count);
  must(cudaGraphGetNodes(state_->graph, nodes.data(), &count), "nodes of the graph");
  std::vector<LaunchedKernel> out;
  for (cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    must(cudaGraphNodeGetType(node, &type), "type of a node");
    if (type != cudaGraphNodeTypeKernel) continue;
    cudaKernelNodeParams params{};
    must(cudaGraphKernelNodeGetParams(node, &params), "parameters of a node");
    cudaFuncAttributes attributes{};
    must(cudaFuncGetAttributes(&attributes, params.func), "attributes of a kernel");
    const char* name = nullptr;
    must(cudaFuncGetName(&name, params.func), "name of a kernel");
    out.push_back({name, attributes.numRegs, attributes.maxThreadsPerBlock,
                   static_cast<int>(params.blockDim.x * params.blockDim.y * params.blockDim.z),
                   static_cast<int64_t>(attributes.sharedSizeBytes), static_cast<int64_t>(params.sharedMemBytes),
                   static_cast<int64_t>(attributes.localSizeBytes)});
  }
  return out;
}

}  // namespace fnx::cuda
