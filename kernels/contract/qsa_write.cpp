// Norms and rotations of a layer's rows, its cache writes and the pooling of index keys, as one operation.
#include <algorithm>
#include <cmath>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/lanes.h"
#include "kernels/contract/qsa_site.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

constexpr int64_t kHalf = kRotary / 2;

enum class Fault : uint8_t { None, NoRotation, NotCentred, LastPosition, PoolsLaunchAlone, KeepsNothing, OneBlock };

// Squares: a lane of 32 chains every 32nd, then a butterfly; mean, eps, root, division: half of what the sum errs. Then
// three products, and a rotation by an angle that is the same fp32 number here; sincosf within 2 ulp, a product, a sum.
std::vector<Bounded> norm_rope(const std::vector<Bounded>& x, const Operand& weight, const Operand& inv_freq,
                               int64_t position) {
  const auto n = static_cast<double>(x.size());
  const Bounded scale = inverse_rms(x.data(), x.size(), n, kQsaEps, 0.5 * (n / 32 + 6) + 3);
  std::vector<Bounded> y;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = 1.0 + weight.at(static_cast<int64_t>(i));
    y.push_back(times(times(x[i], scale), {w, kUnit * std::abs(w)}));
    y.back().error += 0x1p-140;
  }
  const auto added = [](Bounded a, Bounded b) {
    const double sum = a.value + b.value;
    return Bounded{sum, a.error + b.error + kUnit * std::abs(sum)};
  };
  for (size_t i = 0; i < kHalf; ++i) {
    const double angle = static_cast<float>(position) * inv_freq.as<float>()[i];
    const Bounded c{std::cos(angle), gamma(5) * std::abs(std::cos(angle)) + 0x1p-140};
    const Bounded s{std::sin(angle), gamma(5) * std::abs(std::sin(angle)) + 0x1p-140};
    const Bounded a = y[i], b = y[i + kHalf];
    y[i] = added(times(a, c), times({-b.value, b.error}, s));
    y[i + kHalf] = added(times(b, c), times(a, s));
  }
  return y;
}

void norm_rope32(float* x, int64_t n, const float* weight, const float* inv_freq, int64_t position, Fault fault) {
  float lanes[32] = {};
  for (int64_t i = 0; i < n; ++i) lanes[i % 32] = std::fma(x[i], x[i], lanes[i % 32]);
  for (int d = 16; d > 0; d /= 2)
    for (int l = 0; l < d; ++l) lanes[l] += lanes[l + d];
  const float scale = 1.0f / std::sqrt(lanes[0] / static_cast<float>(n) + kQsaEps);
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] * scale * (fault == Fault::NotCentred ? weight[i] : 1.0f + weight[i]);
  for (int64_t i = 0; fault != Fault::NoRotation && i < kHalf; ++i) {
    const float angle = static_cast<float>(position) * inv_freq[i], c = std::cos(angle), s = std::sin(angle);
    const float a = x[i], b = x[i + kHalf];
    x[i] = std::fma(a, c, -(b * s));
    x[i + kHalf] = std::fma(b, c, a * s);
  }
}

// A page's number for a key or value: exactly its rounding.
double paged(double x, DType dtype) {
  return dtype == DType::BF16 ? bf16_to_f32(f32_to_bf16(static_cast<float>(x))) : x;
}

