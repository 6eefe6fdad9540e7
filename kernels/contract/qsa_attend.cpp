// Sparse attention over a filled cache: softmax over the selected blocks' tokens and the tail, times the gate.
#include <algorithm>
#include <cmath>
#include <iterator>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/lanes.h"
#include "kernels/contract/qsa_site.h"
#include "kernels/cuda/qsa.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

constexpr double kScale = 1.0 / 16;  // 1 / sqrt(256), exact

// Places of a row's key list: its selected blocks, then the tail.
std::vector<int64_t> key_list(const Problem& p, const QsaSizes& s, const QsaRow& row) {
  std::vector<int64_t> tokens;
  const int32_t* selected = p["selected"].as<int32_t>() + row.row * s.blocks;
  for (int64_t b = 0; b < s.blocks && selected[b] >= 0; ++b)
    for (int64_t j = 0; j < s.ratio; ++j) tokens.push_back(token_place(p, s, row.slot, selected[b] * s.ratio + j));
  for (int64_t t = (row.position + 1) / s.ratio * s.ratio; t <= row.position; ++t)
    tokens.push_back(token_place(p, s, row.slot, t));
  return tokens;
}

// Keys or values of a list for one KV head, [tokens, 256].
template <class T>
std::vector<T> gathered(const Operand& cache, const std::vector<int64_t>& tokens, int64_t kv_heads, int64_t kv) {
  std::vector<T> out;
  out.reserve(tokens.size() * kHeadDim);
  for (const int64_t token : tokens) {
    const int64_t first = (token * kv_heads + kv) * kHeadDim;
    if (cache.dtype == DType::BF16)
      std::transform(cache.as<uint16_t>() + first, cache.as<uint16_t>() + first + kHeadDim, std::back_inserter(out),
                     bf16_to_f32);
    else
      out.insert(out.end(), cache.as<float>() + first, cache.as<float>() + first + kHeadDim);
  }
  return out;
}

// A score sums 256 products: with BF16 pages three times, the query being the sum of three bf16 numbers of falling
// size, in chains that a step's sixteen products enter together; with F32 pages in 32 lanes. A weight errs by its
// score's error, the roundings of score - maximum in its part and in the merges, and expf, of which each merge adds one
// with two products; the maximum itself cancels. Weighted values: as the scores, by the part's keys. Then the division.
// Errors of a weight act on the quotient by the distance of its value from the mean: at most |v| + |y|.
void head_reference(const float* query, const float* gate, const std::vector<double>& keys,
                    const std::vector<double>& values, bool bf16, Bounded* out) {
  const size_t count = keys.size() / kHeadDim;
  const bool finite = std::all_of(query, query + kHeadDim, [](float x) { return std::isfinite(x); });
  std::vector<double> weight(count), error(count);
  double highest = -INFINITY;
  for (size_t t = 0; t < count; ++t) {
    double sum = 0, size = 0;
    for (size_t d = 0; d < kHeadDim; ++d) {
      const double term = double{query[d]} * keys[t * kHeadDim + d];
      sum += term;
      size += std::abs(term);
    }
    weight[t] = sum * kScale;
    error[t] = gamma(bf16 ? kHeadDim + 32 : 16) * (1 + 0x1p-7) * size * kScale;
    highest = std::max(highest, weight[t]);
  }
  const double merges = std::ceil(static_cast<double>(count) / 64), sums = gamma((bf16 ? 200 : 70) + 2 * merges);
  double total = 0, moved = 0;
  for (size_t t = 0; t < count; ++t) {
    const double below = highest - weight[t];
    const double relative = std::expm1(error[t] + kUnit * (below + error[t]) + gamma(6 * merges));
    weight[t] = std::exp(-below);
    error[t] = weight[t] * relative + 0x1p-126;
    total += weight[t];
    moved += error[t];
  }
  for (size_t d = 0; d < kHeadDim; ++d) {
    double sum = 0, carried = 0, size = 0;
    for (size_t t = 0; t < count; ++t) {
      const double v = values[t * kHeadDim + d];
      sum += weight[t] * v;
      carried += error[t] * std::abs(v);
      size += weight[t] * std::abs(v);
    }
    const double y = sum / total, left = moved / total + sums;
    const double y_error = ((carried + sums * size) / total + std::abs(y) * left) / (1 - left);
    const Bounded g = sigmoid_reference({gate[d], 0});
    out[d] = times({y, y_error + kUnit * (std::abs(y) + y_error)}, g);
    out[d].error += 0x1p-140;
    if (!(left < 0.5)) out[d].error = std::nan("");
    // One number of the query that is not finite leaves no score that is.
    if (!finite) out[d] = {std::nan(""), 0};
  }
}

