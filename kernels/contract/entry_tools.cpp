#include "kernels/contract/entry_tools.h"

#include <algorithm>

#include "kernels/error.h"
#include "kernels/float16.h"

namespace fnx::contract {

void refuse(const std::string& what) { throw Error(ErrorKind::Unsupported, what); }

void require_range(const char* name, int64_t value, int64_t least, int64_t most, int64_t step) {
  if (value >= least && value <= most && value % step == 0) return;
  refuse(std::string(name) + " is " + std::to_string(value) + "; it must lie in " + std::to_string(least) + " to " +
         std::to_string(most) + (step == 1 ? "" : " and be a multiple of " + std::to_string(step)));
}

void require_alignment(const Problem& problem, const Record& record) {
  for (const OperandRecord& o : record.operands) {
    if (!problem.has(o.name)) continue;
    const size_t offset = problem[o.name].offset, alignment = static_cast<size_t>(o.alignment);
    if (offset % alignment != 0)
      refuse(o.name + " is " + std::to_string(offset % alignment) + " bytes off its alignment of " +
             std::to_string(alignment));
  }
}

std::function<void(Problem&)> misalign(const char* operand, size_t bytes) {
  return [operand, bytes](Problem& p) { p[operand].offset += bytes; };
}

std::function<void(Problem&)> set_number(const char* name, int64_t value) {
  return [name, value](Problem& p) { p.numbers.find(name)->second = value; };
}

View float_view(std::vector<float>& values, std::initializer_list<int64_t> shape) {
  const View all{
      reinterpret_cast<std::byte*>(values.data()), DType::F32, Space::Host, 1, {static_cast<int64_t>(values.size())}};
  return all.reshape(shape);
}

std::vector<Bounded> exact_row(const Operand& operand, int64_t r) {
  const int64_t width = operand.size() / operand.shape[0];
  std::vector<Bounded> row(static_cast<size_t>(width));
  for (int64_t i = 0; i < width; ++i) row[static_cast<size_t>(i)].value = operand.at(r * width + i);
  return row;
}

void store_row(Operand& operand, int64_t r, const float* values) {
  const int64_t width = operand.size() / operand.shape[0];
  if (operand.dtype == DType::BF16)
    std::transform(values, values + width, operand.as<uint16_t>() + r * width, f32_to_bf16);
  else
    std::copy_n(values, width, operand.as<float>() + r * width);
}

}  // namespace fnx::contract