std::vector<Expectation> write_expect(const Problem& given, const Problem& done) {
  const QsaSizes s(given);
  Expectation query = expect_unchanged(given["query_gate"]), key = expect_unchanged(given["key"]),
              index = expect_unchanged(given["index"]), keys = expect_unchanged(given["keys"]),
              values = expect_unchanged(given["values"]), raw = expect_unchanged(given["raw_keys"]),
              pooled = expect_unchanged(given["index_keys"]);
  const auto head = [&](Expectation& e, const char* name, int64_t at, int64_t n, const char* norm, int64_t position) {
    std::vector<Bounded> x(static_cast<size_t>(n));
    for (int64_t i = 0; i < n; ++i) x[static_cast<size_t>(i)].value = given[name].as<float>()[at + i];
    e.put(at, norm_rope(x, given[norm], given["inv_freq"], position));
  };
  for (const auto& [r, position, slot] : rows_of(given)) {
    for (int64_t h = 0; h < s.heads; ++h)
      head(query, "query_gate", (r * s.heads + h) * 2 * kHeadDim, kHeadDim, "q_norm", position);
    for (int64_t h = 0; h < s.kv_heads; ++h)
      head(key, "key", (r * s.kv_heads + h) * kHeadDim, kHeadDim, "k_norm", position);
    for (int64_t h = 0; h < s.index_heads; ++h)
      head(index, "index", r * s.index_width() + h * kIndexDim, kIndexDim, "index_q_norm", position);
    const int64_t place = token_place(given, s, slot, position) * s.kv_width();
    for (int64_t i = 0; i < s.kv_width(); ++i) {
      // The key that this launch made, whose own bound stands above.
      keys.value[static_cast<size_t>(place + i)] = paged(done["key"].as<float>()[r * s.kv_width() + i], s.dtype);
      values.value[static_cast<size_t>(place + i)] = paged(given["value"].as<float>()[r * s.kv_width() + i], s.dtype);
    }
    const auto first = static_cast<size_t>(slot * s.ring * kIndexDim);
    for (int64_t i = 0; i < kIndexDim; ++i)
      raw.value[first + static_cast<size_t>(position % s.ring * kIndexDim + i)] =
          given["index"].as<float>()[r * s.index_width() + s.index_heads * kIndexDim + i];
    if ((position + 1) % s.ratio != 0) continue;
    std::vector<Bounded> mean(static_cast<size_t>(kIndexDim));
    for (size_t i = 0; i < mean.size(); ++i) {
      double sum = 0, size = 0;
      for (int64_t j = 0; j < s.ratio; ++j) {
        const int64_t at = (position / s.ratio * s.ratio + j) % s.ring;
        const double x = raw.value[first + static_cast<size_t>(at * kIndexDim) + i];
        sum += x;
        size += std::abs(x);
      }
      const auto ratio = static_cast<double>(s.ratio);
      mean[i] = {sum / ratio, gamma(ratio) * size / ratio};
    }
    pooled.put(block_place(given, s, slot, position / s.ratio) * kIndexDim,
               norm_rope(mean, given["index_k_norm"], given["inv_freq"], position / s.ratio * s.ratio));
  }
  return {query, key, index, keys, values, pooled, raw};
}

void write_host(Problem& p, Fault fault) {
  const QsaSizes s(p);
  const float* inv_freq = p["inv_freq"].as<float>();
  float *query = p["query_gate"].as<float>(), *key = p["key"].as<float>(), *index = p["index"].as<float>(),
        *pooled_keys = p["index_keys"].as<float>();
  const int64_t ring = fault == Fault::OneBlock ? s.ratio : s.ring;
  Operand raw_before = p["raw_keys"];
  const auto store = [&](Operand& pages, int64_t at, const float* x) {
    if (s.dtype == DType::BF16)
      std::transform(x, x + s.kv_width(), pages.as<uint16_t>() + at, f32_to_bf16);
    else
      std::copy_n(x, s.kv_width(), pages.as<float>() + at);
  };
  for (const Lane& lane : lanes_of(p)) {
    float* raw =
        (fault == Fault::KeepsNothing ? raw_before : p["raw_keys"]).as<float>() + lane.slot * s.ring * kIndexDim;
    if (fault == Fault::PoolsLaunchAlone) std::fill_n(raw, s.ring * kIndexDim, 0.0f);
    for (int64_t i = 0; i < lane.rows; ++i) {
      const int64_t r = lane.first_row + i, position = lane.start + i;
      for (int64_t h = 0; h < s.heads; ++h)
        norm_rope32(query + (r * s.heads + h) * 2 * kHeadDim, kHeadDim, p["q_norm"].as<float>(), inv_freq, position,
                    fault);
      for (int64_t h = 0; h < s.kv_heads; ++h)
        norm_rope32(key + (r * s.kv_heads + h) * kHeadDim, kHeadDim, p["k_norm"].as<float>(), inv_freq, position,
                    fault);
      float* row = index + r * s.index_width();
      for (int64_t h = 0; h < s.index_heads; ++h)
        norm_rope32(row + h * kIndexDim, kIndexDim, p["index_q_norm"].as<float>(), inv_freq, position, fault);
      const int64_t place = token_place(p, s, lane.slot, position) * s.kv_width();
      store(p["keys"], place, key + r * s.kv_width());
      store(p["values"], place, p["value"].as<float>() + r * s.kv_width());
      std::copy_n(row + s.index_heads * kIndexDim, kIndexDim, raw + position % ring * kIndexDim);
      if ((position + 1) % s.ratio != 0) continue;
      const int64_t block = position / s.ratio;
      float* pooled = pooled_keys + block_place(p, s, lane.slot, block) * kIndexDim;
      for (int64_t d = 0; d < kIndexDim; ++d) {
        float sum = 0;
        for (int64_t j = 0; j < s.ratio; ++j) sum += raw[(block * s.ratio + j) % ring * kIndexDim + d];
        pooled[d] = sum / static_cast<float>(s.ratio);
      }
      norm_rope32(pooled, kIndexDim, p["index_k_norm"].as<float>(), inv_freq,
                  fault == Fault::LastPosition ? position : block * s.ratio, fault);
    }
  }
}

