// Devices and the cuda backend where CUDA is not built.
#include "kernels/devices.h"

#include "kernels/error.h"
#include "kernels/ops.h"

#ifndef FNX_HAS_CUDA
namespace fnx {

std::vector<GpuInfo> list_gpus() { return {}; }
uint64_t free_device_bytes() { return 0; }
std::string cuda_driver_version() { return "none"; }
std::string cuda_runtime_version() { return "none"; }

std::unique_ptr<Backend> make_cuda_backend(const CudaOptions&) {
  throw Error(ErrorKind::Unsupported,
              "this build has no cuda backend; configure with FNX_CUDA=ON where nvcc is installed");
}

}  // namespace fnx
#endif
