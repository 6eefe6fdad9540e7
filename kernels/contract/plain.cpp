// Plain linear layers and the HC mix that is made of them.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <tuple>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/cuda/norm_hc.h"
#include "kernels/float16.h"
#include "kernels/ops.h"

namespace fnx::contract {

namespace {

constexpr float kEps = 1e-6f;

bool tensor_path(DType dtype, int64_t in) { return dtype == DType::F16 && in % 8 == 0; }

// One output: sum_k w x. Tensor cores: x as hi + lo keeps 22 bits (2^-22 |x|) and is a multiple of 2^-24 below that
// (2^-25); two products an input, summed in fp32 in any grouping: gamma_(2 in). Otherwise an fma chain: gamma_in.
Bounded product(const Operand& w, int64_t row, const Bounded* x, int64_t in, bool tensor) {
  double sum = 0, size = 0, carried = 0, weights = 0;
  for (int64_t k = 0; k < in; ++k) {
    const double a = w.at(row * in + k);
    sum += a * x[k].value;
    size += std::abs(a) * (std::abs(x[k].value) + x[k].error);
    carried += std::abs(a) * x[k].error;
    weights += std::abs(a);
  }
  const double n = static_cast<double>(in);
  const double split = tensor ? 0x1p-22 * size + 0x1p-25 * weights : 0.0;
  return {sum, carried + split + gamma((tensor ? 2 : 1) * n + 40) * size + 0x1p-140};
}

// x as the tensor cores see it.
float split_product(float w, float x, float sum) {
  const float hi = f16_to_f32(f32_to_f16(x)), lo = f16_to_f32(f32_to_f16(x - hi));
  return sum + w * hi + w * lo;
}

float host_product(const Operand& w, int64_t row, const float* x, int64_t in, bool tensor, bool descending = false,
                   bool no_low_part = false) {
  float sum = 0;
  for (int64_t i = 0; i < in; ++i) {
    const int64_t k = descending ? in - 1 - i : i;
    const auto a = static_cast<float>(w.at(row * in + k));
    sum =
        tensor ? (no_low_part ? sum + a * f16_to_f32(f32_to_f16(x[k])) : split_product(a, x[k], sum)) : sum + a * x[k];
  }
  return sum;
}

void fill_weights(Operand& o, Random& random) {
  const double scale = 1.0 / std::sqrt(static_cast<double>(o.shape.back()));
  for (int64_t i = 0; i < o.size(); ++i) {
    const auto x = static_cast<float>(random.normal() * scale);
    if (o.dtype == DType::F32)
      o.as<float>()[i] = x;
    else
      o.as<uint16_t>()[i] = o.dtype == DType::F16 ? f32_to_f16(x) : f32_to_bf16(x);
  }
}

enum class PlainFault : uint8_t { None, Descending, NoLowPart, NoBias };

void plain_host(Problem& p, PlainFault fault) {
  const int64_t in = p.number("in"), out = p.number("out");
  const bool tensor = tensor_path(p["w"].dtype, in);
  for (int64_t r = 0; r < p.rows; ++r)
    for (int64_t n = 0; n < out; ++n) {
      const float y = host_product(p["w"], n, p["x"].as<float>() + r * in, in, tensor,
                                   fault == PlainFault::Descending && p.rows > 16, fault == PlainFault::NoLowPart);
      p["y"].as<float>()[r * out + n] = p.has("bias") && fault != PlainFault::NoBias ? y + p["bias"].as<float>()[n] : y;
    }
}

LinearSource plain_source(Operand& w, int64_t in, int64_t out) {
  LinearSource s;
  s.in = in;
  s.out = out;
  s.plain = w.data();
  s.plain_dtype = w.dtype;
  return s;
}

// y = W x + bias of every row.
Expectation plain_expect(const Problem& given, const char* weights, const char* bias, const char* y) {
  const Operand& w = given[weights];
  const int64_t out = w.shape[0], in = w.shape[1];
  const bool tensor = tensor_path(w.dtype, in);
  Expectation e{y, {}, {}};
  for (int64_t r = 0; r < given.rows; ++r) {
    const std::vector<Bounded> x = exact_row(given["x"], r);
    const bool finite = std::all_of(x.begin(), x.end(), [](const Bounded& b) { return std::isfinite(b.value); });
    for (int64_t n = 0; n < out; ++n) {
      Bounded b = product(w, n, x.data(), in, tensor);
      if (given.has(bias)) b.value += given[bias].at(n);
      b.error += kUnit * (std::abs(b.value) + b.error);
      // The low part of an inf is a NaN.
      if (tensor && !finite) b.value = std::nan("");
      e.push(b);
    }
  }
  return e;
}

std::unique_ptr<Kernel> plain_entry() {
  Entry e;
  e.record = {
      "plain_linear",
      "linear",
      {{"plain_few_kernel", 256, 255, 48 * 1024, 0, 0},
       {"plain_tile_kernel", 128, 255, 0, 96 * 1024, 0},
       {"plain_add_kernel", 128, 64, 0, 0, 0},
       {"plain_fma_kernel", 256, 128, 0, 0, 0}},
      "F16, BF16 or F32 weights, any in, out and rows",
      "tensor cores: tiles of 16 outputs by splits, or of 64 outputs by 128 rows by groups of splits; fma: a "
      "warp an output, four rows a block",
      {{"x", "F32", "[rows, in]", 16, "read"},
       {"w", "F16, BF16 or F32", "[out, in]", 16, "read"},
       {"bias", "F32", "[out] or none", 4, "read"},
       {"y", "F32", "[rows, out]", 4, "written"}},
      "none",
      "a row depends on that row of x",
      "tensor cores: slices of units of 32 inputs, eight slices ascending a split, splits ascending, then the bias; "
      "otherwise a chain a lane over every 32nd input and a butterfly",
      "tensor cores: x as a sum of two fp16 numbers",
      "|x| below 65504 on the tensor-core path"};
  const auto shape = [](int64_t in, int64_t out, DType dtype, bool bias) {
    return Shape{
        "[" + std::to_string(out) + ", " + std::to_string(in) + "] " + dtype_name(dtype) + (bias ? " bias" : ""),
        {{"in", in}, {"out", out}, {"dtype", static_cast<int64_t>(dtype)}, {"bias", bias}}};
  };
  // 512 inputs and more are several splits, which a launch of many rows adds up at its end.
  e.host_shapes = {shape(520, 19, DType::F16, true), shape(40, 16, DType::F16, false), shape(33, 5, DType::BF16, false),
                   shape(100, 7, DType::F32, true)};
  e.more_device_shapes = {shape(2560, 512, DType::F16, false), shape(10240, 320, DType::F16, false),
                          shape(2560, 48, DType::F16, false), shape(10240, 4, DType::F16, false)};
  e.bit_rows = 150;
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t in = p.number("in"), out = p.number("out");
    Random random(seed, 1);
    // Large, 1, -large in neighbouring inputs: in the fp16 range of hi and lo.
    fill(p.add("x", DType::F32, Role::In, true, {rows, in}).as<float>(), rows, in, kind, {-30, 14}, Random(seed, 2), 1);
    fill_weights(p.add("w", static_cast<DType>(p.number("dtype")), Role::In, false, {out, in}), random);
    if (p.number("bias") != 0)
      fill(p.add("bias", DType::F32, Role::In, false, {out}).as<float>(), 1, out, Kind::Normal, {}, random);
    p.add("y", DType::F32, Role::Out, true, {rows, out});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    return std::vector<Expectation>{plain_expect(given, "w", "bias", "y")};
  };
  e.domain = [](const Problem& p) {
    require_range("in", p.number("in"), 1, INT32_MAX);
    require_range("out", p.number("out"), 1, INT32_MAX);
    const auto dtype = static_cast<DType>(p.number("dtype"));
    if (dtype != DType::F16 && dtype != DType::BF16 && dtype != DType::F32)
      refuse("weights of " + std::to_string(dtype_size(dtype)) + "-byte " + dtype_name(dtype));
  };
  e.host = [](Problem& p) { plain_host(p, PlainFault::None); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, uint64_t{1} << 26});
    LinearSource source = plain_source(p["w"], p.number("in"), p.number("out"));
    if (p.has("bias")) source.bias.assign(p["bias"].as<float>(), p["bias"].as<float>() + p.number("out"));
    const auto weights = backend->load_linear(std::move(source));
    backend->linear(*backend->make_stream(), *weights, p["x"].view(), p["y"].view());
  };
  e.refusals = {{"no inputs", set_number("in", 0)},
                {"no outputs", set_number("out", 0)},
                {"I64 weights", set_number("dtype", static_cast<int64_t>(DType::I64))},
                {"x off by 4 bytes", misalign("x", 4)},
                {"w off by 2 bytes", misalign("w", 2)}};
  e.controls = {host_control("inputs in descending order above 16 rows", 3,
                             [](Problem& p) { plain_host(p, PlainFault::Descending); }),
                host_control("x rounded to fp16", 2, [](Problem& p) { plain_host(p, PlainFault::NoLowPart); }),
                host_control("bias left out", 2, [](Problem& p) { plain_host(p, PlainFault::NoBias); }),
                tamper_control("weights of the next output", 2, [](Problem& p) {
                  Operand& w = p["w"];
                  std::memmove(w.data(), w.data() + w.row_bytes(), w.bytes() - w.row_bytes());
                })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::PlainLinearParams l;
    l.weights = d.at("w"), l.dtype = static_cast<DType>(p.number("dtype")), l.bias = d.get<float>("bias");
    l.x = d.get<float>("x"), l.y = d.get<float>("y");
    l.rows = p.rows, l.in = p.number("in"), l.out = p.number("out");
    if (l.in > 0 && l.out > 0) {
      l.work.partials = d.scratch_of<float>("partials", cuda::plain_partials(p.rows, l.in, l.out));
      l.work.counters = static_cast<uint32_t*>(
          d.workspace("counters", static_cast<size_t>(cuda::plain_counters(l.in, l.out)) * sizeof(uint32_t)));
    }
    cuda::plain_linear(l, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

// ---------------------------------------------------------------------------------------------------- pairs

enum class PairFault : uint8_t { None, SecondDescending, FirstTwice };

void pair_host(Problem& p, PairFault fault) {
  const int64_t in = p.number("in");
  for (int64_t r = 0; r < p.rows; ++r)
    for (const bool second : {false, true}) {
      const Operand& w = p[second && fault != PairFault::FirstTwice ? "w_b" : "w_a"];
      const int64_t out = p.number(second ? "out_b" : "out_a");
      for (int64_t n = 0; n < out; ++n)
        p[second ? "y_b" : "y_a"].as<float>()[r * out + n] =
            host_product(w, n % w.shape[0], p["x"].as<float>() + r * in, in, true,
                         second && fault == PairFault::SecondDescending && p.rows > 16);
    }
}

std::unique_ptr<Kernel> pair_entry() {
  Entry e;
  e.record = {
      "plain_linear_pair",
      "linear",
      {{"plain_few_kernel", 256, 255, 48 * 1024, 0, 0},
       {"plain_tile_kernel", 128, 255, 0, 96 * 1024, 0},
       {"plain_add_kernel", 128, 64, 0, 0, 0}},
      "two F16 weights of one in, a multiple of 8, over the same rows",
      "as plain_linear on tensor cores, the second's tiles after the first's; may run beside the launch before it",
      {{"x", "F32", "[rows, in]", 16, "read"},
       {"w_a", "F16", "[out_a, in]", 16, "read"},
       {"w_b", "F16", "[out_b, in]", 16, "read"},
       {"y_a", "F32", "[rows, out_a]", 4, "written"},
       {"y_b", "F32", "[rows, out_b]", 4, "written"}},
      "none",
      "a row depends on that row of x",
      "as plain_linear, both by the plan of the first",
      "x as a sum of two fp16 numbers",
      "|x| below 65504"};
  const auto shape = [](int64_t in, int64_t out_a, int64_t out_b) {
    return Shape{"[" + std::to_string(out_a) + " and " + std::to_string(out_b) + ", " + std::to_string(in) + "]",
                 {{"in", in}, {"out_a", out_a}, {"out_b", out_b}}};
  };
  e.host_shapes = {shape(520, 19, 5), shape(40, 16, 16)};
  e.more_device_shapes = {shape(2560, 512, 1), shape(2560, 48, 48)};
  e.bit_rows = 150;
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t in = p.number("in");
    Random random(seed, 1);
    fill(p.add("x", DType::F32, Role::In, true, {rows, in}).as<float>(), rows, in, kind, {-30, 14}, Random(seed, 2), 1);
    for (const auto& [w, y, out] : {std::tuple{"w_a", "y_a", "out_a"}, {"w_b", "y_b", "out_b"}}) {
      fill_weights(p.add(w, DType::F16, Role::In, false, {p.number(out), in}), random);
      p.add(y, DType::F32, Role::Out, true, {rows, p.number(out)});
    }
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    return std::vector<Expectation>{plain_expect(given, "w_a", "", "y_a"), plain_expect(given, "w_b", "", "y_b")};
  };
  e.domain = [](const Problem& p) {
    require_range("in", p.number("in"), 8, INT32_MAX, 8);
    require_range("out_a", p.number("out_a"), 1, INT32_MAX);
    require_range("out_b", p.number("out_b"), 1, INT32_MAX);
  };
  e.host = [](Problem& p) { pair_host(p, PairFault::None); };
  e.refusals = {{"in of 260", set_number("in", 260)},
                {"no outputs of the first", set_number("out_a", 0)},
                {"no outputs of the second", set_number("out_b", 0)},
                {"x off by 4 bytes", misalign("x", 4)},
                {"the second's weights off by 2 bytes", misalign("w_b", 2)}};
  e.controls = {host_control("second in descending order above 16 rows", 3,
                             [](Problem& p) { pair_host(p, PairFault::SecondDescending); }),
                host_control("the first's weights twice", 2, [](Problem& p) { pair_host(p, PairFault::FirstTwice); })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::PlainLinearParams a;
    a.weights = d.at("w_a"), a.dtype = DType::F16, a.x = d.get<float>("x"), a.y = d.get<float>("y_a");
    a.rows = p.rows, a.in = p.number("in"), a.out = p.number("out_a");
    cuda::PlainLinearParams b = a;
    b.weights = d.at("w_b"), b.y = d.get<float>("y_b"), b.out = p.number("out_b");
    if (a.out > 0 && b.out > 0) {
      a.work.partials = d.scratch_of<float>("partials", cuda::plain_pair_partials(p.rows, a.in, a.out, b.out));
      const int64_t counters = cuda::plain_counters(a.in, a.out) + cuda::plain_counters(b.in, b.out);
      a.work.counters =
          static_cast<uint32_t*>(d.workspace("counters", static_cast<size_t>(counters) * sizeof(uint32_t)));
    }
    if (a.in % 8 == 0 && a.out > 0 && b.out > 0 && reinterpret_cast<uintptr_t>(a.x) % 16 == 0) {
      // A launch to run beside.
      cuda::PlainLinearParams before = a;
      before.y = d.scratch_of<float>("y before", p.rows * a.out);
      before.work.partials = d.scratch_of<float>("partials before", cuda::plain_partials(p.rows, a.in, a.out));
      before.work.counters = static_cast<uint32_t*>(
          d.workspace("counters before", static_cast<size_t>(cuda::plain_counters(a.in, a.out)) * sizeof(uint32_t)));
      cuda::plain_linear(before, d.stream());
      a.beside = true;
    }
    cuda::plain_linear_pair(a, b, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

// ---------------------------------------------------------------------------------------------------- HC mix

struct HcSizes {
  int64_t n, hidden, rank, wide;
  bool lacks;  // the stack is completed first
  explicit HcSizes(const Problem& p)
      : n(p.number("streams")),
        hidden(p.number("hidden")),
        rank(p.number("rank")),
        wide(n * hidden),
        lacks(p.number("lacks") != 0) {}
};

std::vector<Expectation> hc_expect(const Problem& given, const Problem&) {
  const HcSizes s(given);
  const auto n = static_cast<double>(s.n);
  // One rounding of a completed stack counts in the value and in the root.
  const double norm_error =
      gamma(0.5 * (4.0 * static_cast<double>((s.hidden / 4 + 255) / 256) + 14) + (s.lacks ? 8 : 6));
  Expectation stack{"stack", {}, {}}, u{"u", {}, {}}, inj{"inj", {}, {}};
  std::vector<double> x(static_cast<size_t>(s.wide));
  std::vector<Bounded> xn(static_cast<size_t>(s.wide)), low(static_cast<size_t>(s.rank));
  for (int64_t r = 0; r < given.rows; ++r) {
    for (int64_t i = 0; i < s.wide; ++i) {
      double& v = x[static_cast<size_t>(i)] = given["stack"].at(r * s.wide + i);
      if (!s.lacks) continue;
      v += given["lacking_inj"].at(r * s.n + i / s.hidden) * given["lacking_y"].at(r * s.hidden + i % s.hidden);
      stack.push({v, kUnit * (1 + 0x1p-20) * std::abs(v) + 0x1p-148});
    }
    for (int64_t t = 0; t < s.n; ++t) {
      double sum = 0;
      for (int64_t h = 0; h < s.hidden; ++h) sum += std::pow(x[static_cast<size_t>(t * s.hidden + h)], 2);
      for (int64_t h = 0; h < s.hidden; ++h) {
        const int64_t i = t * s.hidden + h;
        const double y = x[static_cast<size_t>(i)] / std::sqrt(sum / static_cast<double>(s.hidden) + kEps) *
                         (1.0 + given["norm"].at(i));
        xn[static_cast<size_t>(i)] = {y, norm_error * std::abs(y) + 0x1p-140};
      }
    }
    const auto mean = [&](Bounded b) { return Bounded{b.value / n, b.error / n + kUnit * std::abs(b.value / n)}; };
    for (int64_t i = 0; i < s.rank; ++i)
      low[static_cast<size_t>(i)] = swiglu_reference(mean(product(given["down"], i, xn.data(), s.wide, true)), {1, 0});
    for (int64_t h = 0; h < s.hidden; ++h) {
      double sum = 0, error = 0, size = 0;
      for (int64_t t = 0; t < s.n; ++t) {
        const int64_t i = t * s.hidden + h;
        const Bounded gate = sigmoid_reference(product(given["up"], i, low.data(), s.rank, true)),
                      x = xn[static_cast<size_t>(i)];
        const double term = gate.value * x.value;
        sum += term;
        error += gate.error * (std::abs(x.value) + x.error) + gate.value * x.error + kUnit * std::abs(term);
        size += std::abs(term);
      }
      u.push({sum / n, (error + gamma(n + 1) * size) / n + 0x1p-140});
    }
    for (int64_t t = 0; t < s.n; ++t) {
      const Bounded gate = sigmoid_reference(mean(product(given["inject"], t, xn.data(), s.wide, true)));
      inj.push({2 * gate.value, 2 * gate.error});
    }
  }
  if (s.lacks) return {stack, u, inj};
  return {u, inj};
}

enum class HcFault : uint8_t { None, NoDivision, NoSilu, NextStream, NotCompleted };

void hc_host(Problem& p, HcFault fault) {
  const HcSizes s(p);
  const auto n = fault == HcFault::NoDivision ? 1.0f : static_cast<float>(s.n);
  std::vector<float> xn(static_cast<size_t>(s.wide)), low(static_cast<size_t>(s.rank));
  for (int64_t r = 0; r < p.rows; ++r) {
    float* x = p["stack"].as<float>() + r * s.wide;
    for (int64_t i = 0; s.lacks && fault != HcFault::NotCompleted && i < s.wide; ++i)
      x[i] = std::fma(p["lacking_inj"].as<float>()[r * s.n + i / s.hidden],
                      p["lacking_y"].as<float>()[r * s.hidden + i % s.hidden], x[i]);
    for (int64_t t = 0; t < s.n; ++t) {
      float sum = 0;
      for (int64_t h = 0; h < s.hidden; ++h) sum += x[t * s.hidden + h] * x[t * s.hidden + h];
      const float scale = 1.0f / std::sqrt(sum / static_cast<float>(s.hidden) + kEps);
      for (int64_t i = t * s.hidden; i < (t + 1) * s.hidden; ++i)
        xn[static_cast<size_t>(i)] = x[i] * scale * (1.0f + p["norm"].as<float>()[i]);
    }
    for (int64_t i = 0; i < s.rank; ++i) {
      const float v = host_product(p["down"], i, xn.data(), s.wide, true) / n;
      low[static_cast<size_t>(i)] = fault == HcFault::NoSilu ? v : v / (1.0f + std::exp(-v));
    }
    for (int64_t h = 0; h < s.hidden; ++h) {
      float sum = 0;
      for (int64_t t = 0; t < s.n; ++t) {
        const int64_t i = t * s.hidden + h, gate = fault == HcFault::NextStream ? (i + s.hidden) % s.wide : i;
        sum += sigmoid_value(host_product(p["up"], gate, low.data(), s.rank, true)) * xn[static_cast<size_t>(i)];
      }
      p["u"].as<float>()[r * s.hidden + h] = sum / n;
    }
    for (int64_t t = 0; t < s.n; ++t)
      p["inj"].as<float>()[r * s.n + t] =
          2.0f * sigmoid_value(host_product(p["inject"], t, xn.data(), s.wide, true) / n);
  }
}

std::unique_ptr<Kernel> hc_entry() {
  Entry e;
  e.record = {
      "hc_mix",
      "hc_mix",
      {{"grouped_norm_kernel", 256, 128, 64, 0, 0},
       {"plain_few_kernel", 256, 255, 48 * 1024, 0, 0},
       {"plain_tile_kernel", 128, 255, 0, 96 * 1024, 0},
       {"plain_add_kernel", 128, 64, 0, 0, 0},
       {"hc_up_kernel", 256, 255, 0, 48 * 1024, 0},
       {"hc_up_tile_kernel", 128, 255, 0, 48 * 1024, 0},
       {"hc_down_row_kernel", 256, 80, 8 * 1024, 0, 0},
       {"hc_up_row_kernel", 256, 128, 8 * 1024, 0, 0}},
      "F16 weights, 2 to 8 streams, hidden a multiple of 16, rank a multiple of 8",
      "the norm's blocks; down and inject as plain_linear; up: blocks by 16 of hidden and by groups of rows, a warp "
      "a stream, or by 32 of hidden and by 64 rows; one row: blocks by 16 outputs and by split of down and inject with "
      "the norm, then blocks by 16 of "
      "hidden",
      {{"stack", "F32", "[rows, streams, hidden]", 16, "read; written where it is completed"},
       {"lacking_inj", "F32", "[rows, streams] or none", 4, "read"},
       {"lacking_y", "F32", "[rows, hidden] or none", 16, "read"},
       {"norm", "F32", "[streams * hidden]", 16, "read"},
       {"down", "F16", "[rank, streams * hidden]", 16, "read"},
       {"up", "F16", "[streams * hidden, rank]", 16, "read"},
       {"inject", "F16", "[streams, streams * hidden]", 16, "read"},
       {"u", "F32", "[rows, hidden]", 16, "written"},
       {"inj", "F32", "[rows, streams]", 4, "written"}},
      "none",
      "a row depends on that row of the stack and of what it lacks",
      "one fma completes the stack; norm as grouped_norm; down and inject as plain_linear; up one chain over the rank; "
      "streams ascending",
      "inputs of the three products as sums of two fp16 numbers",
      "normed and low values below 65504"};
  const auto shape = [](int64_t hidden, int64_t rank, bool lacks) {
    return Shape{"4 streams of " + std::to_string(hidden) + ", rank " + std::to_string(rank) +
                     (lacks ? ", to be completed" : ""),
                 {{"streams", 4}, {"hidden", hidden}, {"rank", rank}, {"lacks", lacks}}};
  };
  e.host_shapes = {shape(48, 16, false), shape(144, 32, true)};
  e.more_device_shapes = {shape(2560, 320, false), shape(2560, 320, true), shape(4112, 16, true)};
  e.bit_rows = 140;
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const HcSizes s(p);
    Random random(seed, 1);
    fill(p.add("stack", DType::F32, s.lacks ? Role::InOut : Role::In, true, {rows, s.n, s.hidden}).as<float>(), rows,
         s.wide, kind, {-30, 20}, Random(seed, 2));
    if (s.lacks) {
      fill(p.add("lacking_inj", DType::F32, Role::In, true, {rows, s.n}).as<float>(), rows, s.n, Kind::Normal, {},
           Random(seed, 3));
      fill(p.add("lacking_y", DType::F32, Role::In, true, {rows, s.hidden}).as<float>(), rows, s.hidden, Kind::Normal,
           {}, Random(seed, 4));
    }
    fill(p.add("norm", DType::F32, Role::In, false, {s.wide}).as<float>(), 1, s.wide, Kind::Normal, {}, random);
    fill_weights(p.add("down", DType::F16, Role::In, false, {s.rank, s.wide}), random);
    fill_weights(p.add("up", DType::F16, Role::In, false, {s.wide, s.rank}), random);
    fill_weights(p.add("inject", DType::F16, Role::In, false, {s.n, s.wide}), random);
    p.add("u", DType::F32, Role::Out, true, {rows, s.hidden});
    p.add("inj", DType::F32, Role::Out, true, {rows, s.n});
    return p;
  };
  e.expect = hc_expect;
  e.domain = [](const Problem& p) {
    require_range("streams", p.number("streams"), 2, 8);
    require_range("hidden", p.number("hidden"), 16, INT32_MAX, 16);
    require_range("rank", p.number("rank"), 8, INT32_MAX, 8);
  };
  e.host = [](Problem& p) { hc_host(p, HcFault::None); };
  e.cpu = [](Problem& p) {
    const HcSizes s(p);
    const auto backend = make_cpu_backend({1, uint64_t{1} << 26});
    const auto down = backend->load_linear(plain_source(p["down"], s.wide, s.rank));
    const auto up = backend->load_linear(plain_source(p["up"], s.rank, s.wide));
    const auto inject = backend->load_linear(plain_source(p["inject"], s.wide, s.n));
    backend->hc_mix(*backend->make_stream(), {{p["norm"].view(), kEps}, down.get(), up.get(), inject.get()},
                    s.lacks ? Injection{p["lacking_inj"].view(), p["lacking_y"].view()} : Injection{},
                    p["stack"].view(), p["u"].view(), p["inj"].view());
  };
  e.refusals = {{"9 streams", set_number("streams", 9)},
                {"hidden of 40", set_number("hidden", 40)},
                {"rank of 12", set_number("rank", 12)},
                {"stack off by 4 bytes", misalign("stack", 4)}};
  const auto inside = [](const char* name, HcFault fault) {
    return host_control(name, 2, [fault](Problem& p) { hc_host(p, fault); });
  };
  e.controls = {inside("stack not completed", HcFault::NotCompleted),
                inside("sums not divided by n", HcFault::NoDivision), inside("silu left out", HcFault::NoSilu),
                inside("gate of the next stream", HcFault::NextStream)};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    const HcSizes s(p);
    cuda::HcMixParams h;
    h.stack = d.get<float>("stack"), h.norm_weight = d.get<float>("norm"), h.eps = kEps;
    h.down = d.at("down"), h.up = d.at("up"), h.inject = d.at("inject");
    if (s.lacks) h.lacking_inj = d.get<float>("lacking_inj"), h.lacking_y = d.get<float>("lacking_y");
    h.u = d.get<float>("u"), h.inj = d.get<float>("inj");
    h.rows = p.rows, h.streams = s.n, h.hidden = s.hidden, h.rank = s.rank;
    const auto floats = [&](const char* name, int64_t count) { return d.scratch_of<float>(name, count); };
    h.normed = floats("normed", p.rows * s.wide);
    h.low = floats("low", p.rows * s.rank);
    h.work.partials = floats("partials", cuda::hc_partials(p.rows, s.n, s.hidden, s.rank));
    h.work.counters = static_cast<uint32_t*>(
        d.workspace("counters", static_cast<size_t>(cuda::hc_counters(s.n, s.hidden, s.rank)) * sizeof(uint32_t)));
    cuda::hc_mix(h, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace

void add_plain(KernelList& list) {
  list.push_back(plain_entry());
  list.push_back(pair_entry());
  list.push_back(hc_entry());
}

}  // namespace fnx::contract
