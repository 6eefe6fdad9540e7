// A registry entry made of functions: for kernels without state of their own.
#pragma once

#include <utility>

#include "kernels/contract/controls.h"
#include "kernels/contract/device.h"
#include "kernels/contract/entry_tools.h"

namespace fnx::contract {

struct Entry {
  Record record;
  std::vector<Shape> host_shapes, more_device_shapes;
  std::function<Problem(const Shape&, Kind, int64_t rows, uint64_t seed)> make;
  std::function<std::vector<Expectation>(const Problem& given, const Problem& done)> expect;
  std::function<std::string(const Problem& given, const Problem& done)> choices;  // optional
  std::function<void(const Problem&)> domain;                                     // beyond the operands' alignment
  std::function<void(Problem&)> host;
  std::function<void(Problem&)> cpu;  // optional
  std::vector<Kind> exact_kinds;      // inputs on which the host implementation gives the device's bits
  std::vector<Refusal> refusals;
  std::vector<Control> controls;
  int64_t value_rows = 7, bit_rows = 300;
  std::function<Problem(const Problem& whole, int64_t first, int64_t count)>
      part;         // of a sequence: rows follow each other
  Enqueue enqueue;  // empty without CUDA
};

std::unique_ptr<Kernel> make_kernel(Entry entry);

// An exact expectation: every element of an operand equals `value(i)`.
Expectation expect_elements(const Operand& operand, const std::function<Bounded(int64_t)>& element);
// An operand's elements as they are.
Expectation expect_unchanged(const Operand& operand);

}  // namespace fnx::contract