std::vector<Expectation> attend_expect(const Problem& given, const Problem&) {
  const QsaSizes s(given);
  const int64_t group = s.heads / s.kv_heads;
  Expectation out = expect_elements(given["out"], [](int64_t) { return Bounded{}; });
  std::vector<Bounded> head(kHeadDim);
  for (const QsaRow& row : rows_of(given)) {
    const std::vector<int64_t> tokens = key_list(given, s, row);
    for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
      const auto keys = gathered<double>(given["keys"], tokens, s.kv_heads, kv),
                 values = gathered<double>(given["values"], tokens, s.kv_heads, kv);
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const float* query = given["query_gate"].as<float>() + (row.row * s.heads + h) * 2 * kHeadDim;
        head_reference(query, query + kHeadDim, keys, values, s.dtype == DType::BF16, head.data());
        out.put((row.row * s.heads + h) * kHeadDim, head);
      }
    }
  }
  return {out};
}

enum class Fault : uint8_t { None, NoTail, NextKvHead, NoGate, PartsDescending };

// Parts of 64 keys by their place in the list, merged in ascending order.
void head_host(const float* query, const std::vector<float>& keys, const std::vector<float>& values, Fault fault,
               float* out) {
  const size_t count = keys.size() / kHeadDim, parts = (count + cuda::kPartKeys - 1) / cuda::kPartKeys;
  std::vector<float> sums(kHeadDim, 0.0f), part(kHeadDim), weight(cuda::kPartKeys);
  float highest = -INFINITY, total = 0;
  for (size_t i = 0; i < parts; ++i) {
    const size_t first = (fault == Fault::PartsDescending ? parts - 1 - i : i) * cuda::kPartKeys;
    const size_t last = std::min<size_t>(count, first + cuda::kPartKeys);
    float top = -INFINITY, part_total = 0;
    for (size_t t = first; t < last; ++t) {
      float lanes[32] = {};
      for (size_t d = 0; d < kHeadDim; d += 32)
        for (size_t l = 0; l < 32; ++l) lanes[l] += query[d + l] * keys[t * kHeadDim + d + l];
      for (int w = 16; w > 0; w /= 2)
        for (int l = 0; l < w; ++l) lanes[l] += lanes[l + w];
      weight[t - first] = lanes[0] * static_cast<float>(kScale);
      top = std::isnan(weight[t - first]) ? weight[t - first] : std::max(top, weight[t - first]);
    }
    std::fill(part.begin(), part.end(), 0.0f);
    for (size_t t = first; t < last; ++t) {
      const float w = std::exp(weight[t - first] - top);
      part_total += w;
      for (size_t d = 0; d < kHeadDim; ++d) part[d] += w * values[t * kHeadDim + d];
    }
    const float both = std::isnan(top) ? top : std::max(highest, top);
    const float before = i == 0 ? 0.0f : std::exp(highest - both), now = std::exp(top - both);
    total = total * before + part_total * now;
    for (size_t d = 0; d < kHeadDim; ++d) sums[d] = sums[d] * before + part[d] * now;
    highest = both;
  }
  for (size_t d = 0; d < kHeadDim; ++d)
    out[d] = sums[d] / total * (fault == Fault::NoGate ? 1.0f : sigmoid_value(query[kHeadDim + d]));
}

