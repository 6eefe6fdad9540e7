// FP64 bounds and the comparison against them.
#pragma once

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/contract/problem.h"

namespace fnx::contract {

inline constexpr double kUnit = 0x1p-24;  // u: half an ulp of 1 in fp32
// n roundings in a row, each relative to u: (1 + u)^n - 1 <= gamma_n.
inline double gamma(double n) { return n * kUnit / (1.0 - n * kUnit); }

// A bound that says: the element keeps what it held before the launch.
inline constexpr double kUntouched = -1;

// A number in fp64 and how far the kernel's number may lie from it. A bound of NaN allows every number.
struct Bounded {
  double value = 0, error = 0;
};

// What one output operand must hold, element by element.
struct Expectation {
  std::string operand;
  std::vector<double> value, bound;

  void push(Bounded b) {
    value.push_back(b.value);
    bound.push_back(b.error);
  }
  // Sets the elements from `first` on.
  void put(int64_t first, const std::vector<Bounded>& list) {
    for (size_t i = 0; i < list.size(); ++i) {
      value[static_cast<size_t>(first) + i] = list[i].value;
      bound[static_cast<size_t>(first) + i] = list[i].error;
    }
  }
};

struct Comparison {
  uint64_t values = 0;        // compared with a finite bound
  uint64_t unbounded = 0;     // non-finite references and values near overflow: only their class is compared
  double worst_fraction = 0;  // of the bound
  std::string worst_at;       // "y[3, 17]"
  double difference_sum = 0, reference_sum = 0;  // of squares, over finite values
  std::string failure;                           // empty: every value lies within its bound

  double relative_norm() const { return reference_sum > 0 ? std::sqrt(difference_sum / reference_sum) : 0.0; }
  void merge(const Comparison& other);
};

// Compares one output; a value that is still poison, or whose class (NaN, inf) differs, is a failure.
Comparison compare(const Expectation& wanted, const Operand& got);

// fp16 rounding of a number known to lie in value +- error: the rounded value and the most that the other rounding
// results of the interval differ from it. Rounding is monotone, so the interval's ends decide.
Bounded round_to_f16(Bounded x);

// sum of terms in any order by n fp32 operations: error gamma_n * sum |terms|.
inline Bounded summed(double value, double magnitude, double operations) {
  return {value, gamma(operations) * magnitude};
}

}  // namespace fnx::contract
