// What becomes of the finished sums of a plain linear layer.
#pragma once

#include "kernels/cuda/plain_mma.cuh"

namespace fnx::cuda {

__device__ __forceinline__ float finished(const PlainMatrix& m, int64_t out, float v, float n) {
  if (m.bias != nullptr) v += m.bias[out];
  if (m.finish == Finish::SiluMean) return silu(v / n);
  if (m.finish == Finish::InjectMean) return 2.0f * sigmoid(v / n);
  return v;
}

}  // namespace fnx::cuda
