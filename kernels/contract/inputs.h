// Kinds of input that every kernel is run on.
#pragma once

#include <cstdint>
#include <vector>

#include "kernels/random.h"

namespace fnx::contract {

enum class Kind : uint8_t {
  Normal,      // standard normal
  Exponents,   // random exponents over the kernel's range
  Cancelling,  // neighbours that cancel but for their last bits
  Extremes,    // signed zeros, subnormals, the kernel's largest values
  NonFinite,   // rows with one inf or NaN between clean rows
  Directed,    // large, small, -large in different slices: any other association gives another number
};

inline constexpr Kind kAllKinds[] = {Kind::Normal,   Kind::Exponents, Kind::Cancelling,
                                     Kind::Extremes, Kind::NonFinite, Kind::Directed};
const char* kind_name(Kind kind);

// Numbers keyed by (seed, stream): the same on every machine.
class Random {
 public:
  Random(uint64_t seed, uint64_t stream) : seed_(seed), stream_(stream) {}
  uint64_t bits() { return random_bits(seed_, stream_, next_++); }
  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }
  double normal();
  int64_t below(int64_t n) { return static_cast<int64_t>(bits() % static_cast<uint64_t>(n)); }

 private:
  uint64_t seed_, stream_, next_ = 0;
};

// Exponents of the values that a kernel takes without overflow of what it stores in between.
struct Range {
  int lowest = -30, highest = 30;
};

// Fills rows of `width` values. NonFinite: rows 1, 4, 7, ... hold an inf and rows 2, 5, 8, ... a NaN. Directed: slices
// of `slice` values hold 2^highest, 1, -2^highest in their first element, 0 elsewhere.
void fill(float* x, int64_t rows, int64_t width, Kind kind, Range range, Random random, int64_t slice = 16);

}  // namespace fnx::contract
