// Counter-based random numbers: the same (key, counter) gives the same number on every backend, batch and rank.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FNX_HOST_DEVICE __host__ __device__
#else
#define FNX_HOST_DEVICE
#endif

namespace fnx {

// The splitmix64 output function: adds the golden-ratio increment, then mixes.
FNX_HOST_DEVICE constexpr uint64_t splitmix64(uint64_t x) {
  x += 0x9E3779B97F4A7C15u;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
  return x ^ (x >> 31);
}

FNX_HOST_DEVICE constexpr uint64_t random_bits(uint64_t seed, uint64_t stream, uint64_t position) {
  return splitmix64(splitmix64(splitmix64(seed) ^ stream) ^ position);
}

// In [0, 1), a multiple of 2^-53.
FNX_HOST_DEVICE constexpr double uniform(uint64_t seed, uint64_t stream, uint64_t position) {
  return static_cast<double>(random_bits(seed, stream, position) >> 11) * 0x1p-53;
}

}  // namespace fnx
