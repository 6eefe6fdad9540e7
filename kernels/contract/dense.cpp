// Embedding, sums of rows, gathers, norms, plain linear layers and HC injection.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/cuda/embed.h"
#include "kernels/cuda/norm_hc.h"
#include "kernels/float16.h"
#include "kernels/ops.h"

namespace fnx::contract {

namespace {

// Values of a table or weight in F16, BF16 or F32.
void fill_as(Operand& o, Random& random) {
  for (int64_t i = 0; i < o.size(); ++i) {
    const auto x = static_cast<float>(random.normal());
    if (o.dtype == DType::F32)
      o.as<float>()[i] = x;
    else
      o.as<uint16_t>()[i] = o.dtype == DType::F16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
}

Operand& add_filled(Problem& p, const char* name, bool by_row, std::vector<int64_t> shape, Kind kind, Range range,
                    Random random) {
  Operand& o = p.add(name, DType::F32, Role::In, by_row, std::move(shape));
  fill(o.as<float>(), o.shape[0], o.size() / o.shape[0], kind, range, random);
  return o;
}

std::unique_ptr<Kernel> embed_entry() {
  Entry e;
  e.record = {"embed",
              "embed",
              {{"embed_kernel", 256, 64, 0, 0, 0}},
              "any rows, copies and width; tokens inside the table",
              "ceil(rows * copies * width / 256) blocks of 256 threads",
              {{"tokens", "I32", "[rows]", 4, "read"},
               {"table", "F16, BF16 or F32", "[V, width]", 4, "read"},
               {"out", "F32", "[rows, copies, width]", 4, "written"}},
              "none",
              "a row depends on its token",
              "none: no sums",
              "none",
              "tokens are not checked"};
  const auto shape = [](int64_t width, int64_t copies, DType dtype) {
    return Shape{std::to_string(copies) + " copies of " + std::to_string(width) + " " + dtype_name(dtype),
                 {{"width", width}, {"copies", copies}, {"dtype", static_cast<int64_t>(dtype)}, {"vocabulary", 50}}};
  };
  e.host_shapes = {shape(130, 4, DType::BF16), shape(65, 1, DType::F16), shape(32, 2, DType::F32)};
  e.more_device_shapes = {shape(2560, 4, DType::BF16)};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    Random random(seed, 1);
    const int64_t width = p.number("width");
    auto* tokens = p.add("tokens", DType::I32, Role::In, true, {rows}).as<int32_t>();
    // Token 0 is the one that may hold NaN, and row 1 alone takes it; rows 0 and 3 differ.
    for (int64_t r = 0; r < rows; ++r) tokens[r] = static_cast<int32_t>(1 + (3 * r + random.below(3)) % 48);
    if (rows > 1) tokens[1] = 0;
    Operand& table =
        p.add("table", static_cast<DType>(p.number("dtype")), Role::In, false, {p.number("vocabulary"), width});
    fill_as(table, random);
    if (kind == Kind::NonFinite)
      for (size_t b = 0; b < dtype_size(table.dtype); ++b) table.data()[b] = std::byte{0x7F};
    p.add("out", DType::F32, Role::Out, true, {rows, p.number("copies"), p.number("width")});
    return p;
  };
  const auto value = [](const Problem& p, int64_t i) {
    const int64_t width = p.number("width"), row = i / (p.number("copies") * width);
    return p["table"].at(p["tokens"].as<int32_t>()[row] * width + i % width);
  };
  e.expect = [value](const Problem& given, const Problem&) {
    return std::vector<Expectation>{expect_elements(given["out"], [&](int64_t i) {
      return Bounded{value(given, i), 0};
    })};
  };
  e.domain = [](const Problem& p) {
    require_range("copies", p.number("copies"), 1, INT32_MAX);
    require_range("width", p.number("width"), 1, INT32_MAX);
    const auto dtype = static_cast<DType>(p.number("dtype"));
    if (dtype != DType::F16 && dtype != DType::BF16 && dtype != DType::F32)
      refuse("a table of " + std::to_string(dtype_size(dtype)) + "-byte " + dtype_name(dtype));
  };
  e.host = [value](Problem& p) {
    for (int64_t i = 0; i < p["out"].size(); ++i) p["out"].as<float>()[i] = static_cast<float>(value(p, i));
  };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->embed(*backend->make_stream(), p["tokens"].view(), p["table"].view(), p["out"].view());
  };
  e.exact_kinds = {Kind::Normal};
  e.refusals = {{"no copies", set_number("copies", 0)},
                {"no width", set_number("width", 0)},
                {"a table of I64", set_number("dtype", static_cast<int64_t>(DType::I64))}};
  e.controls = {tamper_control("token of the next row", 2, [](Problem& p) {
    auto* t = p["tokens"].as<int32_t>();
    std::rotate(t, t + 1, t + p.rows);
  })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::embed({d.get<int32_t>("tokens"), d.at("table"), static_cast<DType>(p.number("dtype")), d.get<float>("out"),
                 p.rows, p.number("copies"), p.number("width")},
                d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

std::unique_ptr<Kernel> add_entry() {
  Entry e;
  e.record = {"add",
              "add",
              {{"add_kernel", 256, 64, 0, 0, 0}},
              "a of rows * repeat rows, b of rows rows, any width",
              "ceil(rows * repeat * width / 256) blocks of 256 threads",
              {{"a", "F32", "[rows * repeat, width]", 4, "read"},
               {"b", "F32", "[rows, width]", 4, "read"},
               {"out", "F32", "[rows * repeat, width]", 4, "written"}},
              "out may be a",
              "a row depends on its row of a and b",
              "one addition",
              "none",
              "none beyond fp32"};
  e.host_shapes = {{"4 times a row of 70", {{"width", 70}, {"repeat", 4}}},
                   {"a row of 70", {{"width", 70}, {"repeat", 1}}}};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t width = p.number("width"), repeat = p.number("repeat");
    add_filled(p, "a", true, {rows, repeat, width}, kind, {}, Random(seed, 1));
    add_filled(p, "b", true, {rows, width}, kind == Kind::NonFinite ? Kind::Normal : kind, {}, Random(seed, 2));
    p.add("out", DType::F32, Role::Out, true, {rows, repeat, width});
    return p;
  };
  const auto b_at = [](const Problem& p, int64_t i) {
    const int64_t width = p.number("width");
    return i / (width * p.number("repeat")) * width + i % width;
  };
  e.expect = [b_at](const Problem& given, const Problem&) {
    return std::vector<Expectation>{expect_elements(given["out"], [&](int64_t i) {
      const double sum = given["a"].at(i) + given["b"].at(b_at(given, i));
      return Bounded{sum, kUnit * std::abs(sum)};
    })};
  };
  e.domain = [](const Problem& p) {
    require_range("repeat", p.number("repeat"), 1, INT32_MAX);
    require_range("width", p.number("width"), 1, INT32_MAX);
  };
  e.host = [b_at](Problem& p) {
    for (int64_t i = 0; i < p["out"].size(); ++i)
      p["out"].as<float>()[i] = p["a"].as<float>()[i] + p["b"].as<float>()[b_at(p, i)];
  };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    const int64_t repeat = p.number("repeat"), width = p.number("width");
    backend->add(*backend->make_stream(), repeat, p["a"].view().reshape({p.rows * repeat, width}), p["b"].view(),
                 p["out"].view().reshape({p.rows * repeat, width}));
  };
  e.exact_kinds = {Kind::Normal, Kind::Directed};
  e.refusals = {{"no repeat", set_number("repeat", 0)}, {"no width", set_number("width", 0)}};
  e.controls = {tamper_control("b of the next row", 2, [](Problem& p) {
    Operand& b = p["b"];
    std::memmove(b.data(), b.data() + b.row_bytes(), b.bytes() - b.row_bytes());
  })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::add({d.get<float>("a"), d.get<float>("b"), d.get<float>("out"), p.rows * p.number("repeat"),
               p.number("width"), p.number("repeat")},
              d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

std::unique_ptr<Kernel> move_rows_entry() {
  Entry e;
  e.record = {"move_rows",
              "copy",
              {{"move_rows_kernel", 256, 64, 0, 0, 0}},
              "rows of a multiple of 4 bytes that do not overlap; gather or scatter, with copies or without",
              "ceil(rows * row_bytes / (4 or 16) / 256) blocks of 256 threads",
              {{"ids", "I32", "[rows]", 4, "read"},
               {"from", "bytes", "[rows or more, row_bytes]", 4, "read"},
               {"to", "bytes", "[rows or more, row_bytes]", 4, "written where an id is not negative"},
               {"places", "I32", "[rows]", 4, "read, where there are copies"},
               {"copies", "bytes", "[rows or more, row_bytes]", 4, "written where id and place are not negative"}},
              "none",
              "a row depends on its id, its place and the row that the id names",
              "none: no sums",
              "none",
              "ids and places are not checked"};
  const auto shape = [](int64_t width, bool scatter, bool copies = false) {
    return Shape{(scatter ? "scatter " : "gather ") + std::to_string(4 * width) + " bytes" + (copies ? ", copies" : ""),
                 {{"width", width}, {"scatter", scatter}, {"copies", copies}, {"table", 400}}};
  };
  e.host_shapes = {shape(33, false), shape(64, false), shape(33, true), shape(33, false, true), shape(64, false, true)};
  e.make = [](const Shape& shape, Kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t table = p.number("table"), width = p.number("width");
    const bool scatter = p.number("scatter") != 0;
    Random random(seed, 1);
    auto* ids = p.add("ids", DType::I32, Role::In, true, {rows}).as<int32_t>();
    // Distinct places: 7 is prime to the table's size.
    const int64_t start = random.below(table);
    for (int64_t r = 0; r < rows; ++r) ids[r] = r % 9 == 5 ? -1 : static_cast<int32_t>((start + 7 * r) % table);
    const int64_t whole = scatter ? rows : table;
    add_filled(p, "from", scatter, {whole, width}, Kind::Normal, {}, random);
    p.add("to", DType::F32, Role::Out, !scatter, {scatter ? table : rows, width});
    if (p.number("copies") == 0) return p;
    auto* places = p.add("places", DType::I32, Role::In, true, {rows}).as<int32_t>();
    for (int64_t r = 0; r < rows; ++r) places[r] = r % 4 == 1 ? -1 : static_cast<int32_t>((start + 3 * r) % table);
    p.add("copies", DType::F32, Role::Out, false, {table, width});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    const int64_t width = given.number("width");
    const auto untouched = [](int64_t) { return Bounded{0, kUntouched}; };
    std::vector<Expectation> all{expect_elements(given["to"], untouched)};
    if (given.number("copies") != 0) all.push_back(expect_elements(given["copies"], untouched));
    for (int64_t r = 0; r < given.rows; ++r) {
      const int64_t id = given["ids"].as<int32_t>()[r];
      if (id < 0) continue;
      const int64_t from = given.number("scatter") != 0 ? r : id, at = given.number("scatter") != 0 ? id : r;
      const auto expect_row = [&](Expectation& out, int64_t row) {
        for (int64_t i = 0; i < width; ++i) {
          out.value[static_cast<size_t>(row * width + i)] = given["from"].at(from * width + i);
          out.bound[static_cast<size_t>(row * width + i)] = 0;
        }
      };
      expect_row(all[0], at);
      const int64_t place = all.size() > 1 ? given["places"].as<int32_t>()[r] : -1;
      if (place >= 0) expect_row(all[1], place);
    }
    return all;
  };
  e.domain = [](const Problem& p) { require_range("row bytes", 4 * p.number("width"), 4, INT64_MAX); };
  e.host = [](Problem& p) {
    const bool scatter = p.number("scatter") != 0;
    const size_t row = p["from"].row_bytes();
    for (int64_t r = 0; r < p.rows; ++r) {
      const int64_t id = p["ids"].as<int32_t>()[r];
      if (id < 0) continue;
      std::memcpy(p["to"].data() + static_cast<size_t>(scatter ? id : r) * row,
                  p["from"].data() + static_cast<size_t>(scatter ? r : id) * row, row);
      const int64_t place = p.number("copies") != 0 ? p["places"].as<int32_t>()[r] : -1;
      if (place >= 0)
        std::memcpy(p["copies"].data() + static_cast<size_t>(place) * row,
                    p["from"].data() + static_cast<size_t>(id) * row, row);
    }
  };
  e.exact_kinds = {Kind::Normal};
  e.refusals = {{"empty rows", set_number("width", 0)}};
  e.controls = {tamper_control("a negative id taken for 0", 2, [](Problem& p) {
    for (int64_t r = 0; r < p.rows; ++r) p["ids"].as<int32_t>()[r] = std::max(0, p["ids"].as<int32_t>()[r]);
  })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::MoveRowsParams move{d.get<int32_t>("ids"),   d.at("from"), d.at("to"), p.rows, 4 * p.number("width"),
                              p.number("scatter") != 0};
    if (p.number("copies") != 0) move.places = d.get<int32_t>("places"), move.copies = d.at("copies");
    cuda::move_rows(move, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

constexpr float kEps = 1e-6f;

enum class NormFault : uint8_t { None, NotCentred, WholeRow, WarpsDescending };

// The sum of squares as 256 threads of float4 make it.
float squares(const float* x, int64_t group, bool descending) {
  float thread[256] = {};
  for (int64_t q = 0; q < group / 4; ++q)
    for (int64_t i = 4 * q; i < 4 * q + 4; ++i) thread[q % 256] = std::fma(x[i], x[i], thread[q % 256]);
  float warps[8];
  for (int w = 0; w < 8; ++w) {
    float lane[32];
    std::copy_n(thread + 32 * w, 32, lane);
    for (int d = 16; d > 0; d /= 2)
      for (int l = 0; l < d; ++l) lane[l] += lane[l + d];
    warps[w] = lane[0];
  }
  if (descending) std::reverse(warps, warps + 8);
  float sum = warps[0];
  for (int w = 1; w < 8; ++w) sum += warps[w];
  return sum;
}

void norm_host(Problem& p, NormFault fault) {
  const int64_t group = p.number("group"), groups = p.number("groups"), width = group * groups;
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t g = 0; g < groups; ++g) {
      const float* x = p["x"].as<float>() + r * width + g * group;
      const bool descending = fault == NormFault::WarpsDescending && p.rows > 16;
      const float sum = squares(fault == NormFault::WholeRow ? p["x"].as<float>() + r * width : x, group, descending);
      const float scale = 1.0f / std::sqrt(sum / static_cast<float>(group) + kEps);
      for (int64_t i = 0; i < group; ++i) {
        const float w = p["weight"].as<float>()[g * group + i];
        p["out"].as<float>()[r * width + g * group + i] =
            x[i] * scale * (fault == NormFault::NotCentred ? w : 1.0f + w);
      }
    }
}

std::unique_ptr<Kernel> norm_entry() {
  Entry e;
  e.record = {
      "grouped_norm",
      "grouped_norm",
      {{"grouped_norm_kernel", 256, 128, 64, 0, 0}},
      "group a multiple of 4, any groups and rows",
      "rows * groups blocks of 256 threads",
      {{"x", "F32", "[rows, groups * group]", 16, "read"},
       {"weight", "F32", "[groups * group]", 16, "read"},
       {"out", "F32", "[rows, groups * group]", 16, "written"}},
      "out may be x",
      "a group of a row depends on itself",
      "squares: a thread of 256 adds every 256th float4 in one fma chain, butterfly of 32 lanes, warps ascending",
      "none",
      "squares beyond fp32 give 0"};
  const auto shape = [](int64_t group, int64_t groups) {
    return Shape{std::to_string(groups) + " groups of " + std::to_string(group),
                 {{"group", group}, {"groups", groups}}};
  };
  e.host_shapes = {shape(1156, 2), shape(20, 3)};
  e.more_device_shapes = {shape(2560, 4), shape(256, 1), shape(5000, 1)};
  e.bit_rows = 140;
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t width = p.number("group") * p.number("groups");
    add_filled(p, "x", true, {rows, width}, kind, {-30, 30}, Random(seed, 1));
    add_filled(p, "weight", false, {width}, Kind::Normal, {}, Random(seed, 2));
    p.add("out", DType::F32, Role::Out, true, {rows, width});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    const int64_t group = given.number("group"), width = group * given.number("groups");
    // Squares are not negative, so their sum errs relatively by its longest chain: the thread's, 5 of the butterfly, 7
    // of the warps; half of it after the root. Then mean, eps, root, division, two products and 1 + w.
    const double relative = gamma(0.5 * (4.0 * static_cast<double>((group / 4 + 255) / 256) + 12 + 2) + 6);
    std::vector<double> sums(static_cast<size_t>(given["x"].size() / group), 0.0);
    for (int64_t i = 0; i < given["x"].size(); ++i)
      sums[static_cast<size_t>(i / group)] += given["x"].at(i) * given["x"].at(i);
    return std::vector<Expectation>{expect_elements(given["out"], [&](int64_t i) {
      const double sum = sums[static_cast<size_t>(i / group)], x = given["x"].at(i);
      const double y = x / std::sqrt(sum / static_cast<double>(group) + kEps) * (1.0 + given["weight"].at(i % width));
      return Bounded{y, relative * std::abs(y) + 0x1p-140};
    })};
  };
  e.domain = [](const Problem& p) {
    require_range("group", p.number("group"), 4, INT32_MAX, 4);
    require_range("groups", p.number("groups"), 1, INT32_MAX);
  };
  e.host = [](Problem& p) { norm_host(p, NormFault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->grouped_norm(*backend->make_stream(), {p["weight"].view(), kEps}, p.number("group"), p["x"].view(),
                          p["out"].view());
  };
  e.exact_kinds = {Kind::Normal, Kind::Cancelling};
  e.refusals = {{"a group of 18", set_number("group", 18)},
                {"no groups", set_number("groups", 0)},
                {"x off by 4 bytes", misalign("x", 4)},
                {"weight off by 8 bytes", misalign("weight", 8)}};
  e.controls = {host_control("weight not centred", 2, [](Problem& p) { norm_host(p, NormFault::NotCentred); }),
                host_control("the first group's mean", 2, [](Problem& p) { norm_host(p, NormFault::WholeRow); }),
                host_control("warps in descending order above 16 rows", 3,
                             [](Problem& p) { norm_host(p, NormFault::WarpsDescending); })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::grouped_norm({d.get<float>("x"), d.get<float>("weight"), d.get<float>("out"), p.rows, p.number("groups"),
                        p.number("group"), kEps},
                       d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

std::unique_ptr<Kernel> inject_entry() {
  Entry e;
  e.record = {"hc_inject",
              "hc_inject",
              {{"hc_inject_kernel", 256, 64, 0, 0, 0}},
              "hidden a multiple of 4, any streams and rows",
              "ceil(rows * streams * hidden / 1024) blocks of 256 threads",
              {{"inj", "F32", "[rows, streams]", 4, "read"},
               {"y", "F32", "[rows, hidden]", 16, "read"},
               {"stack", "F32", "[rows, streams, hidden]", 16, "read and written"}},
              "none",
              "a row depends on itself",
              "one fma",
              "none",
              "none beyond fp32"};
  e.host_shapes = {{"4 streams of 68", {{"streams", 4}, {"hidden", 68}}}};
  e.more_device_shapes = {{"4 streams of 2560", {{"streams", 4}, {"hidden", 2560}}}};
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t streams = p.number("streams"), hidden = p.number("hidden");
    add_filled(p, "inj", true, {rows, streams}, Kind::Normal, {}, Random(seed, 1));
    add_filled(p, "y", true, {rows, hidden}, kind, {}, Random(seed, 2));
    Operand& stack = p.add("stack", DType::F32, Role::InOut, true, {rows, streams, hidden});
    fill(stack.as<float>(), rows, streams * hidden, kind == Kind::NonFinite ? Kind::Normal : kind, {}, Random(seed, 3));
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    const int64_t streams = given.number("streams"), hidden = given.number("hidden");
    return std::vector<Expectation>{expect_elements(given["stack"], [&](int64_t i) {
      const int64_t site = i / hidden;
      const double y =
          given["stack"].at(i) + given["inj"].at(site) * given["y"].at(site / streams * hidden + i % hidden);
      // The product is exact in fp64 and the sum nearly so: one rounding.
      return Bounded{y, kUnit * (1 + 0x1p-20) * std::abs(y) + 0x1p-148};
    })};
  };
  e.domain = [](const Problem& p) {
    require_range("hidden", p.number("hidden"), 4, INT32_MAX, 4);
    require_range("streams", p.number("streams"), 1, INT32_MAX);
  };
  const auto host = [](Problem& p, bool next_stream) {
    const int64_t streams = p.number("streams"), hidden = p.number("hidden");
    for (int64_t i = 0; i < p["stack"].size(); ++i) {
      const int64_t site = i / hidden, row = site / streams;
      const int64_t gate = next_stream ? row * streams + (site + 1) % streams : site;
      float& to = p["stack"].as<float>()[i];
      to = std::fma(p["inj"].as<float>()[gate], p["y"].as<float>()[row * hidden + i % hidden], to);
    }
  };
  e.host = [host](Problem& p) { host(p, false); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->hc_inject(*backend->make_stream(), {p["inj"].view(), p["y"].view()}, p["stack"].view());
  };
  e.exact_kinds = {Kind::Normal, Kind::Directed};
  e.refusals = {{"hidden of 70", set_number("hidden", 70)},
                {"no streams", set_number("streams", 0)},
                {"y off by 4 bytes", misalign("y", 4)},
                {"stack off by 8 bytes", misalign("stack", 8)}};
  e.controls = {host_control("gate of the next stream", 2, [host](Problem& p) { host(p, true); })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::hc_inject({d.get<float>("inj"), d.get<float>("y"), d.get<float>("stack"), p.rows, p.number("streams"),
                     p.number("hidden")},
                    d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace

void add_dense(KernelList& list) {
  list.push_back(embed_entry());
  list.push_back(add_entry());
  list.push_back(move_rows_entry());
  list.push_back(norm_entry());
  list.push_back(inject_entry());
}

}  // namespace fnx::contract
