// Few-row and decode kernels of one codebook and some widths.
#include "kernels/cuda/exl3_width_kernels.cuh"

namespace fnx::cuda {

template void launch_few<exl3::Codebook::Mcg, 2>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mcg, 4>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mcg, 6>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mcg, 8>(const FewArgs&, cudaStream_t);

template void launch_decode<exl3::Codebook::Mcg, 2>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mcg, 4>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mcg, 6>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mcg, 8>(const DecodeArgs&, cudaStream_t);

}  // namespace fnx::cuda
