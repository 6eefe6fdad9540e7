#include "kernels/contract/entry_tools.h"

#include <algorithm>
#include <cmath>

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

Bounded times(Bounded a, Bounded b) {
  const double value = a.value * b.value;
  return {value,
          std::abs(a.value) * b.error + std::abs(b.value) * a.error + a.error * b.error + kUnit * std::abs(value)};
}

Bounded inverse_rms(const Bounded* x, size_t count, double n, double eps, double roundings) {
  double sum = 0, carried = 0;
  for (size_t i = 0; i < count; ++i) {
    sum += x[i].value * x[i].value;
    carried += (2 * std::abs(x[i].value) + x[i].error) * x[i].error;
  }
  const double mean = sum / n + eps, relative = carried / n / mean, value = 1.0 / std::sqrt(mean);
  return {value, relative < 0.5 ? value * (relative + gamma(roundings)) : std::nan("")};
}

Bounded sigmoid_reference(Bounded x) {
  const double value = 1.0 / (1.0 + std::exp(-x.value));
  return {value, 0.25 * x.error + gamma(kSigmoidRoundings) * value + 0x1p-120};
}

float sigmoid_value(float x) { return 1.0f / (1.0f + std::exp(-x)); }

Bounded swiglu_reference(Bounded gate, Bounded up) {
  const double s = gate.value / (1.0 + std::exp(-gate.value));
  const double value = s * up.value;
  // The slope of silu lies within (-0.1, 1.1).
  const double s_error = 1.1 * gate.error, most_up = std::abs(up.value) + up.error;
  const double carried = s_error * most_up + std::abs(s) * up.error;
  return {value, carried + gamma(10) * (std::abs(s) + s_error) * most_up +
                     (gate.value - gate.error > -80 ? 0x1p-148 : 1e-36) * (most_up + 1.0)};
}

float swiglu_value(float gate, float up) { return gate / (1.0f + std::exp(-gate)) * up; }

}  // namespace fnx::contract
