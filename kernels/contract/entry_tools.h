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

}  // namespace fnx::contract
