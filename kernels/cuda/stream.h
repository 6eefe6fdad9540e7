// What every kernel header needs: the stream type without the CUDA headers, and the device form of a batch's lanes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/dtype.h"

struct CUstream_st;
using cudaStream_t = CUstream_st*;

namespace fnx {
class Stream;
}

namespace fnx::cuda {

// Launches of up to this many rows spread a row's work over blocks; the bits are the same.
inline constexpr int64_t kSpreadRows = 64;

// Of a stream of the cuda backend.
cudaStream_t stream_handle(Stream& stream);

// Lanes of a launch (fnx::Lane in device memory). Rows that lie in no lane are left alone.
struct Lanes {
  const int32_t* table = nullptr;  // I32 [count, 4]: slot, first row, rows, start
  int64_t count = 0;
  const int32_t* trials = nullptr;  // I32 [count, 2]: kept, tried (fnx::Trial); null: all zero
};

}  // namespace fnx::cuda