Problem write_make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
  Problem p{rows, shape.numbers, {}};
  const QsaSizes s(p);
  Random random(seed, 1);
  const auto add = [&](const char* name, Role role, bool by_row, std::vector<int64_t> sizes, Kind k, uint64_t stream) {
    Operand& o = p.add(name, DType::F32, role, by_row, std::move(sizes));
    fill(o.as<float>(), o.shape[0], o.size() / o.shape[0], k, {-30, 20}, Random(seed, stream));
  };
  const int64_t pages = add_pages(p, rows, random), slots = p["block_table"].shape[0];
  add("query_gate", Role::InOut, true, {rows, s.heads, 2, kHeadDim}, kind, 2);
  add("key", Role::InOut, true, {rows, s.kv_heads, kHeadDim}, kind, 3);
  add("value", Role::In, true, {rows, s.kv_heads, kHeadDim}, kind, 4);
  add("index", Role::InOut, true, {rows, s.index_heads + 1, kIndexDim}, kind, 5);
  add("q_norm", Role::In, false, {kHeadDim}, Kind::Normal, 6);
  add("k_norm", Role::In, false, {kHeadDim}, Kind::Normal, 7);
  add("index_q_norm", Role::In, false, {kIndexDim}, Kind::Normal, 8);
  add("index_k_norm", Role::In, false, {kIndexDim}, Kind::Normal, 9);
  float* inv_freq = p.add("inv_freq", DType::F32, Role::In, false, {kHalf}).as<float>();
  for (int64_t i = 0; i < kHalf; ++i)
    inv_freq[i] = static_cast<float>(std::pow(1e7, -static_cast<double>(i) / static_cast<double>(kHalf)));
  add_cache(p, "keys", Role::InOut, pages, random);
  add_cache(p, "values", Role::InOut, pages, random);
  add("index_keys", Role::InOut, false, {pages, s.per_page(), kIndexDim}, Kind::Normal, 10);
  add("raw_keys", Role::InOut, false, {slots, s.ring, kIndexDim}, Kind::Normal, 11);
  return p;
}

}  // namespace

