#include "kernels/contract/qsa_site.h"

#include <algorithm>
#include <numeric>

#include "kernels/contract/controls.h"
#include "kernels/contract/entry_tools.h"
#include "kernels/contract/lanes.h"
#include "kernels/float16.h"

namespace fnx::contract {

QsaSizes::QsaSizes(const Problem& p)
    : heads(p.number("heads")),
      kv_heads(p.number("kv_heads")),
      index_heads(p.number("index_heads")),
      ratio(p.number("ratio")),
      blocks(p.number("blocks")),
      page_tokens(p.number("page_tokens")),
      width(p.number("width")),
      ring(p.number("ring")),
      dtype(static_cast<DType>(p.number("dtype"))) {}

Shape qsa_shape(int64_t heads, int64_t kv_heads, int64_t blocks, DType dtype, int64_t start, int64_t ring) {
  constexpr int64_t kPageTokens = 32, kMostRows = 150;
  return {std::to_string(heads) + " / " + std::to_string(kv_heads) + " heads, " + std::to_string(blocks) + " blocks, " +
              dtype_name(dtype) + ", from " + std::to_string(start) + ", ring " + std::to_string(ring),
          {{"heads", heads},
           {"kv_heads", kv_heads},
           {"index_heads", 4},
           {"ratio", 4},
           {"blocks", blocks},
           {"page_tokens", kPageTokens},
           {"width", (start + kMostRows) / kPageTokens + 1},
           {"start", start},
           {"ring", ring},
           {"dtype", static_cast<int64_t>(dtype)}}};
}

// Pages of a long sequence, which meets them again and again: equal keys, and a cache of bounded size.
constexpr int64_t kMostPages = 64;

int64_t add_pages(Problem& p, int64_t rows, Random& random) {
  add_lanes(p, rows, static_cast<int32_t>(p.number("start")));
  const int64_t slots = lane_slots(rows), width = p.number("width"), own = std::min<int64_t>(width, kMostPages);
  std::vector<int32_t> order(static_cast<size_t>(slots * own));
  std::iota(order.begin(), order.end(), 0);
  for (const char* name : {"block_table", "kv_table"}) {
    for (size_t i = 1; i < order.size(); ++i) std::swap(order[i], order[static_cast<size_t>(random.below(i + 1))]);
    auto* table = p.add(name, DType::I32, Role::In, false, {slots, width}).as<int32_t>();
    for (int64_t i = 0; i < slots * width; ++i)
      table[i] = order[static_cast<size_t>(i / width * own + i % width % own)];
  }
  return slots * own;
}

void add_cache(Problem& p, const char* name, Role role, int64_t pages, Random& random) {
  const QsaSizes s(p);
  Operand& o = p.add(name, s.dtype, role, false, {pages, s.page_tokens, s.kv_heads, kHeadDim});
  for (int64_t i = 0; i < o.size(); ++i) {
    const auto x = static_cast<float>(random.normal());
    if (s.dtype == DType::F32)
      o.as<float>()[i] = x;
    else
      o.as<uint16_t>()[i] = f32_to_bf16(x);
  }
}

namespace {
// The far half of the pages lies first in the operands, so that no launch is right that takes far pages for near ones.
int64_t far_pages(int64_t pages) { return pages / 2; }
}  // namespace

int64_t token_place(const Problem& p, const QsaSizes& s, int32_t slot, int64_t token) {
  const int64_t page = p["kv_table"].as<int32_t>()[slot * s.width + token / s.page_tokens];
  const int64_t pages = p["keys"].shape[0], far = far_pages(pages);
  return (page + far) % pages * s.page_tokens + token % s.page_tokens;
}

int64_t block_place(const Problem& p, const QsaSizes& s, int32_t slot, int64_t block) {
  return p["block_table"].as<int32_t>()[slot * s.width + block / s.per_page()] * s.per_page() + block % s.per_page();
}

std::vector<QsaRow> rows_of(const Problem& p) {
  std::vector<QsaRow> rows;
  for (const Lane& lane : lanes_of(p))
    for (int32_t i = 0; i < lane.rows; ++i) rows.push_back({lane.first_row + i, lane.start + i, lane.slot});
  return rows;
}

void qsa_domain(const Problem& p) {
  const QsaSizes s(p);
  require_range("KV heads", s.kv_heads, 1, INT32_MAX);
  require_range("heads", s.heads, s.kv_heads, 16 * s.kv_heads, s.kv_heads);
  require_range("index heads", s.index_heads, 1, 8);
  require_range("ratio", s.ratio, 1, 64);
  require_range("page tokens", s.page_tokens, 1, INT32_MAX, s.ratio);
  require_range("blocks", s.blocks, 1, 4096);
  require_range("selected tokens", s.blocks * s.ratio, 1, 65536);
}

std::vector<Refusal> qsa_refusals() {
  return {{"65 tokens a block", set_number("ratio", 65)},
          {"pages of 10 tokens with blocks of 4", set_number("page_tokens", 10)},
          {"4097 blocks", set_number("blocks", 4097)},
          {"no blocks", set_number("blocks", 0)},
          {"no KV heads", set_number("kv_heads", 0)},
          {"3 heads of 2 KV heads",
           [](Problem& p) {
             set_number("heads", 3)(p);
             set_number("kv_heads", 2)(p);
           }},
          {"17 heads a KV head",
           [](Problem& p) {
             set_number("heads", 17)(p);
             set_number("kv_heads", 1)(p);
           }},
          {"9 index heads", set_number("index_heads", 9)}};
}

Control crossed_pages() {
  return tamper_control("crossed pages", 2, [](Problem& p) {
    for (const char* name : {"block_table", "kv_table"}) {
      Operand& table = p[name];
      const int64_t width = table.shape[1];
      for (int64_t slot = 0; slot < table.shape[0]; ++slot)
        std::reverse(table.as<int32_t>() + slot * width, table.as<int32_t>() + (slot + 1) * width);
    }
  });
}

namespace {
View view_of(Problem& p, const char* name) { return p.has(name) ? p[name].view() : View{}; }
}  // namespace

QsaWeights qsa_weights(Problem& p) {
  const QsaSizes s(p);
  QsaWeights w;
  w.heads = s.heads, w.kv_heads = s.kv_heads, w.head_dim = kHeadDim, w.index_heads = s.index_heads;
  w.index_dim = kIndexDim, w.ratio = s.ratio, w.blocks = s.blocks, w.rotary = kRotary;
  w.inv_freq = view_of(p, "inv_freq");
  w.q_norm = {view_of(p, "q_norm"), kQsaEps}, w.k_norm = {view_of(p, "k_norm"), kQsaEps};
  w.index_q_norm = {view_of(p, "index_q_norm"), kQsaEps}, w.index_k_norm = {view_of(p, "index_k_norm"), kQsaEps};
  return w;
}

KvCache qsa_cache(Problem& p) {
  KvCache kv;
  kv.page_tokens = p.number("page_tokens");
  kv.index_keys = view_of(p, "index_keys"), kv.raw_keys = view_of(p, "raw_keys");
  if (!p.has("keys")) return kv;
  const View keys = view_of(p, "keys"), values = view_of(p, "values");
  const int64_t far = far_pages(keys.shape[0]), near = keys.shape[0] - far;
  kv.keys = keys.rows(far, near), kv.far_keys = keys.rows(0, far);
  kv.values = values.rows(far, near), kv.far_values = values.rows(0, far);
  return kv;
}

QsaRows qsa_rows(Problem& p) {
  return {view_of(p, "query_gate"), view_of(p, "key"), view_of(p, "value"), view_of(p, "index"),
          view_of(p, "selected")};
}

#ifdef FNX_HAS_CUDA
cuda::QsaShape device_shape(const Problem& p, DeviceProblem& d) {
  const QsaSizes s(p);
  cuda::QsaShape q;
  q.rows = p.rows, q.heads = s.heads, q.kv_heads = s.kv_heads, q.head_dim = kHeadDim, q.index_heads = s.index_heads;
  q.index_dim = kIndexDim, q.ratio = s.ratio, q.blocks = s.blocks, q.rotary = kRotary, q.page_tokens = s.page_tokens;
  q.table_width = s.width, q.block_table = d.get<int32_t>("block_table"), q.kv_table = d.get<int32_t>("kv_table");
  q.lanes = device_lanes(p, d);
  return q;
}

cuda::QsaCache device_cache(const Problem& p, DeviceProblem& d) {
  cuda::QsaCache c;
  c.dtype = static_cast<DType>(p.number("dtype")), c.ring = p.number("ring");
  c.index_keys = d.get<float>("index_keys"), c.raw_keys = d.get<float>("raw_keys");
  if (!p.has("keys")) return c;
  const Operand& keys = p["keys"];
  const int64_t far = far_pages(keys.shape[0]), far_bytes = far * keys.size() / keys.shape[0] * dtype_size(keys.dtype);
  c.keys = {d.get<std::byte>("keys") + far_bytes, d.at("keys")};
  c.values = {d.get<std::byte>("values") + far_bytes, d.at("values")};
  c.near_tokens = (keys.shape[0] - far) * p.number("page_tokens");
  return c;
}
#endif

}  // namespace fnx::contract
