#include "libcore/engine/pool_plan.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "libcore/engine/expert_identity.h"
#include "libcore/format/tensor_names.h"

namespace fnx {

namespace {

// What a line holds: the part of a routed expert that expert_copy_bytes counts.
bool in_bank(const std::string& name) {
  return name.find(".mlp.experts.") != std::string::npos && (name.ends_with(".trellis") || name.ends_with(".weight"));
}

const PlanTerm& largest(const std::vector<PlanTerm>& terms, Place place) {
  return *std::max_element(terms.begin(), terms.end(), [&](const PlanTerm& a, const PlanTerm& b) {
    return std::pair(a.place == place, a.bytes) < std::pair(b.place == place, b.bytes);
  });
}

}  // namespace

uint64_t kv_token_bytes(const ModelConfig& c, const StateOptions& o) {
  const auto sparse = std::count(c.layer_types.begin(), c.layer_types.end(), LayerType::SparseAttention);
  return static_cast<uint64_t>((sparse + (o.draft_head ? 1 : 0)) * 2 * c.kv_heads * c.head_dim) *
         dtype_size(o.kv_dtype);
}

StateBytes state_bytes(const ModelConfig& c, const StateOptions& o) {
  const int64_t ratio = std::max<int64_t>(1, c.index_ratio), slots = o.slots, stack = c.streams * c.hidden_size;
  const int64_t page = StatePool::page_tokens_of(c);
  const PagePool pages = StatePool::page_pool(o, page);
  const int64_t near = pages.near(), far = pages.free() - near;
  const auto sparse = std::count(c.layer_types.begin(), c.layer_types.end(), LayerType::SparseAttention);
  const int64_t caches = sparse + (o.draft_head ? 1 : 0);
  const int64_t keys = page * 2 * c.kv_heads * c.head_dim * static_cast<int64_t>(dtype_size(o.kv_dtype));
  const int64_t staged = caches > 0 ? std::min(far, pages.width()) : 0;
  const int64_t index = ((near + far) * page / ratio + slots * ratio) * c.index_head_dim;
  const int64_t conv = (c.gdn_conv_kernel - 1) * c.gdn_conv_width();
  const int64_t delta = c.gdn_value_heads * c.gdn_key_dim * c.gdn_value_dim;
  const int64_t ple = static_cast<int64_t>(c.ple_layers.size()) * (c.ple_conv_kernel - 1) * c.ngram_size * stack;
  const int64_t floats =
      caches * index + slots * ((c.layers() - sparse) * (conv + delta) + ple + (o.draft_head ? stack : 0));
  return {static_cast<uint64_t>((caches * near + staged) * keys + floats * static_cast<int64_t>(sizeof(float))),
          static_cast<uint64_t>(caches * far * keys)};
}

PoolPlan plan_pools(const TensorSource& source, const ModelConfig& config, const PlanInput& in) {
  PoolPlan plan;
  std::array<uint64_t, kRoles> resident{};
  uint64_t bank = 0, table = 0;
  for (const TensorInfo& t : source.tensors()) {
    const Role role = role_of(t.name);
    if (!is_text(role)) continue;
    if (role == Role::NgramTable)
      table += t.bytes;
    else
      (in_bank(t.name) ? bank : resident[static_cast<size_t>(role)]) += t.bytes;
  }
  for (int r = 0; r < kRoles; ++r)
    if (const uint64_t bytes = resident[static_cast<size_t>(r)]; bytes > 0) {
      const auto role = static_cast<Role>(r);
      plan.terms.push_back(
          {role_name(role) + std::string(role == Role::Experts ? " scales" : ""), Place::Device, bytes});
    }
  const StateBytes states = state_bytes(config, in.state);
  plan.terms.push_back({"states and caches", Place::Device, states.device});
  plan.terms.push_back({"reserve", Place::Device, in.reserve_bytes});
  plan.terms.push_back({"expert bank", Place::Host, bank});
  if (states.host > 0) plan.terms.push_back({"older keys and values", Place::Host, states.host});
  if (table > 0) plan.terms.push_back({"n-gram table", Place::Mapped, table});
  for (const PlanTerm& t : plan.terms)
    (t.place == Place::Device ? plan.device_bytes
     : t.place == Place::Host ? plan.host_bytes
                              : plan.mapped_bytes) += t.bytes;

  const std::vector<uint32_t> sizes = expert_copy_bytes(source, config);
  for (int64_t l = 0; l < config.layers() + config.mtp_layers; ++l) {
    const auto first = sizes.begin() + l * config.experts, last = first + config.experts;
    plan.line_bytes += *std::max_element(first, last);
    if (l < config.layers())
      plan.token_expert_bytes += static_cast<double>(config.experts_per_token) *
                                 static_cast<double>(std::accumulate(first, last, uint64_t{0})) /
                                 static_cast<double>(config.experts);
  }
  const uint64_t room = in.vram_bytes > plan.device_bytes ? in.vram_bytes - plan.device_bytes : 0;
  if (plan.line_bytes > 0) plan.lines = std::min<int64_t>(config.experts, static_cast<int64_t>(room / plan.line_bytes));
  if (plan.lines == 0) {
    const PlanTerm& t = largest(plan.terms, Place::Device);
    plan.problem = fmt::format(
        "{} bytes of device memory hold no expert line: {} are taken, {} more are needed; the "
        "largest term is {} with {}; {}",
        in.vram_bytes, plan.device_bytes, plan.device_bytes + plan.line_bytes - in.vram_bytes, t.name, t.bytes,
        t.name == "states and caches" ? "lower --kv-device-tokens, --context or --parallel"
                                      : "take a pack of fewer bits, or a larger card");
  } else if (plan.host_bytes > in.ram_bytes) {
    plan.problem = fmt::format(
        "{} bytes of host memory, {} are needed, of which the expert bank takes {}; take a pack of fewer bits, or a "
        "machine with more",
        in.ram_bytes, plan.host_bytes, bank);
  }
  plan.device_bytes += static_cast<uint64_t>(plan.lines) * plan.line_bytes;
  if (plan.lines < config.experts) plan.token_miss_bytes = (1 - in.hit_ratio) * plan.token_expert_bytes;
  plan.token_link_ns = plan.token_miss_bytes / in.link_bytes_per_s * 1e9;
  return plan;
}

}  // namespace fnx