void attend_host(Problem& p, Fault fault) {
  const QsaSizes s(p);
  const int64_t group = s.heads / s.kv_heads;
  if (fault == Fault::PartsDescending && p.rows <= kMostRowsAlone) fault = Fault::None;
  for (const QsaRow& row : rows_of(p)) {
    std::vector<int64_t> tokens = key_list(p, s, row);
    if (fault == Fault::NoTail) tokens.pop_back();
    for (int64_t kv = 0; kv < s.kv_heads; ++kv) {
      const int64_t from = fault == Fault::NextKvHead ? (kv + 1) % s.kv_heads : kv;
      const auto keys = gathered<float>(p["keys"], tokens, s.kv_heads, from),
                 values = gathered<float>(p["values"], tokens, s.kv_heads, kv);
      for (int64_t h = kv * group; h < (kv + 1) * group; ++h) {
        const int64_t at = (row.row * s.heads + h) * kHeadDim;
        head_host(p["query_gate"].as<float>() + 2 * at, keys, values, fault, p["out"].as<float>() + at);
      }
    }
  }
}

Problem attend_make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
  Problem p{rows, shape.numbers, {}};
  const QsaSizes s(p);
  Random random(seed, 1);
  fill(p.add("query_gate", DType::F32, Role::In, true, {rows, s.heads, 2, kHeadDim}).as<float>(), rows,
       s.heads * 2 * kHeadDim, kind, {-30, 2}, Random(seed, 2));
  const int64_t pages = add_pages(p, rows, random);
  add_cache(p, "keys", Role::In, pages, random);
  add_cache(p, "values", Role::In, pages, random);
  auto* selected = p.add("selected", DType::I32, Role::In, true, {rows, s.blocks}).as<int32_t>();
  std::fill_n(selected, rows * s.blocks, -1);
  for (const QsaRow& row : rows_of(p)) {
    // Ascending, with gaps while there are blocks to spare.
    const int64_t complete = (row.position + 1) / s.ratio, count = std::min(s.blocks, complete);
    int64_t spare = complete - count, block = 0;
    for (int64_t b = 0; b < count; ++b, ++block) {
      const int64_t gap = spare > 0 ? random.below(std::min<int64_t>(spare, 3) + 1) : 0;
      block += gap;
      spare -= gap;
      selected[row.row * s.blocks + b] = static_cast<int32_t>(block);
    }
  }
  p.add("out", DType::F32, Role::Out, true, {rows, s.heads * kHeadDim});
  return p;
}

// Blocks of six tokens, which straddle the parts of 64 keys.
Shape in_sixes(Shape shape) {
  shape.label += ", blocks of 6";
  shape.numbers["ratio"] = shape.numbers["ring"] = 6, shape.numbers["page_tokens"] = 36;
  return shape;
}

}  // namespace

