// The measuring interface where CUDA is not built.
#include "kernels/kernel_bench.h"

#include "kernels/error.h"

#ifndef FNX_HAS_CUDA
namespace fnx {

std::unique_ptr<KernelBench> KernelBench::open(int, int) {
  throw Error(ErrorKind::Unsupported,
              "this build has no cuda backend; configure with FNX_CUDA=ON where nvcc is installed");
}

}  // namespace fnx
#endif
