// Small plain tensors as fp32.
#pragma once

#include <vector>

#include "libcore/format/tensor_source.h"

namespace fnx {

// Every element of an F16, BF16 or F32 tensor, exactly. Throws Input for other dtypes.
std::vector<float> float_values(const TensorSource& source, const TensorInfo& tensor);

}  // namespace fnx
