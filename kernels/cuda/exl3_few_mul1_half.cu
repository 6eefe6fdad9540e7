// Few-row and decode kernels of one codebook and some widths.
#include "kernels/cuda/exl3_width_kernels.cuh"

namespace fnx::cuda {

template void launch_few<exl3::Codebook::Mul1, 3>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mul1, 5>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mul1, 7>(const FewArgs&, cudaStream_t);

template void launch_decode<exl3::Codebook::Mul1, 3>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mul1, 5>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mul1, 7>(const DecodeArgs&, cudaStream_t);

}  // namespace fnx::cuda