std::unique_ptr<Kernel> qsa_attend_entry() {
  Entry e;
  e.record = {
      "qsa_attend",
      "qsa_attend",
      {{"attend_parts_kernel", 256, 255, 0, kSharedLimit, 0},
       {"merge_parts_kernel", 256, 128, 0, 48 * 1024, 0},
       {"attend_rows_kernel", 64, 255, 0, kSharedLimit, 0},
       {"attend_f32_kernel", 256, 255, 32 * 1024, 0, 0}},
      "head dim 256, at most 16 query heads a KV head, ratio 1 to 64, 1 to 4096 blocks of at most 65536 tokens, "
      "BF16 or F32 pages, fewer than 65536 rows in any lanes",
      "BF16, up to 64 rows: parts of 64 keys by KV heads by rows, then a merge, a block a head of a row; more "
      "rows, and F32: a block a KV head of a row",
      {{"query_gate", "F32", "[rows, heads, 2, 256]", 16, "read"},
       {"keys", "BF16 or F32",
        "[pages, page_tokens, kv_heads, 256] in two ranges, one of which may be mapped host memory", 16, "read"},
       {"values", "BF16 or F32", "as keys", 16, "read"},
       {"selected", "I32", "[rows, blocks]", 4, "read"},
       {"lanes", "I32", "[lanes, 4]", 16, "read"},
       {"kv_table", "I32", "[slots, width]", 4, "read"},
       {"out", "F32", "[rows, heads * 256]", 16, "written"}},
      "none",
      "a row depends on its query, gate, position, selection and its sequence's keys and values",
      "parts of 64 keys by place in the row's list, merged ascending; inside a part as kernels/cuda/qsa.h says",
      "none: queries and weights as sums of three bf16 numbers",
      "scores within the range of expf"};
  e.host_shapes = {qsa_shape(4, 2, 40, DType::BF16, 130), qsa_shape(2, 1, 20, DType::F32)};
  e.more_device_shapes = {qsa_shape(24, 2, 20, DType::BF16), qsa_shape(16, 1, 20, DType::F32),
                          qsa_shape(24, 2, 512, DType::BF16, 2100), in_sixes(qsa_shape(16, 1, 40, DType::BF16, 300))};
  e.value_rows = 20;
  e.bit_rows = 130;
  e.make = attend_make;
  e.expect = attend_expect;
  e.domain = [](const Problem& p) {
    qsa_domain(p);
    require_range("rows", p.rows, 0, 65535);
    const QsaSizes s(p);
    if (s.dtype != DType::BF16 && s.dtype != DType::F32)
      refuse("pages of " + std::to_string(dtype_size(s.dtype)) + "-byte " + dtype_name(s.dtype));
  };
  e.host = [](Problem& p) { attend_host(p, Fault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    LaneBatch lanes(p);
    lanes.batch.block_table = p["block_table"].view(), lanes.batch.kv_table = p["kv_table"].view();
    backend->qsa_attend(*backend->make_stream(), qsa_weights(p), lanes.batch, qsa_rows(p), qsa_cache(p),
                        p["out"].view());
  };
  e.part = lanes_part;
  e.refusals = qsa_refusals();
  e.refusals.push_back({"pages of I64", set_number("dtype", static_cast<int64_t>(DType::I64))});
  e.refusals.push_back({"queries off by 8 bytes", misalign("query_gate", 8)});
  e.refusals.push_back({"keys off by 8 bytes", misalign("keys", 8)});
  const auto inside = [](const char* name, int gate, Fault fault) {
    return host_control(name, gate, [fault](Problem& p) { attend_host(p, fault); });
  };
  e.controls = {inside("last key left out", 2, Fault::NoTail),
                inside("keys of the next KV head", 2, Fault::NextKvHead),
                inside("gate left out", 2, Fault::NoGate),
                inside("parts in descending order above 16 rows", 3, Fault::PartsDescending),
                tamper_control("selection of the next block", 2,
                               [](Problem& p) {
                                 Operand& ids = p["selected"];
                                 for (int64_t i = 0; i < ids.size(); ++i)
                                   if (ids.as<int32_t>()[i] > 0) --ids.as<int32_t>()[i];
                               }),
                crossed_slots(),
                crossed_pages()};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::QsaAttendParams q;
    q.shape = device_shape(p, d), q.cache = device_cache(p, d);
    q.query_gate = d.get<float>("query_gate"), q.selected = d.get<int32_t>("selected"), q.out = d.get<float>("out");
    const int64_t floats = q.shape.ratio <= 64 ? cuda::qsa_partials(q.shape) : 1;
    q.partials = d.scratch_of<float>("partials", floats);
    cuda::qsa_attend(q, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace fnx::contract
