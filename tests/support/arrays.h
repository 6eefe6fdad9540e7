// Views over vectors, for calling operations of the cpu backend directly.
#pragma once

#include <initializer_list>
#include <random>
#include <vector>

#include "kernels/view.h"

namespace fnx::test {

template <class T>
View view_of(std::vector<T>& v, DType dtype, std::initializer_list<int64_t> dims) {
  View out{reinterpret_cast<std::byte*>(v.data()), dtype, Space::Host, 1, {static_cast<int64_t>(v.size())}};
  return out.reshape(dims);
}
inline View f32(std::vector<float>& v, std::initializer_list<int64_t> dims) { return view_of(v, DType::F32, dims); }
inline View i32(std::vector<int32_t>& v, std::initializer_list<int64_t> dims) { return view_of(v, DType::I32, dims); }

inline std::vector<float> normals(size_t n, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> draw;
  std::vector<float> out(n);
  for (float& x : out) x = draw(random);
  return out;
}

}  // namespace fnx::test
