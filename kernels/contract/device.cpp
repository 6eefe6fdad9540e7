#include "kernels/contract/device.h"

#ifdef FNX_HAS_CUDA

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>

#include "kernels/cuda/harness.h"
#include "kernels/error.h"

namespace fnx::contract {

namespace {

// Operands of one launch on the device, in buffers that serve the next launch too.
class Memory : public DeviceProblem {
 public:
  void load(const Problem& problem) {
    problem_ = &problem;
    for (const auto& [name, bytes] : scratch_) harness_.fill(harness_.buffer(name, bytes, false), 0xff, bytes);
    for (size_t i = 0; i < problem.operands.size(); ++i) {
      const Operand& o = problem.operands[i];
      harness_.upload(harness_.buffer("operand " + std::to_string(i), o.storage.size(), false), o.storage.data(),
                      o.storage.size());
    }
  }
  void store(Problem& problem) {
    harness_.synchronize();
    for (size_t i = 0; i < problem.operands.size(); ++i) {
      Operand& o = problem.operands[i];
      harness_.download(o.storage.data(), harness_.buffer("operand " + std::to_string(i), o.storage.size(), false),
                        o.storage.size());
    }
  }
  void* at(std::string_view operand) override {
    for (size_t i = 0; i < problem_->operands.size(); ++i) {
      const Operand& o = problem_->operands[i];
      if (o.name != operand) continue;
      auto* base = harness_.buffer("operand " + std::to_string(i), o.storage.size(), false);
      return static_cast<std::byte*>(base) + o.offset;
    }
    return nullptr;
  }
  void* workspace(const std::string& name, size_t bytes) override { return harness_.buffer(name, bytes, true); }
  void* scratch(const std::string& name, size_t bytes) override {
    void* to = harness_.buffer(name, bytes, false);
    size_t& filled = scratch_[name];
    if (bytes > filled) harness_.fill(to, 0xff, filled = bytes);
    return to;
  }
  void* constant(const std::string& name, const void* data, size_t bytes) override {
    void* to = harness_.buffer(name, bytes, false);
    const auto* first = static_cast<const std::byte*>(data);
    std::vector<std::byte>& known = constants_[name];
    // A capture may not copy; the launch before it left the same bytes here.
    if (std::equal(known.begin(), known.end(), first, first + bytes)) return to;
    known.assign(first, first + bytes);
    harness_.upload(to, data, bytes);
    return to;
  }
  CUstream_st* stream() override { return harness_.stream(); }
  cuda::Harness& harness() { return harness_; }

 private:
  cuda::Harness harness_;
  std::map<std::string, std::vector<std::byte>> constants_;
  std::map<std::string, size_t> scratch_;
  const Problem* problem_ = nullptr;
};

}  // namespace

bool device_present() { return cuda::device_info().has_value(); }
std::string device_architecture() {
  const auto info = cuda::device_info();
  return info ? info->architecture : "";
}

Implementation device_implementation(Enqueue enqueue) {
  if (!device_present()) return {};
  auto memory = std::make_shared<Memory>();
  // Callers' threads share one set of buffers.
  auto turn = std::make_shared<std::mutex>();
  const auto run = [memory](Problem& problem, const std::function<void()>& work) {
    memory->load(problem);
    try {
      work();
    } catch (const Error& error) {
      if (error.kind() != ErrorKind::Device) memory->store(problem);
      throw;
    }
    memory->store(problem);
  };
  return {"device",
          [=](Problem& problem) {
            const std::lock_guard lock(*turn);
            run(problem, [&] { enqueue(problem, *memory); });
          },
          [=](Problem& problem) {
            const std::lock_guard lock(*turn);
            // Workspaces and constants are made before the capture, which may neither allocate nor copy.
            Problem rehearsal = problem;
            run(rehearsal, [&] { enqueue(rehearsal, *memory); });
            memory->load(problem);
            memory->harness().capture([&] { enqueue(problem, *memory); });
            memory->harness().replay();
            memory->harness().synchronize();
            memory->load(problem);
            memory->harness().replay();
            memory->store(problem);
          }};
}

std::vector<SymbolResources> launched_symbols(const Enqueue& enqueue, const Problem& problem) {
  Memory memory;
  memory.load(problem);
  enqueue(problem, memory);
  memory.harness().synchronize();  // a launch that fails does so here, under its own kernel's name
  memory.harness().capture([&] { enqueue(problem, memory); });
  std::vector<SymbolResources> out;
  for (const cuda::LaunchedKernel& k : memory.harness().captured_kernels())
    out.push_back(
        {k.name, k.registers, k.max_threads, k.threads, k.static_shared_bytes, k.dynamic_shared_bytes, k.local_bytes});
  return out;
}

}  // namespace fnx::contract

#else

namespace fnx::contract {

bool device_present() { return false; }
std::string device_architecture() { return ""; }

}  // namespace fnx::contract

#endif
