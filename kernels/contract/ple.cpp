// n-gram rows and the PLE site.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/lanes.h"
#include "kernels/cuda/ple.h"
#include "kernels/exl3.h"
#include "kernels/float16.h"

namespace fnx::contract {

namespace {

// State i of a ring of `dim` values of `bits`: bit m lies in the low bits of the value m / bits places before.
uint16_t ring_state(const uint16_t* ring, int64_t i, int64_t dim, int64_t bits) {
  uint32_t state = 0;
  for (int64_t m = 0; m < 16; ++m) {
    const int64_t bit = ((i - m / bits) % dim + dim) % dim * bits + m % bits;
    state |= ((ring[bit / 16] >> (bit % 16)) & 1u) << m;
  }
  return static_cast<uint16_t>(state);
}

void ngram_each(const Problem& p, exl3::Codebook codebook,
                const std::function<void(int64_t, float, float, float)>& fn) {
  const int64_t heads = p.number("heads"), dim = p.number("dim"), bits = p.number("bits"),
                stride = p["packed"].shape[2];
  for (int64_t site = 0; site < p.rows * heads; ++site) {
    const uint16_t* words = p["packed"].as<uint16_t>() + site * stride;
    for (int64_t d = 0; d < dim; ++d)
      fn(site * dim + d, f16_to_f32(exl3::decode_state(ring_state(words + 1, d, dim, bits), codebook)),
         f16_to_f32(words[0]), p["bias"].as<float>()[site % heads * dim + d]);
  }
}

std::unique_ptr<Kernel> ngram_entry() {
  Entry e;
  e.record = {"ngram_decode",
              "ngram_decode",
              {{"ngram_decode_kernel", 256, 64, 0, 0, 0}},
              "bits 1 to 8 with dim * bits a multiple of 16, or plain rows",
              "ceil(rows * heads * dim / 256) blocks of 256 threads",
              {{"packed", "I16", "[rows, heads, 1 + dim * bits / 16]", 2, "read"},
               {"bias", "F32", "[heads, dim]", 4, "read"},
               {"out", "F32", "[rows, heads * dim]", 4, "written"}},
              "none",
              "a row depends on its packed row",
              "one product, one addition",
              "none",
              "none beyond fp32"};
  const auto shape = [](int64_t bits, int64_t heads, int64_t dim) {
    return Shape{std::to_string(bits) + " bits, " + std::to_string(heads) + " heads of " + std::to_string(dim),
                 {{"bits", bits}, {"heads", heads}, {"dim", dim}}};
  };
  e.host_shapes = {shape(5, 4, 160), shape(6, 2, 160), shape(3, 1, 32)};
  e.more_device_shapes = {shape(5, 16, 160), shape(1, 2, 160), shape(8, 2, 160)};
  e.bit_rows = 140;
  e.make = [](const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
    Problem p{rows, shape.numbers, {}};
    const int64_t heads = p.number("heads"), dim = p.number("dim"), stride = 1 + dim * p.number("bits") / 16;
    Random random(seed, 1);
    auto* words = p.add("packed", DType::I16, Role::In, true, {rows, heads, stride}).as<uint16_t>();
    for (int64_t i = 0; i < rows * heads * stride; ++i)
      words[i] = i % stride == 0 ? f32_to_f16(static_cast<float>(random.normal()))
                                 : static_cast<uint16_t>(random.bits() >> 48);
    // Scales that are NaN stay in their rows.
    for (int64_t r = 1; kind == Kind::NonFinite && r < rows; r += 3) words[r * heads * stride] = 0x7E00;
    fill(p.add("bias", DType::F32, Role::In, false, {heads, dim}).as<float>(), 1, heads * dim, Kind::Normal, {},
         random);
    p.add("out", DType::F32, Role::Out, true, {rows, heads * dim});
    return p;
  };
  e.expect = [](const Problem& given, const Problem&) {
    Expectation out{"out", {}, {}};
    ngram_each(given, exl3::Codebook::Mul1, [&](int64_t, float value, float scale, float bias) {
      // The product of two fp16 numbers is exact in fp32: one rounding, fused or not.
      const double y = double{value} * scale + bias;
      out.push({y, kUnit * std::abs(y)});
    });
    return std::vector<Expectation>{out};
  };
  e.domain = [](const Problem& p) {
    require_range("bits", p.number("bits"), 1, 8);
    require_range("dim * bits", p.number("dim") * p.number("bits"), 16, INT32_MAX, 16);
  };
  const auto host = [](Problem& p, exl3::Codebook codebook) {
    float* out = p["out"].as<float>();
    ngram_each(p, codebook, [out](int64_t i, float value, float scale, float bias) { out[i] = value * scale + bias; });
  };
  e.host = [host](Problem& p) { host(p, exl3::Codebook::Mul1); };
  e.cpu = [](Problem& p) {
    const auto backend = make_cpu_backend({1, 0});
    backend->ngram_decode(*backend->make_stream(), static_cast<int>(p.number("bits")), p["packed"].view(),
                          p["bias"].view(), p["out"].view());
  };
  e.exact_kinds = {Kind::Normal};
  e.refusals = {{"9 bits", set_number("bits", 9)}, {"dim of 33 at 5 bits", set_number("dim", 33)}};
  e.controls = {host_control("wrong codebook", 2, [host](Problem& p) { host(p, exl3::Codebook::Mcg); }),
                tamper_control("bias of the next head", 2, [](Problem& p) {
                  Operand& b = p["bias"];
                  std::memmove(b.data(), b.data() + sizeof(float), b.bytes() - sizeof(float));
                })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    cuda::ngram_decode({d.at("packed"), DType::I16, d.get<float>("bias"), d.get<float>("out"), p.rows,
                        p.number("heads"), p.number("dim"), static_cast<int>(p.number("bits"))},
                       d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

// ---------------------------------------------------------------------------------------------------- PLE mix

constexpr float kEps = 1e-6f;

struct Sizes {
  int64_t n, hidden, wide, taps, dilation, history, trials, kept_rows;  // kept_rows: of a slot
  explicit Sizes(const Problem& p)
      : n(p.number("streams")),
        hidden(p.number("hidden")),
        wide(n * hidden),
        taps(p.number("taps")),
        dilation(p.number("dilation")),
        history((taps - 1) * dilation),
        trials(most_trials(p)),
        kept_rows(history + trials) {}
};

// RMS norm of one stream: half of what the sum of squares errs by its longest chain, mean, root, division; products.
std::vector<Bounded> normed(const std::vector<Bounded>& x, const Operand& weight, int64_t first) {
  const auto n = static_cast<double>(x.size());
  const Bounded scale = inverse_rms(x.data(), x.size(), n, kEps, 0.5 * (std::ceil(n / 256) + 14) + 3);
  std::vector<Bounded> out;
  for (size_t i = 0; i < x.size(); ++i) {
    const double w = 1.0 + weight.at(first + static_cast<int64_t>(i));
    out.push_back(times(times(x[i], scale), {w, kUnit * std::abs(w)}));
    out.back().error += 0x1p-140;
  }
  return out;
}

std::vector<Bounded> exact(const Operand& o, int64_t first, int64_t count) {
  std::vector<Bounded> out;
  for (int64_t i = first; i < first + count; ++i) out.push_back({o.at(i), 0});
  return out;
}

// The gated value w and its norm c of one row.
void ple_row(const Problem& p, const Sizes& s, int64_t r, std::vector<Bounded>& w, std::vector<Bounded>& c) {
  for (int64_t t = 0; t < s.n; ++t) {
    const int64_t first = t * s.hidden, at = r * s.wide + first;
    const auto k = normed(exact(p["key"], at, s.hidden), p["norm_key"], first);
    const auto q = normed(exact(p["stack"], at, s.hidden), p["norm_query"], first);
    double sum = 0, error = 0, size = 0;
    for (size_t i = 0; i < k.size(); ++i) {
      sum += k[i].value * q[i].value;
      error += k[i].error * (std::abs(q[i].value) + q[i].error) + std::abs(k[i].value) * q[i].error;
      size += std::abs(k[i].value * q[i].value);
    }
    const double n = static_cast<double>(s.hidden), raw = sum / std::sqrt(n);
    const double raw_error = (error + gamma(std::ceil(n / 256) + 16) * size) / std::sqrt(n) * 1.001;
    const auto root = [](double x) {
      const double v = std::sqrt(std::max(std::abs(x), 1e-6));
      return x > 0 ? v : x < 0 ? -v : x;
    };
    // The root is monotone, so its ends bound it; then its own roundings and the sigmoid's.
    const double g = root(raw), low = root(raw - raw_error), high = root(raw + raw_error);
    const double g_error = std::max(high - g, g - low) + gamma(4) * std::abs(g);
    const double gate = 1.0 / (1.0 + std::exp(-g)), gate_error = 0.25 * g_error + gamma(kSigmoidRoundings) * gate;
    std::vector<Bounded> stream;
    for (int64_t h = 0; h < s.hidden; ++h) {
      const double v = p["value"].at(r * s.hidden + h);
      stream.push_back({gate * v, gate_error * std::abs(v) + kUnit * std::abs(gate * v) + 0x1p-149});
    }
    const auto conv = normed(stream, p["norm_conv"], first);
    w.insert(w.end(), stream.begin(), stream.end());
    c.insert(c.end(), conv.begin(), conv.end());
  }
}

std::vector<Expectation> ple_expect(const Problem& given, const Problem&) {
  const Sizes s(given);
  Expectation stack = expect_unchanged(given["stack"]);
  Expectation state = expect_unchanged(given["state"]);
  const std::vector<Lane> lanes = lanes_of(given);
  const std::vector<Trial> trials = trials_of(given);
  for (size_t l = 0; l < lanes.size(); ++l) {
    const Lane& lane = lanes[l];
    const int64_t past = lane.slot * s.kept_rows * s.wide, old = s.history + trials[l].kept;
    std::vector<std::vector<Bounded>> c;
    // What the convolution reads of a channel at row i of the lane; negative: before it.
    const auto seen = [&](int64_t i, int64_t ch) {
      return i >= 0 ? c[static_cast<size_t>(i)][static_cast<size_t>(ch)]
                    : Bounded{given["state"].at(past + (old + i) * s.wide + ch), 0};
    };
    for (int64_t i = 0; i < lane.rows; ++i) {
      std::vector<Bounded> w;
      ple_row(given, s, lane.first_row + i, w, c.emplace_back());
      for (int64_t ch = 0; ch < s.wide; ++ch) {
        double sum = 0, error = 0, size = 0;
        for (int64_t t = 0; t < s.taps; ++t) {
          const double tap = given["conv"].at(ch * s.taps + t);
          const Bounded x = seen(i - (s.taps - 1 - t) * s.dilation, ch);
          sum += tap * x.value;
          error += std::abs(tap) * x.error;
          size += std::abs(tap) * (std::abs(x.value) + x.error);
        }
        const Bounded y = swiglu_reference({sum, error + gamma(static_cast<double>(s.taps)) * size}, {1, 0});
        const Bounded v = w[static_cast<size_t>(ch)];
        const auto at = static_cast<size_t>((lane.first_row + i) * s.wide + ch);
        const double value = stack.value[at] + (v.value + y.value);
        stack.bound[at] = v.error + y.error + 2 * kUnit * (std::abs(v.value + y.value) + std::abs(value)) + 0x1p-140;
        stack.value[at] = value;
      }
    }
    for (int64_t t = 0; t < s.history + trials[l].tried; ++t)
      for (int64_t ch = 0; ch < s.wide; ++ch) {
        const Bounded x = seen(lane.rows - trials[l].tried - s.history + t, ch);
        const auto to = static_cast<size_t>(past + t * s.wide + ch);
        state.value[to] = x.value, state.bound[to] = x.error;
      }
  }
  return {stack, state};
}

enum class Fault : uint8_t { None, NoDilation, NoConv, GateUnrooted, ForgetsKept, KeepsTried };

std::vector<float> norm32(const float* x, const float* weight, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
  const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + kEps);
  std::vector<float> out(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) out[static_cast<size_t>(i)] = x[i] * scale * (1.0f + weight[i]);
  return out;
}

void ple_host(Problem& p, Fault fault) {
  const Sizes s(p);
  std::vector<float> w(static_cast<size_t>(s.wide)), seen;  // rows of the convolution: before the lane's, then its own
  const std::vector<Lane> lanes = lanes_of(p);
  std::vector<Trial> trials = trials_of(p);
  for (size_t l = 0; l < lanes.size(); ++l) {
    const Lane& lane = lanes[l];
    if (fault == Fault::ForgetsKept) trials[l].kept = 0;
    const int64_t old = s.history + trials[l].kept, tried = fault == Fault::KeepsTried ? 0 : trials[l].tried;
    float* state = p["state"].as<float>() + lane.slot * s.kept_rows * s.wide;
    seen.assign(state, state + old * s.wide);
    for (int64_t i = 0; i < lane.rows; ++i) {
      const int64_t r = lane.first_row + i;
      float* stack = p["stack"].as<float>() + r * s.wide;
      seen.resize(static_cast<size_t>((old + i + 1) * s.wide));
      float* c = &seen[static_cast<size_t>((old + i) * s.wide)];
      for (int64_t t = 0; t < s.n; ++t) {
        const int64_t first = t * s.hidden;
        const auto k = norm32(p["key"].as<float>() + r * s.wide + first, p["norm_key"].as<float>() + first, s.hidden);
        const auto q = norm32(stack + first, p["norm_query"].as<float>() + first, s.hidden);
        float sum = 0;
        for (size_t i = 0; i < k.size(); ++i) sum += k[i] * q[i];
        const float raw = sum / std::sqrt(static_cast<float>(s.hidden));
        const float size = std::sqrt(std::max(std::abs(raw), 1e-6f));
        const float g = fault == Fault::GateUnrooted ? raw : raw > 0 ? size : raw < 0 ? -size : raw;
        const float gate = sigmoid_value(g);
        for (int64_t h = 0; h < s.hidden; ++h)
          w[static_cast<size_t>(first + h)] = gate * p["value"].as<float>()[r * s.hidden + h];
        const auto normed = norm32(&w[static_cast<size_t>(first)], p["norm_conv"].as<float>() + first, s.hidden);
        std::copy(normed.begin(), normed.end(), c + first);
      }
      for (int64_t ch = 0; ch < s.wide; ++ch) {
        float sum = 0;
        for (int64_t t = 0; t < s.taps; ++t) {
          const int64_t back = (s.taps - 1 - t) * (fault == Fault::NoDilation ? 1 : s.dilation);
          sum += p["conv"].as<float>()[ch * s.taps + t] * c[ch - back * s.wide];
        }
        const float y = fault == Fault::NoConv ? 0.0f : sum / (1.0f + std::exp(-sum));
        stack[ch] += w[static_cast<size_t>(ch)] + y;
      }
    }
    const auto first = static_cast<std::ptrdiff_t>((old + lane.rows - tried - s.history) * s.wide);
    std::copy_n(seen.begin() + first, (s.history + tried) * s.wide, state);
  }
}

Problem ple_make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
  Problem p{rows, shape.numbers, {}};
  const Sizes s(p);
  const auto in = [&](const char* name, bool by_row, std::vector<int64_t> sizes, Kind k, uint64_t stream) {
    Operand& o = p.add(name, DType::F32, Role::In, by_row, std::move(sizes));
    fill(o.as<float>(), o.shape[0], o.size() / o.shape[0], k, {-30, 10}, Random(seed, stream));
  };
  in("key", true, {rows, s.wide}, kind, 1);
  in("value", true, {rows, s.hidden}, kind == Kind::NonFinite ? Kind::Normal : kind, 2);
  in("norm_key", false, {s.wide}, Kind::Normal, 3);
  in("norm_query", false, {s.wide}, Kind::Normal, 4);
  in("norm_conv", false, {s.wide}, Kind::Normal, 5);
  in("conv", false, {s.wide, s.taps}, Kind::Normal, 6);
  add_lanes(p, rows);
  Operand& state = p.add("state", DType::F32, Role::InOut, false, {lane_slots(rows), s.kept_rows, s.wide});
  fill(state.as<float>(), 1, state.size(), Kind::Normal, {}, Random(seed, 7));
  Operand& stack = p.add("stack", DType::F32, Role::InOut, true, {rows, s.n, s.hidden});
  fill(stack.as<float>(), 1, stack.size(), Kind::Normal, {}, Random(seed, 8));
  return p;
}

std::unique_ptr<Kernel> ple_entry() {
  Entry e;
  e.record = {
      "ple_mix",
      "ple_mix",
      {{"ple_gate_kernel", 256, 64, 64, 0, 0},
       {"ple_conv_kernel", 256, 64, 0, 0, 0},
       {"ple_keep_kernel", 256, 64, 0, 0, 0}},
      "any streams and hidden; taps from 2, dilation from 1; any lanes and rows",
      "gates: a block of 256 a stream of a row; convolution: ceil(rows * wide / 256) blocks; state: by lane",
      {{"key", "F32", "[rows, streams * hidden]", 4, "read"},
       {"value", "F32", "[rows, hidden]", 4, "read"},
       {"norm_key", "F32", "[streams * hidden]", 4, "read"},
       {"norm_query", "F32", "[streams * hidden]", 4, "read"},
       {"norm_conv", "F32", "[streams * hidden]", 4, "read"},
       {"conv", "F32", "[streams * hidden, taps]", 4, "read"},
       {"lanes", "I32", "[lanes, 4]", 16, "read"},
       {"trials", "I32", "[lanes, 2]", 8, "read"},
       {"state", "F32", "[slots, (taps - 1) * dilation + trials, streams * hidden]", 4, "read and written"},
       {"stack", "F32", "[rows, streams, hidden]", 4, "read and written"}},
      "none",
      "a row depends on itself and its sequence's rows before, tried and kept or not",
      "sums over hidden: a thread of 256 adds every 256th in one fma chain, butterfly, warps ascending; convolution: "
      "one chain, oldest tap first",
      "none",
      "none beyond fp32"};
  const auto shape = [](int64_t streams, int64_t hidden, int64_t dilation, int64_t trials = 0) {
    return Shape{std::to_string(streams) + " streams of " + std::to_string(hidden) + ", dilation " +
                     std::to_string(dilation) + ", " + std::to_string(trials) + " trials",
                 {{"streams", streams}, {"hidden", hidden}, {"taps", 4}, {"dilation", dilation}, {"trials", trials}}};
  };
  e.host_shapes = {shape(2, 48, 3), shape(2, 20, 2, 3)};
  e.more_device_shapes = {shape(4, 2560, 3)};
  e.bit_rows = 140;
  e.make = ple_make;
  e.expect = ple_expect;
  e.domain = [](const Problem& p) {
    require_range("taps", p.number("taps"), 2, INT32_MAX);
    require_range("dilation", p.number("dilation"), 1, INT32_MAX);
    require_range("hidden", p.number("hidden"), 1, INT32_MAX);
  };
  e.host = [](Problem& p) { ple_host(p, Fault::None); };
  e.cpu = [](Problem& p) {
    const Sizes s(p);
    const auto backend = make_cpu_backend({1, 0});
    PleWeights w{{p["norm_key"].view(), kEps},
                 {p["norm_query"].view(), kEps},
                 {p["norm_conv"].view(), kEps},
                 p["conv"].view(),
                 s.taps,
                 s.dilation};
    const LaneBatch lanes(p);
    backend->ple_mix(*backend->make_stream(), w, lanes.batch, p["key"].view(), p["value"].view(), p["state"].view(),
                     p["stack"].view());
  };
  e.part = lanes_part;
  e.refusals = {{"1 tap", set_number("taps", 1)}, {"no dilation", set_number("dilation", 0)}};
  const auto inside = [](const char* name, Fault fault) {
    return host_control(name, 2, [fault](Problem& p) { ple_host(p, fault); });
  };
  e.controls = {inside("dilation left out", Fault::NoDilation),       inside("convolution left out", Fault::NoConv),
                inside("gate without its root", Fault::GateUnrooted), inside("kept rows left out", Fault::ForgetsKept),
                inside("tried rows in the state", Fault::KeepsTried), crossed_slots()};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    const Sizes s(p);
    cuda::PleMixParams m;
    m.norm_key = d.get<float>("norm_key"), m.norm_query = d.get<float>("norm_query");
    m.norm_conv = d.get<float>("norm_conv"), m.conv = d.get<float>("conv");
    m.key_eps = m.query_eps = m.conv_eps = kEps;
    m.key = d.get<float>("key"), m.value = d.get<float>("value");
    m.state = d.get<float>("state"), m.stack = d.get<float>("stack");
    m.lanes = device_lanes(p, d);
    m.rows = p.rows, m.streams = s.n, m.hidden = s.hidden, m.taps = s.taps, m.dilation = s.dilation;
    m.trials = s.trials;
    m.gate = d.scratch_of<float>("gate", p.rows * s.n);
    m.normed = d.scratch_of<float>("normed", p.rows * s.wide);
    cuda::ple_mix(m, d.stream());
  };
#endif
  return make_kernel(std::move(e));
}

}  // namespace

void add_ple(KernelList& list) {
  list.push_back(ngram_entry());
  list.push_back(ple_entry());
}

}  // namespace fnx::contract
