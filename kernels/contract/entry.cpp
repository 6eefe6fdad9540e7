#include "kernels/contract/entry.h"

#include <algorithm>

namespace fnx::contract {

namespace {

class EntryKernel : public Kernel {
 public:
  explicit EntryKernel(Entry entry) : e_(std::move(entry)) {}

  const Record& record() const override { return e_.record; }
  std::vector<Shape> shapes(Effort effort) const override {
    std::vector<Shape> list = e_.host_shapes;
    if (effort == Effort::Device) list.insert(list.end(), e_.more_device_shapes.begin(), e_.more_device_shapes.end());
    return list;
  }
  Problem make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) const override {
    return e_.make(shape, kind, rows, seed);
  }
  std::vector<Expectation> expect(const Problem& given, const Problem& done) const override {
    return e_.expect(given, done);
  }
  std::string check_choices(const Problem& given, const Problem& done) const override {
    return e_.choices ? e_.choices(given, done) : "";
  }
  void require(const Problem& problem) const override {
    if (e_.domain) e_.domain(problem);
    require_alignment(problem, e_.record);
  }
  void host(Problem& problem) const override { e_.host(problem); }
  bool host_is_exact(Kind kind) const override {
    return std::find(e_.exact_kinds.begin(), e_.exact_kinds.end(), kind) != e_.exact_kinds.end();
  }
  std::vector<Refusal> refusals() const override { return e_.refusals; }
  std::vector<Control> controls() const override { return e_.controls; }
  int64_t value_rows() const override { return e_.value_rows; }
  int64_t bit_rows() const override { return e_.bit_rows; }
  bool sequential() const override { return static_cast<bool>(e_.part); }
  Problem part(const Problem& whole, int64_t first, int64_t count) const override {
    return e_.part ? e_.part(whole, first, count) : window(whole, first, count);
  }
  bool cpu(Problem& problem) const override {
    if (!e_.cpu) return false;
    e_.cpu(problem);
    return true;
  }
#ifdef FNX_HAS_CUDA
  Implementation device() const override { return e_.enqueue ? device_implementation(e_.enqueue) : Implementation{}; }
  std::vector<SymbolResources> resources(const Problem& problem) const override {
    return e_.enqueue ? launched_symbols(e_.enqueue, problem) : std::vector<SymbolResources>{};
  }
#endif

 private:
  Entry e_;
};

}  // namespace

std::unique_ptr<Kernel> make_kernel(Entry entry) { return std::make_unique<EntryKernel>(std::move(entry)); }

Expectation expect_elements(const Operand& operand, const std::function<Bounded(int64_t)>& element) {
  Expectation e{operand.name, {}, {}};
  for (int64_t i = 0; i < operand.size(); ++i) e.push(element(i));
  return e;
}

Expectation expect_unchanged(const Operand& operand) {
  Expectation e{operand.name, std::vector<double>(static_cast<size_t>(operand.size())), {}};
  for (int64_t i = 0; i < operand.size(); ++i) e.value[static_cast<size_t>(i)] = operand.at(i);
  e.bound.assign(e.value.size(), 0.0);
  return e;
}

}  // namespace fnx::contract
