// Few-row and decode kernels of one codebook and some widths.
#include "kernels/cuda/exl3_width_kernels.cuh"

namespace fnx::cuda {

template void launch_few<exl3::Codebook::Mcg, 10>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mcg, 12>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mcg, 14>(const FewArgs&, cudaStream_t);
template void launch_few<exl3::Codebook::Mcg, 16>(const FewArgs&, cudaStream_t);

template void launch_decode<exl3::Codebook::Mcg, 10>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mcg, 12>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mcg, 14>(const DecodeArgs&, cudaStream_t);
template void launch_decode<exl3::Codebook::Mcg, 16>(const DecodeArgs&, cudaStream_t);

}  // namespace fnx::cuda
