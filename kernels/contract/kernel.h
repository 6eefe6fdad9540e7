// What the contract knows of a kernel: its record, and how to feed, judge and refuse it.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/contract/bound.h"
#include "kernels/contract/inputs.h"
#include "kernels/contract/problem.h"

namespace fnx::contract {

// An operand as the record states it.
struct OperandRecord {
  std::string name, dtypes, shape;
  int64_t alignment = 0;  // bytes
  std::string access;     // "read", "written", "read and written"
};

// What one device function may use at most, in all of its instantiations.
struct SymbolRecord {
  std::string name;  // without namespace and template arguments
  int threads = 0, registers = 0;
  int64_t static_shared_bytes = 0, dynamic_shared_bytes = 0, local_bytes = 0;
};

struct Record {
  std::string id;         // "exl3_linear"
  std::string operation;  // of kernels/ops.h
  std::vector<SymbolRecord> symbols;
  std::string domain;  // shapes, widths and codebooks taken
  std::string launch;  // grid and block as formulas of the shape
  std::vector<OperandRecord> operands;
  std::string aliases;  // operands that may be the same memory
  std::string rows;     // what a row's bits depend on
  std::string sum_order;
  std::string rounding;  // where the kernel rounds to less than fp32
  std::string limits;
};

// Names of the fields that a record leaves empty; a complete record has none.
std::vector<std::string> missing_fields(const Record& record);

// One shape that the gates run; the names are those of Problem::numbers.
struct Shape {
  std::string label;
  std::map<std::string, int64_t, std::less<>> numbers;
};

// A launch outside the domain: `spoil` turns a good problem into one that must be refused.
struct Refusal {
  std::string what;
  std::function<void(Problem&)> spoil;
};

// A way to compute a kernel's outputs in place.
struct Implementation {
  std::string name;  // "host", "device"
  std::function<void(Problem&)> launch;
  std::function<void(Problem&)> replay;  // the launch from a captured graph; empty where there are no graphs
};

// Measured on the device for one launch of one symbol.
struct SymbolResources {
  std::string name;  // as the device knows it, mangled
  int registers = 0, max_threads = 0, threads = 0;
  int64_t static_shared_bytes = 0, dynamic_shared_bytes = 0, local_bytes = 0;
};

// A planted fault; gate `gate` must fail on what `plant` makes of a sound implementation.
struct Control {
  std::string name;
  int gate = 0;
  std::function<Implementation(const Implementation&)> plant;
  bool host_only = false;  // plants into the host implementation, whatever it is given
  std::function<void(std::vector<SymbolResources>&)> measure;  // of gate 1: changes what was measured
};

// Host shapes are few and small; device shapes cover the domain.
enum class Effort : uint8_t { Host, Device };

class Kernel {
 public:
  virtual ~Kernel() = default;
  virtual const Record& record() const = 0;
  virtual std::vector<Shape> shapes(Effort effort) const = 0;
  virtual Problem make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) const = 0;

  // FP64 references and bounds of the outputs. `done` is the launch's result, for outputs that depend on a choice of
  // the kernel, such as the weights of the experts that it picked.
  virtual std::vector<Expectation> expect(const Problem& given, const Problem& done) const = 0;
  // Discrete outputs: what is wrong with the kernel's choices, empty when nothing is.
  virtual std::string check_choices(const Problem&, const Problem&) const { return ""; }

  // The domain: throws Error Unsupported naming the numbers.
  virtual void require(const Problem& problem) const = 0;
  // The host implementation, with the kernel's own sum order and rounding points.
  virtual void host(Problem& problem) const = 0;
  // Whether the host implementation gives the device's bits on such inputs.
  virtual bool host_is_exact(Kind) const { return false; }
  virtual std::vector<Refusal> refusals() const = 0;
  virtual std::vector<Control> controls() const { return {}; }

  // Rows of one problem of gates 2 and 3.
  virtual int64_t value_rows() const { return 7; }
  virtual int64_t bit_rows() const { return 300; }
  // Whether windows follow one another and carry the state, as rows of a sequence do.
  virtual bool sequential() const { return false; }
  virtual Problem part(const Problem& whole, int64_t first, int64_t count) const { return window(whole, first, count); }
  // The outputs as kernels/cpu computes them; false when it has no such operation. They, and the host implementation's,
  // must lie within `expect_cpu`.
  virtual bool cpu(Problem&) const { return false; }
  virtual std::vector<Expectation> expect_cpu(const Problem& given, const Problem& done) const {
    return expect(given, done);
  }

  // The CUDA launch; both are empty in a build without it.
  virtual Implementation device() const { return {}; }
  virtual std::vector<SymbolResources> resources(const Problem&) const { return {}; }

  // `require`, then `host`.
  Implementation host_implementation() const;
};

using KernelList = std::vector<std::unique_ptr<Kernel>>;

}  // namespace fnx::contract
