// Expert kernels of one codebook.
#include "kernels/cuda/exl3_experts.cuh"

namespace fnx::cuda {

template <>
void launch_experts_few<exl3::Codebook::ThreeInst>(const ExpertArgs& a, cudaStream_t stream) {
  launch_experts_few_here<exl3::Codebook::ThreeInst>(a, stream);
}

}  // namespace fnx::cuda
