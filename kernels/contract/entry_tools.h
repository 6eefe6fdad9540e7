// Small tools of the families' entries.
#pragma once

#include <string>
#include <vector>

#include "kernels/contract/kernel.h"

namespace fnx::contract {

// Throws Unsupported.
[[noreturn]] void refuse(const std::string& what);
// Refuses a number outside [least, most] or that is no multiple of `step`, naming all of them.
void require_range(const char* name, int64_t value, int64_t least, int64_t most, int64_t step = 1);
// Refuses an operand whose offset is no multiple of the record's alignment.
void require_alignment(const Problem& problem, const Record& record);
// A refusal's spoiler that moves one operand's first element.
std::function<void(Problem&)> misalign(const char* operand, size_t bytes);
// A refusal's spoiler that changes a number.
std::function<void(Problem&)> set_number(const char* name, int64_t value);

// A view of host values.
View float_view(std::vector<float>& values, std::initializer_list<int64_t> shape);
// Row r of an operand, without errors.
std::vector<Bounded> exact_row(const Operand& operand, int64_t r);
// Stores fp32 values to row r of an F32 or BF16 operand.
void store_row(Operand& operand, int64_t r, const float* values);

// A product and its rounding.
Bounded times(Bounded a, Bounded b);
// 1 / sqrt(sum of x^2 / n + eps) with `roundings` of its own; unbounded where the values' errors might double the sum.
Bounded inverse_rms(const Bounded* x, size_t count, double n, double eps, double roundings);
// Relative errors of functions in fp32, expf and log1pf within 2 ulp.
inline constexpr double kSigmoidRoundings = 8;
// 1 / (1 + exp(-x)), whose slope is at most 1/4.
Bounded sigmoid_reference(Bounded x);
float sigmoid_value(float x);
// silu(gate) * up in fp32 with at most ten roundings, expf within 2 ulp: relative gamma_10; an exponential that
// overflows leaves 0 for a value below 1e-36 * |up|.
Bounded swiglu_reference(Bounded gate, Bounded up);
float swiglu_value(float gate, float up);

}  // namespace fnx::contract
