#include "libcore/engine/memory_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "kernels/error.h"

namespace fnx {

namespace {

// Tensors that are only copied to the device keep their size and lose their bytes, which nobody reads.
class HeadersOnly : public TensorSource {
 public:
  explicit HeadersOnly(const TensorSource& source) : source_(source) {}
  std::span<const SourceFile> files() const override { return source_.files(); }
  std::span<const TensorInfo> tensors() const override { return source_.tensors(); }
  const TensorInfo* find(std::string_view name) const override { return source_.find(name); }
  TensorData read(const TensorInfo& tensor) const override {
    const std::string_view name = tensor.name;
    const auto ends = [&](std::string_view end) { return name.size() >= end.size() && name.ends_with(end); };
    // Scales fill with zeros, which every format holds; the rest is small and read.
    if (ends(".suh") || ends(".svh") || ends(".su") || ends(".sv")) {
      auto zeros = std::make_shared<std::vector<std::byte>>(tensor.bytes);
      return {{zeros->data(), zeros->size()}, zeros};
    }
    if (!ends(".trellis") && tensor.bytes < kRead) return source_.read(tensor);
    static constexpr std::byte kNothing{};
    return {{&kNothing, tensor.bytes}, nullptr};
  }

 private:
  static constexpr uint64_t kRead = 256 << 10;
  const TensorSource& source_;
};

struct Term {
  const char* name;
  uint64_t bytes;
  const char* way_out;
};
std::array<Term, 6> terms(const MemoryPlan& p) {
  return {{{"weights", p.weights, "take a pack of fewer bits"},
           {"expert lines", p.pools, "lower --expert-lines"},
           {"states and KV pages", p.states, "run fewer or shorter sequences, or lower --kv-device-tokens"},
           {"scratch", p.scratch, "lower --chunk-rows or run fewer sequences"},
           {"workspaces", p.workspaces, "lower --chunk-rows or run fewer sequences"},
           {"exchange", p.exchange, "run fewer ranks"}}};
}
double gib(uint64_t bytes) { return static_cast<double>(bytes) / (1 << 30); }

}  // namespace

MemoryPlan plan_memory(const TensorSource& source, const ModelConfig& config, const LoadOptions& load,
                       const EngineOptions& engine, uint64_t limit, uint64_t exchange) {
  CudaOptions options;
  options.plan = true;
  const auto backend = make_cuda_backend(options);
  LoadOptions trusting = load;
  trusting.accept_raw_norms = true;  // their values are not looked at
  const HeadersOnly headers(source);
  MemoryPlan plan;
  plan.limit = limit, plan.exchange = exchange;
  const Weights weights = Weights::load(headers, config, *backend, trusting);
  plan.weights = backend->device_bytes();
  plan.lines = load.pools.lines;
  if (weights.pools) {
    plan.pools = weights.pools->device_bytes(), plan.host = weights.pools->host_bytes();
    plan.weights -= plan.pools;
  }
  Engine e(weights, *backend, engine);
  plan.states = static_cast<uint64_t>(e.state().device_bytes());
  plan.host_pages = static_cast<uint64_t>(e.state().host_bytes());
  plan.workspaces = e.workspace_bytes();
  plan.scratch = backend->device_bytes() - plan.weights - plan.pools - plan.states - plan.workspaces;
  return plan;
}

MemoryPlan plan_lines(const TensorSource& source, const ModelConfig& config, const LoadOptions& load,
                      const EngineOptions& engine, uint64_t limit, uint64_t exchange) {
  LoadOptions with = load;
  with.pools.lines = 0;
  const MemoryPlan resident = plan_memory(source, config, with, engine, limit, exchange);
  if (limit == 0 || resident.total() + kPlanReserve <= limit) return resident;
  with.pools.lines = 1;
  const MemoryPlan least = plan_memory(source, config, with, engine, limit, exchange);
  const uint64_t taken = least.total() - least.pools + kPlanReserve;
  const uint64_t room = limit > taken && least.pools > 0 ? (limit - taken) / least.pools : 0;
  with.pools.lines = std::min(config.experts / load.shard.world, static_cast<int64_t>(room));
  return with.pools.lines <= 1 ? least : plan_memory(source, config, with, engine, limit, exchange);
}

std::string plan_text(const MemoryPlan& plan) {
  std::string out;
  for (const Term& t : terms(plan))
    if (t.bytes > 0) out += fmt::format("{:<20} {:>9.3f} GiB\n", t.name, gib(t.bytes));
  out += fmt::format("{:<20} {:>9.3f} GiB", "together", gib(plan.total()));
  out += plan.limit > 0 ? fmt::format(" of {:.3f} GiB\n", gib(plan.limit)) : "\n";
  if (plan.lines > 0)
    out += fmt::format("{} expert lines a layer; {:.3f} GiB of pinned host memory\n", plan.lines, gib(plan.host));
  if (plan.host_pages > 0)
    out += fmt::format("older keys and values: {:.3f} GiB of pinned host memory\n", gib(plan.host_pages));
  return out;
}

void require_fit(const MemoryPlan& plan) {
  if (plan.limit == 0 || plan.total() <= plan.limit) return;
  const auto all = terms(plan);
  const Term& largest = *std::max_element(all.begin(), all.end(), [](auto& a, auto& b) { return a.bytes < b.bytes; });
  throw Error(ErrorKind::Unsupported,
              fmt::format("the run needs {} bytes of device memory and may use {}; the largest term is {} with {}: {}, "
                          "or raise --vram-limit",
                          plan.total(), plan.limit, largest.name, largest.bytes, largest.way_out));
}

}  // namespace fnx
