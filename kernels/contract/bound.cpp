#include "kernels/contract/bound.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "kernels/float16.h"

namespace fnx::contract {

namespace {

std::string coordinate(const Operand& operand, int64_t i) {
  std::string at;
  for (size_t axis = operand.shape.size(); axis-- > 0;) {
    at = std::to_string(i % operand.shape[axis]) + (at.empty() ? "" : ", ") + at;
    i /= operand.shape[axis];
  }
  return operand.name + "[" + at + "]";
}

bool is_poison(const Operand& operand, int64_t i) {
  const size_t size = dtype_size(operand.dtype), at = static_cast<size_t>(i) * size;
  for (size_t b = 0; b < size; ++b)
    if (operand.data()[at + b] != static_cast<std::byte>(kPoisonWord >> (8 * ((at + b) % sizeof kPoisonWord))))
      return false;
  return true;
}

double largest(DType dtype) {
  return dtype == DType::F16 ? 65504.0 : static_cast<double>(std::numeric_limits<float>::max());
}

std::string number(double x) {
  char text[40];
  std::snprintf(text, sizeof text, "%.9g", x);
  return text;
}

}  // namespace

void Comparison::merge(const Comparison& other) {
  values += other.values;
  unbounded += other.unbounded;
  if (other.worst_fraction > worst_fraction || worst_at.empty()) {
    worst_fraction = other.worst_fraction;
    worst_at = other.worst_at;
  }
  difference_sum += other.difference_sum;
  reference_sum += other.reference_sum;
  if (failure.empty()) failure = other.failure;
}

Comparison compare(const Expectation& wanted, const Operand& got) {
  Comparison c;
  const auto fail = [&](int64_t i, const std::string& what) {
    if (c.failure.empty()) c.failure = coordinate(got, i) + " " + what;
  };
  if (static_cast<int64_t>(wanted.value.size()) != got.size()) {
    c.failure = got.name + " has " + std::to_string(got.size()) + " values, its reference " +
                std::to_string(wanted.value.size());
    return c;
  }
  for (int64_t i = 0; i < got.size(); ++i) {
    const double value = wanted.value[static_cast<size_t>(i)], bound = wanted.bound[static_cast<size_t>(i)];
    const double out = got.at(i);
    if (bound == kUntouched) {
      ++c.values;
      if (!is_poison(got, i)) fail(i, "was written");
      continue;
    }
    if (is_poison(got, i)) {
      fail(i, "was not written");
      continue;
    }
    if (std::isnan(bound)) {
      ++c.unbounded;
      continue;
    }
    if (!std::isfinite(value)) {
      ++c.unbounded;
      if (std::isnan(value) ? !std::isnan(out) : out != value)
        fail(i, "is " + number(out) + ", its reference " + number(value));
      continue;
    }
    // Too near overflow to say which side the kernel's rounding falls on.
    if (std::abs(value) + bound > largest(got.dtype) && (!std::isfinite(out) || !std::isfinite(bound))) {
      ++c.unbounded;
      continue;
    }
    ++c.values;
    const double difference = std::abs(out - value);
    const double fraction = difference == 0 ? 0 : difference / bound;
    if (std::isfinite(difference)) {
      c.difference_sum += difference * difference;
      c.reference_sum += value * value;
    }
    if (c.worst_at.empty() || !(fraction <= c.worst_fraction)) {
      c.worst_fraction = fraction;
      c.worst_at = coordinate(got, i);
    }
    if (!(difference <= bound))
      fail(i, "is " + number(out) + ", its reference " + number(value) + " +- " + number(bound));
  }
  return c;
}

Bounded round_to_f16(Bounded x) {
  if (!std::isfinite(x.value) || !std::isfinite(x.error)) return {x.value, std::isnan(x.value) ? 0.0 : x.error};
  // Through fp32 would round twice, so the neighbours are found in fp64: 11 bits, multiples of 2^-24 below 2^-14.
  const auto rounded = [](double v) {
    if (v == 0) return v;
    const int exponent = std::max(std::ilogb(v), -14);
    const double step = std::ldexp(1.0, exponent - 10);
    const double r = std::nearbyint(v / step) * step;
    return std::abs(r) > 65504.0 ? std::copysign(std::numeric_limits<double>::infinity(), v) : r;
  };
  const double value = rounded(x.value), low = rounded(x.value - x.error), high = rounded(x.value + x.error);
  if (!std::isfinite(value) && low == value && high == value) return {value, 0};
  return {value, std::max(high - value, value - low)};
}

}  // namespace fnx::contract
