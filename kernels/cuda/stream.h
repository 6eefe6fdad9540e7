// What every kernel header needs: the stream type without the CUDA headers, and the device form of a batch's lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace fnx::cuda {

// Lanes of a launch (fnx::Lane in device memory). Rows that lie in no lane are left alone.
struct Lanes {
  const int32_t* table = nullptr;  // I32 [count, 4]: slot, first row, rows, start
  int64_t count = 0;
  const int32_t* trials = nullptr;  // I32 [count, 2]: kept, tried (fnx::Trial); null: all zero
};

}  // namespace fnx::cuda
