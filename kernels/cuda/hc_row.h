// hc_mix for one row: two launches without atomics, the bits of the launches for more rows (kernels/cuda/norm_hc.h).
#pragma once

#include "kernels/cuda/norm_hc.h"

namespace fnx::cuda {

// Whether the two launches below take this problem; norm_hc.cu has checked its domain.
bool hc_row_takes(const HcMixParams& p);
// The norm's scales to `normed` [n] and the splits' sums of down and inject to `work.partials`.
void hc_down_row(const HcMixParams& p, cudaStream_t stream);
// u and inj; the launch after hc_down_row.
void hc_up_row(const HcMixParams& p, cudaStream_t stream);

}  // namespace fnx::cuda
