// Hyper-connections of prompts (kernels/cuda/norm_hc.h); inside the family only.
#pragma once

#include "kernels/cuda/norm_hc.h"

namespace fnx::cuda {

bool hc_tile_takes(const HcMixParams& p);
void hc_up_tile(const HcMixParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
