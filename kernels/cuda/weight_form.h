// What the loaders of linears and of expert banks share: alignment of parts, scales as F16.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "kernels/error.h"
#include "kernels/float16.h"
#include "kernels/ops.h"

namespace fnx::cuda {

constexpr size_t kPartAlign = 256;
inline size_t aligned_part(size_t bytes) { return (bytes + kPartAlign - 1) / kPartAlign * kPartAlign; }

inline std::string shape_text(const LinearSource& s) {
  return "[" + std::to_string(s.out) + ", " + std::to_string(s.in) + "]";
}

// Scales are F16 on disk; anything else that a file holds must be one.
inline std::vector<uint16_t> halves(const std::vector<float>& values, const char* what, const LinearSource& s) {
  std::vector<uint16_t> out(values.size());
  for (size_t i = 0; i < values.size(); ++i) {
    out[i] = f32_to_f16(values[i]);
    const float back = f16_to_f32(out[i]);
    if (std::memcmp(&back, &values[i], sizeof back) != 0)
      throw Error(ErrorKind::Unsupported, std::string(what) + " of a linear layer " + shape_text(s) +
                                              " holds a value that is no F16; the cuda backend keeps it as F16, use "
                                              "--backend cpu");
  }
  return out;
}

}  // namespace fnx::cuda
