// Few-row and decode kernels of one codebook and some widths.
#include "kernels/cuda/exl3_few.cuh"
#include "kernels/cuda/exl3_many.cuh"

namespace fnx::cuda {

#define FNX_WIDTH(half_bits)                                                                      \
  template <>                                                                                     \
  void launch_few<exl3::Codebook::Mul1, half_bits>(const FewArgs& a, cudaStream_t stream) {       \
    launch_few_here<exl3::Codebook::Mul1, half_bits>(a, stream);                                  \
  }                                                                                               \
  template <>                                                                                     \
  void launch_decode<exl3::Codebook::Mul1, half_bits>(const DecodeArgs& a, cudaStream_t stream) { \
    launch_decode_here<exl3::Codebook::Mul1, half_bits>(a, stream);                               \
  }

FNX_WIDTH(2)
FNX_WIDTH(4)
FNX_WIDTH(6)
FNX_WIDTH(8)

#undef FNX_WIDTH

}  // namespace fnx::cuda
