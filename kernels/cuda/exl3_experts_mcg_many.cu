// Expert kernels of one codebook.
#include "kernels/cuda/exl3_experts_many.cuh"

namespace fnx::cuda {

template void launch_experts_many<exl3::Codebook::Mcg>(const ExpertArgs&, int, int, cudaStream_t);

}  // namespace fnx::cuda
