// One launch's worth of arrays, the same on host and device: each operand lies between guard bands in its own storage.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/dtype.h"
#include "kernels/view.h"

namespace fnx::contract {

enum class Role : uint8_t { In, Out, InOut };

inline constexpr size_t kGuard = 256;                     // bytes of each guard band
inline constexpr uint32_t kPoisonWord = 0xFFA5FFA5u;      // NaN as F32, BF16 and F16; a negative I32
inline constexpr std::byte kGuardByte = std::byte{0x5A};  // what guard bands hold

struct Operand {
  std::string name;
  DType dtype = DType::F32;
  Role role = Role::In;
  bool by_row = false;  // the first axis is the launch's rows
  std::vector<int64_t> shape;
  std::vector<std::byte> storage;
  size_t offset = kGuard;  // of the first element in `storage`

  int64_t size() const;
  size_t bytes() const { return static_cast<size_t>(size()) * dtype_size(dtype); }
  size_t row_bytes() const { return shape.empty() || shape[0] == 0 ? 0 : bytes() / static_cast<size_t>(shape[0]); }
  const std::byte* data() const { return storage.data() + offset; }
  std::byte* data() { return storage.data() + offset; }
  template <class T>
  T* as() {
    return reinterpret_cast<T*>(data());
  }
  template <class T>
  const T* as() const {
    return reinterpret_cast<const T*>(data());
  }
  // Element i as a double, whatever the type.
  double at(int64_t i) const;
  View view();
};

struct Problem {
  int64_t rows = 0;
  std::map<std::string, int64_t, std::less<>> numbers;  // shape parameters, by the record's names
  std::vector<Operand> operands;

  // Adds an operand, zero-filled between guard bands; outputs are poisoned.
  Operand& add(std::string name, DType dtype, Role role, bool by_row, std::vector<int64_t> shape);
  // Throws Internal when there is none of that name.
  Operand& operator[](std::string_view name);
  const Operand& operator[](std::string_view name) const;
  bool has(std::string_view name) const;
  int64_t number(std::string_view name) const;
};

// Fills the outputs with kPoisonWord.
void poison_outputs(Problem& problem);
// Rows [first, first + count) as a problem of their own; operands that are not by row are whole.
Problem window(const Problem& problem, int64_t first, int64_t count);
// The same problem with every operand `shift` bytes further from the start of its storage.
Problem displaced(const Problem& problem, size_t shift);
// Name of the first operand whose guard bands were written, empty when none was.
std::string damaged_guard(const Problem& problem);
// Name of the first input whose bytes differ from those in `given`, empty when all are equal.
std::string written_input(const Problem& given, const Problem& done);

}  // namespace fnx::contract
