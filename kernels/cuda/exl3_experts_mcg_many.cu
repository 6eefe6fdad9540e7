// Expert kernels of one codebook.
#include "kernels/cuda/exl3_experts.cuh"

namespace fnx::cuda {

template <>
void launch_experts_many<exl3::Codebook::Mcg>(const ExpertArgs& a, int most_units, cudaStream_t stream) {
  launch_experts_many_here<exl3::Codebook::Mcg>(a, most_units, stream);
}

}  // namespace fnx::cuda
