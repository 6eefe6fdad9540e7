// Expert kernels of one codebook.
#include "kernels/cuda/exl3_experts_few.cuh"

namespace fnx::cuda {

template void launch_experts_few<exl3::Codebook::ThreeInst>(const ExpertArgs&, cudaStream_t);

}  // namespace fnx::cuda
