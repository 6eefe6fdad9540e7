#include "kernels/contract/problem.h"

#include <algorithm>
#include <cstring>

#include "kernels/error.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

void lay_out(Operand& operand, size_t shift) {
  operand.offset = kGuard + shift;
  operand.storage.assign(operand.offset + operand.bytes() + kGuard, kGuardByte);
}

void poison(Operand& operand) {
  // Addressed from the first element, so that a window is poisoned as the whole is.
  std::byte* to = operand.data();
  const size_t bytes = operand.bytes(), words = bytes / sizeof kPoisonWord;
  for (size_t i = 0; i < words; ++i) std::memcpy(to + i * sizeof kPoisonWord, &kPoisonWord, sizeof kPoisonWord);
  std::memcpy(to + words * sizeof kPoisonWord, &kPoisonWord, bytes % sizeof kPoisonWord);
}

}  // namespace

int64_t Operand::size() const {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

double Operand::at(int64_t i) const {
  switch (dtype) {
    case DType::F32:
      return as<float>()[i];
    case DType::F64:
      return as<double>()[i];
    case DType::F16:
      return f16_to_f32(as<uint16_t>()[i]);
    case DType::BF16:
      return bf16_to_f32(as<uint16_t>()[i]);
    case DType::I32:
      return as<int32_t>()[i];
    case DType::I64:
      return static_cast<double>(as<int64_t>()[i]);
    case DType::U16:
    case DType::I16:
      return as<uint16_t>()[i];
    case DType::U8:
      return as<uint8_t>()[i];
    default:
      throw Error(ErrorKind::Internal, "operand " + name + " of dtype " + dtype_name(dtype) + " has no value");
  }
}

View Operand::view() {
  View v{data(), dtype, Space::Host, static_cast<int>(shape.size()), {}};
  std::copy(shape.begin(), shape.end(), v.shape.begin());
  return v;
}

Operand& Problem::add(std::string name, DType dtype, Role role, bool by_row, std::vector<int64_t> shape) {
  Operand operand{std::move(name), dtype, role, by_row, std::move(shape), {}, kGuard};
  lay_out(operand, 0);
  std::memset(operand.data(), 0, operand.bytes());
  if (role == Role::Out) poison(operand);
  operands.push_back(std::move(operand));
  return operands.back();
}

Operand& Problem::operator[](std::string_view name) {
  for (Operand& operand : operands)
    if (operand.name == name) return operand;
  throw Error(ErrorKind::Internal, "no operand named " + std::string(name));
}

const Operand& Problem::operator[](std::string_view name) const { return const_cast<Problem&>(*this)[name]; }

bool Problem::has(std::string_view name) const {
  return std::any_of(operands.begin(), operands.end(), [&](const Operand& o) { return o.name == name; });
}

int64_t Problem::number(std::string_view name) const {
  const auto it = numbers.find(name);
  if (it == numbers.end()) throw Error(ErrorKind::Internal, "no number named " + std::string(name));
  return it->second;
}

void poison_outputs(Problem& problem) {
  for (Operand& operand : problem.operands)
    if (operand.role == Role::Out) poison(operand);
}

Problem window(const Problem& problem, int64_t first, int64_t count) {
  Problem part{count, problem.numbers, {}};
  for (const Operand& whole : problem.operands) {
    if (!whole.by_row) {
      part.operands.push_back(whole);
      continue;
    }
    std::vector<int64_t> shape = whole.shape;
    shape[0] = count;
    Operand& operand = part.add(whole.name, whole.dtype, whole.role, true, std::move(shape));
    if (operand.role != Role::Out)
      std::memcpy(operand.data(), whole.data() + static_cast<size_t>(first) * whole.row_bytes(), operand.bytes());
  }
  return part;
}

Problem displaced(const Problem& problem, size_t shift) {
  Problem moved = problem;
  for (size_t i = 0; i < moved.operands.size(); ++i) {
    Operand& operand = moved.operands[i];
    lay_out(operand, shift);
    std::memcpy(operand.data(), problem.operands[i].data(), operand.bytes());
  }
  return moved;
}

std::string damaged_guard(const Problem& problem) {
  const auto whole = [](auto first, auto last) {
    return std::all_of(first, last, [](std::byte b) { return b == kGuardByte; });
  };
  for (const Operand& o : problem.operands) {
    const auto begin = o.storage.begin();
    const auto end = begin + static_cast<std::ptrdiff_t>(o.offset + o.bytes());
    if (!whole(begin, begin + static_cast<std::ptrdiff_t>(o.offset)) || !whole(end, o.storage.end())) return o.name;
  }
  return "";
}

std::string written_input(const Problem& given, const Problem& done) {
  for (size_t i = 0; i < given.operands.size(); ++i) {
    const Operand &before = given.operands[i], &after = done.operands[i];
    if (before.role == Role::In && std::memcmp(before.data(), after.data(), before.bytes()) != 0) return before.name;
  }
  return "";
}

}  // namespace fnx::contract