std::unique_ptr<Kernel> qsa_write_entry() {
  Entry e;
  e.record = {
      "qsa_write",
      "qsa_write",
      {{"qsa_write_kernel", 128, 64, 4096, 0, 48}},
      "head dim 256, index dim 128, rotary even to 128, at most 16 query heads a KV head, 1 to 8 index heads, ratio 1 "
      "to 64, a ring of raw keys of whole blocks, BF16 or F32 pages, any lanes and rows",
      "a warp a head of a row and a warp a lane, four a block",
      {{"query_gate", "F32", "[rows, heads, 2, 256]", 4, "read and written"},
       {"key", "F32", "[rows, kv_heads, 256]", 4, "read and written"},
       {"value", "F32", "[rows, kv_heads, 256]", 4, "read"},
       {"index", "F32", "[rows, index_heads + 1, 128]", 4, "read and written"},
       {"q_norm", "F32", "[256]", 4, "read"},
       {"k_norm", "F32", "[256]", 4, "read"},
       {"index_q_norm", "F32", "[128]", 4, "read"},
       {"index_k_norm", "F32", "[128]", 4, "read"},
       {"inv_freq", "F32", "[rotary / 2]", 4, "read"},
       {"lanes", "I32", "[lanes, 4]", 16, "read"},
       {"block_table", "I32", "[slots, width]", 4, "read"},
       {"kv_table", "I32", "[slots, width]", 4, "read"},
       {"keys", "BF16 or F32",
        "[pages, page_tokens, kv_heads, 256] in two ranges, one of which may be mapped host memory", 4,
        "written at the rows' tokens"},
       {"values", "BF16 or F32", "as keys", 4, "written at the rows' tokens"},
       {"index_keys", "F32", "[pages, page_tokens / ratio, 128]", 4, "written at the blocks that the rows complete"},
       {"raw_keys", "F32", "[slots, ring, 128]", 4, "read and written"}},
      "none",
      "a row depends on itself and its position; a pooled key also on its sequence's rows before",
      "squares: a lane chains every 32nd element, then a butterfly; a pooled key adds its raw keys oldest first",
      "keys and values to bf16 when the pages are BF16",
      "no two sequences of a launch share a page"};
  e.host_shapes = {qsa_shape(2, 1, 20, DType::BF16), qsa_shape(4, 2, 20, DType::F32),
                   qsa_shape(2, 1, 20, DType::BF16, 60, 12)};
  e.more_device_shapes = {qsa_shape(24, 2, 512, DType::BF16), qsa_shape(2, 1, 20, DType::BF16, 200000)};
  e.value_rows = 20;
  e.bit_rows = 140;
  e.make = write_make;
  e.expect = write_expect;
  e.domain = [](const Problem& p) {
    qsa_domain(p);
    const QsaSizes s(p);
    require_range("ring", s.ring, s.ratio, INT32_MAX, s.ratio);
    if (s.dtype != DType::BF16 && s.dtype != DType::F32)
      refuse("pages of " + std::to_string(dtype_size(s.dtype)) + "-byte " + dtype_name(s.dtype));
  };
  e.host = [](Problem& p) { write_host(p, Fault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    LaneBatch lanes(p);
    lanes.batch.block_table = p["block_table"].view(), lanes.batch.kv_table = p["kv_table"].view();
    backend->qsa_write(*backend->make_stream(), qsa_weights(p), lanes.batch, qsa_rows(p), qsa_cache(p));
  };
  e.part = lanes_part;
  e.refusals = qsa_refusals();
  e.refusals.push_back({"pages of I64", set_number("dtype", static_cast<int64_t>(DType::I64))});
  e.refusals.push_back({"a ring of 6 raw keys with blocks of 4", set_number("ring", 6)});
  const auto inside = [](const char* name, int gate, Fault fault) {
    return host_control(name, gate, [fault](Problem& p) { write_host(p, fault); });
  };
  e.controls = {inside("rotation left out", 2, Fault::NoRotation),
                inside("norm not centred", 2, Fault::NotCentred),
                inside("pooled key at its last token's position", 2, Fault::LastPosition),
                inside("raw keys not kept", 2, Fault::KeepsNothing),
                inside("ring of one block", 2, Fault::OneBlock),
                inside("block pooled from the launch alone", 3, Fault::PoolsLaunchAlone),
                crossed_slots(),
                crossed_pages()};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::QsaWriteParams q;
    q.shape = device_shape(p, d), q.cache = device_cache(p, d);
    q.query_gate = d.get<float>("query_gate"), q.key = d.get<float>("key"), q.value = d.get<float>("value");
    q.index = d.get<float>("index"), q.inv_freq = d.get<float>("inv_freq");
    q.q_norm = d.get<float>("q_norm"), q.k_norm = d.get<float>("k_norm");
    q.index_q_norm = d.get<float>("index_q_norm"), q.index_k_norm = d.get<float>("index_k_norm");
    q.q_eps = q.k_eps = q.index_q_eps = q.index_k_eps = kQsaEps;
    cuda::qsa_write(q, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace fnx::contract
