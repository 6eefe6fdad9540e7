// Gated delta rule: convolution, recurrence, gated norm, as one operation with its state.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/contract/entry.h"
#include "kernels/contract/families.h"
#include "kernels/contract/lanes.h"
#include "kernels/cuda/gdn.h"
#include "kernels/ops.h"

namespace fnx::contract {

namespace {

constexpr int64_t kDim = 128;
constexpr float kEps = 1e-6f;
constexpr double kRootRoundings = 12;  // ten of the sum of squares, root and division

struct Sizes {
  int64_t key_heads, value_heads, taps, channels, values, trials, history, kept_rows;  // kept_rows: of a slot
  explicit Sizes(const Problem& p)
      : key_heads(p.number("key_heads")),
        value_heads(p.number("value_heads")),
        taps(p.number("taps")),
        channels((2 * key_heads + value_heads) * kDim),
        values(value_heads * kDim),
        trials(most_trials(p)),
        history(taps - 1),
        kept_rows(history + trials) {}
};

// A lane's rows one after another: those that its slot's last call tried and that stayed, then its own.
struct LaneRows {
  Lane lane;
  Trial trial;
  int64_t count() const { return int64_t{trial.kept} + lane.rows; }
  int64_t kept_for_good() const { return count() - trial.tried; }
  bool own(int64_t i) const { return i >= trial.kept; }
  int64_t row(int64_t i) const { return lane.first_row + i - trial.kept; }  // of the launch
  // What the convolution reads for row i: of the launch or of the slot's state, which begins `history` rows earlier.
  const float* qkv(const Problem& p, const Sizes& s, int64_t i) const {
    return own(i) ? p["qkv"].as<float>() + row(i) * s.channels
                  : p["conv_state"].as<float>() + (lane.slot * s.kept_rows + s.history + i) * s.channels;
  }
  // b or a of row i, all heads.
  const float* gate(const Problem& p, const Sizes& s, const char* name, int64_t i) const {
    const int64_t which = name[0] == 'b' ? 0 : 1;
    return own(i) ? p[name].as<float>() + row(i) * s.value_heads
                  : p["tried"].as<float>() + ((lane.slot * s.trials + i) * 2 + which) * s.value_heads;
  }
};

std::vector<LaneRows> lane_rows(const Problem& p) {
  const std::vector<Lane> lanes = lanes_of(p);
  const std::vector<Trial> trials = trials_of(p);
  std::vector<LaneRows> out;
  for (size_t i = 0; i < lanes.size(); ++i) out.push_back({lanes[i], trials[i]});
  return out;
}

Bounded silu_of(Bounded x) { return swiglu_reference(x, {1.0, 0.0}); }

// One row of a lane.
class RowReference {
 public:
  RowReference(const Problem& p, const Sizes& s, const LaneRows& rows, int64_t i) : p_(p), s_(s), rows_(rows), i_(i) {
    convolve();
  }

  // Takes the state [128 * 128] of a value head to after the row; fills the head's o [128].
  void head(int64_t h, Bounded* out, Bounded* state) const {
    const int64_t key_head = h / (s_.value_heads / s_.key_heads);
    const Bounded *q = &c_[static_cast<size_t>(key_head * kDim)], *k = q + s_.key_heads * kDim;
    const Bounded* v = &c_[static_cast<size_t>((2 * s_.key_heads + h) * kDim)];
    const double shifted = double{rows_.gate(p_, s_, "a", i_)[h]} + p_["dt_bias"].at(h);
    const double rate = std::exp(p_["a_log"].at(h));
    const double softplus = shifted > 0 ? shifted + std::log1p(std::exp(-shifted)) : std::log1p(std::exp(shifted));
    const double g = -rate * softplus, g_error = gamma(20) * std::abs(g) + rate * kUnit * std::abs(shifted);
    const Bounded decay{std::exp(g), std::exp(g) * (g_error * 1.01 + gamma(4)) + 0x1p-140};
    const Bounded beta = sigmoid_reference({rows_.gate(p_, s_, "b", i_)[h], 0});
    std::vector<Bounded> o(kDim);
    for (int64_t x = 0; x < kDim; ++x) {
      double m = 0, m_error = 0, size = 0;
      for (int64_t i = 0; i < kDim; ++i) {
        const Bounded faded = times(state[i * kDim + x], decay), term = times(faded, k[i]);
        state[i * kDim + x] = faded;
        m += term.value;
        m_error += term.error;
        size += std::abs(term.value) + term.error;
      }
      m_error += gamma(12) * size;
      const double difference = v[x].value - m;
      const Bounded d = times({difference, v[x].error + m_error + kUnit * std::abs(difference)}, beta);
      double sum = 0, sum_error = 0, sum_size = 0;
      for (int64_t i = 0; i < kDim; ++i) {
        Bounded& s = state[i * kDim + x];
        const Bounded step = times(k[i], d);
        s = {s.value + step.value, s.error + step.error};
        s.error += kUnit * std::abs(s.value) + 0x1p-149;
        const Bounded term = times(s, q[i]);
        sum += term.value;
        sum_error += term.error;
        sum_size += std::abs(term.value) + term.error;
      }
      o[static_cast<size_t>(x)] = {sum, sum_error + gamma(12) * sum_size};
    }
    if (!rows_.own(i_)) return;
    const Bounded scale = inverse_rms(o.data(), kDim, kDim, kEps, kRootRoundings);
    for (int64_t x = 0; x < kDim; ++x) {
      const Bounded z{p_["z"].at(rows_.row(i_) * s_.values + h * kDim + x), 0};
      const Bounded gate = p_.number("silu") != 0 ? silu_of(z) : sigmoid_reference(z);
      const Bounded normed = times(times(o[static_cast<size_t>(x)], scale), {p_["norm"].at(x), 0});
      out[x] = times(normed, gate);
      out[x].error = out[x].error * 1.01 + 0x1p-140;
    }
  }

 private:
  void convolve() {
    c_.resize(static_cast<size_t>(s_.channels));
    const float* taps = p_["conv"].as<float>();
    std::vector<const float*> seen;  // oldest first
    for (int64_t t = 0; t < s_.taps; ++t) seen.push_back(rows_.qkv(p_, s_, i_ - s_.history + t));
    for (int64_t ch = 0; ch < s_.channels; ++ch) {
      double sum = 0, size = 0;
      for (int64_t t = 0; t < s_.taps; ++t) {
        const double term = double{seen[static_cast<size_t>(t)][ch]} * taps[ch * s_.taps + t];
        sum += term;
        size += std::abs(term);
      }
      c_[static_cast<size_t>(ch)] = silu_of({sum, gamma(static_cast<double>(s_.taps)) * size});
    }
    const double query_scale = 1.0 / std::sqrt(static_cast<double>(kDim));
    for (int64_t h = 0; h < 2 * s_.key_heads; ++h) {
      Bounded* x = &c_[static_cast<size_t>(h * kDim)];
      Bounded scale = inverse_rms(x, kDim, 1.0, 1e-6, kRootRoundings);
      if (h < s_.key_heads) scale = times(scale, {query_scale, kUnit * query_scale});
      for (int64_t i = 0; i < kDim; ++i) x[i] = times(x[i], scale);
    }
  }

  const Problem& p_;
  const Sizes& s_;
  const LaneRows& rows_;
  int64_t i_;
  std::vector<Bounded> c_;
};

std::vector<Expectation> gdn_expect(const Problem& given, const Problem&) {
  const Sizes s(given);
  constexpr int64_t kState = kDim * kDim;
  Expectation out = expect_elements(given["out"], [](int64_t) { return Bounded{}; });
  Expectation delta = expect_unchanged(given["delta"]), history = expect_unchanged(given["conv_state"]);
  std::vector<Expectation> all;
  if (s.trials > 0) all.push_back(expect_unchanged(given["tried"]));
  std::vector<Bounded> values(kDim), state(kState);
  for (const LaneRows& rows : lane_rows(given)) {
    std::vector<RowReference> references;
    for (int64_t i = 0; i < rows.count(); ++i) references.emplace_back(given, s, rows, i);
    for (int64_t h = 0; h < s.value_heads; ++h) {
      const int64_t at = (rows.lane.slot * s.value_heads + h) * kState;
      for (int64_t i = 0; i < kState; ++i) state[static_cast<size_t>(i)] = {given["delta"].at(at + i), 0};
      for (int64_t i = 0; i < rows.count(); ++i) {
        references[static_cast<size_t>(i)].head(h, values.data(), state.data());
        if (rows.own(i)) out.put(rows.row(i) * s.values + h * kDim, values);
        if (i + 1 == rows.kept_for_good()) delta.put(at, state);
      }
    }
    for (int64_t t = 0; t < s.history + rows.trial.tried; ++t) {
      const float* from = rows.qkv(given, s, rows.kept_for_good() - s.history + t);
      std::copy_n(from, s.channels,
                  &history.value[static_cast<size_t>((rows.lane.slot * s.kept_rows + t) * s.channels)]);
    }
    for (int64_t t = 0; t < rows.trial.tried; ++t)
      for (const char* name : {"b", "a"})
        std::copy_n(
            rows.gate(given, s, name, rows.kept_for_good() + t), s.value_heads,
            &all[0]
                 .value[static_cast<size_t>(((rows.lane.slot * s.trials + t) * 2 + (name[0] == 'a')) * s.value_heads)]);
  }
  all.insert(all.end(), {out, delta, history});
  return all;
}

enum class Fault : uint8_t { None, NoDecay, NextKeyHead, NoBeta, KeysDescending, ForgetsKept, KeepsTried };

float softplus32(float x) { return x > 0 ? x + std::log1p(std::exp(-x)) : std::log1p(std::exp(x)); }
float silu32(float x) { return swiglu_value(x, 1.0f); }

// Values of `width` lanes added as a butterfly does.
float butterfly(float* lanes, int width) {
  for (int d = width / 2; d > 0; d /= 2)
    for (int l = 0; l < d; ++l) lanes[l] += lanes[l + d];
  return lanes[0];
}

float squares(const float* x) {
  float lanes[32] = {};
  for (int i = 0; i < kDim; ++i) lanes[i / 4] += x[i] * x[i];
  return butterfly(lanes, 32);
}

// One row of a lane, from `deltas` [value_heads, 128, 128].
void host_row(Problem& p, const Sizes& s, const LaneRows& rows, int64_t row, float* deltas, std::vector<float>& c,
              Fault fault) {
  const float* conv = p["conv"].as<float>();
  std::vector<const float*> seen;
  for (int64_t t = 0; t < s.taps; ++t) seen.push_back(rows.qkv(p, s, row - s.history + t));
  for (int64_t ch = 0; ch < s.channels; ++ch) {
    float sum = 0;
    for (int64_t t = 0; t < s.taps; ++t) sum += conv[ch * s.taps + t] * seen[static_cast<size_t>(t)][ch];
    c[static_cast<size_t>(ch)] = silu32(sum);
  }
  for (int64_t h = 0; h < 2 * s.key_heads; ++h) {
    float* x = &c[static_cast<size_t>(h * kDim)];
    float scale = 1.0f / std::sqrt(squares(x) + 1e-6f);
    if (h < s.key_heads) scale *= static_cast<float>(1.0 / std::sqrt(128.0));
    for (int i = 0; i < kDim; ++i) x[i] *= scale;
  }
  for (int64_t h = 0; h < s.value_heads; ++h) {
    int64_t key_head = h / (s.value_heads / s.key_heads);
    if (fault == Fault::NextKeyHead) key_head = (key_head + 1) % s.key_heads;
    const float *q = &c[static_cast<size_t>(key_head * kDim)], *k = q + s.key_heads * kDim;
    const float* v = &c[static_cast<size_t>((2 * s.key_heads + h) * kDim)];
    const float a = rows.gate(p, s, "a", row)[h] + p["dt_bias"].as<float>()[h];
    const float g = -std::exp(p["a_log"].as<float>()[h]) * softplus32(a);
    const float decay = fault == Fault::NoDecay ? 1.0f : std::exp(g);
    const float beta = fault == Fault::NoBeta ? 1.0f : sigmoid_value(rows.gate(p, s, "b", row)[h]);
    float *state = deltas + h * kDim * kDim, o[kDim];
    const bool descending = fault == Fault::KeysDescending && p.rows > kMostRowsAlone;
    // 16 lanes of 8 keys each, all 128 columns beside one another.
    float sums[16][kDim] = {}, d[kDim];
    for (int64_t j = 0; j < kDim; ++j) {
      const int64_t i = descending ? kDim - 1 - j : j;
      for (int64_t x = 0; x < kDim; ++x) {
        state[i * kDim + x] *= decay;
        sums[i / 8][x] += state[i * kDim + x] * k[i];
      }
    }
    const auto reduced = [&](int64_t x) {
      float lanes[16];
      for (int l = 0; l < 16; ++l) lanes[l] = sums[l][x];
      return butterfly(lanes, 16);
    };
    for (int64_t x = 0; x < kDim; ++x) d[x] = (v[x] - reduced(x)) * beta;
    std::memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < kDim; ++i)
      for (int64_t x = 0; x < kDim; ++x) {
        state[i * kDim + x] += k[i] * d[x];
        sums[i / 8][x] += state[i * kDim + x] * q[i];
      }
    if (!rows.own(row)) continue;
    for (int64_t x = 0; x < kDim; ++x) o[x] = reduced(x);
    const float scale = 1.0f / std::sqrt(squares(o) / 128.0f + kEps);
    for (int64_t x = 0; x < kDim; ++x) {
      const int64_t y = rows.row(row) * s.values + h * kDim + x;
      const float z = p["z"].as<float>()[y];
      p["out"].as<float>()[y] =
          p["norm"].as<float>()[x] * (o[x] * scale) * (p.number("silu") != 0 ? silu32(z) : sigmoid_value(z));
    }
  }
}

void gdn_host(Problem& p, Fault fault) {
  const Sizes s(p);
  const int64_t state = s.value_heads * kDim * kDim;
  std::vector<float> c(static_cast<size_t>(s.channels)), aside;
  for (LaneRows rows : lane_rows(p)) {
    if (fault == Fault::ForgetsKept) rows.trial.kept = 0;
    float* deltas = p["delta"].as<float>() + rows.lane.slot * state;
    for (int64_t i = 0; i < rows.count(); ++i) {
      if (i == rows.kept_for_good() && fault != Fault::KeepsTried) {
        aside.assign(deltas, deltas + state);
        deltas = aside.data();
      }
      host_row(p, s, rows, i, deltas, c, fault);
    }
    // A later row is read before an earlier one's place is overwritten.
    for (int64_t t = 0; t < s.history + rows.trial.tried; ++t)
      std::copy_n(rows.qkv(p, s, rows.kept_for_good() - s.history + t), s.channels,
                  p["conv_state"].as<float>() + (rows.lane.slot * s.kept_rows + t) * s.channels);
    for (int64_t t = 0; t < rows.trial.tried; ++t)
      for (const char* name : {"b", "a"})
        std::copy_n(rows.gate(p, s, name, rows.kept_for_good() + t), s.value_heads,
                    p["tried"].as<float>() + ((rows.lane.slot * s.trials + t) * 2 + (name[0] == 'a')) * s.value_heads);
  }
}

Problem gdn_make(const Shape& shape, Kind kind, int64_t rows, uint64_t seed) {
  Problem p{rows, shape.numbers, {}};
  const Sizes s(p);
  const int64_t slots = lane_slots(rows);
  const auto in = [&](const char* name, bool by_row, std::vector<int64_t> sizes, Kind k, Range range, uint64_t stream) {
    Operand& o = p.add(name, DType::F32, Role::In, by_row, std::move(sizes));
    fill(o.as<float>(), o.shape[0], o.size() / o.shape[0], k, range, Random(seed, stream));
  };
  in("qkv", true, {rows, s.channels}, kind, {-30, 6}, 1);
  in("z", true, {rows, s.values}, Kind::Normal, {}, 2);
  in("b", true, {rows, s.value_heads}, Kind::Normal, {}, 3);
  in("a", true, {rows, s.value_heads}, Kind::Normal, {}, 4);
  in("conv", false, {s.channels, s.taps}, Kind::Normal, {}, 5);
  in("a_log", false, {s.value_heads}, Kind::Normal, {}, 6);
  in("dt_bias", false, {s.value_heads}, Kind::Normal, {}, 7);
  in("norm", false, {kDim}, Kind::Normal, {}, 8);
  add_lanes(p, rows);
  Operand& history = p.add("conv_state", DType::F32, Role::InOut, false, {slots, s.kept_rows, s.channels});
  fill(history.as<float>(), 1, history.size(), Kind::Normal, {}, Random(seed, 9));
  Operand& delta = p.add("delta", DType::F32, Role::InOut, false, {slots, s.value_heads, kDim, kDim});
  fill(delta.as<float>(), 1, delta.size(), Kind::Normal, {}, Random(seed, 10));
  if (s.trials > 0) {
    Operand& tried = p.add("tried", DType::F32, Role::InOut, false, {slots, s.trials, 2, s.value_heads});
    fill(tried.as<float>(), 1, tried.size(), Kind::Normal, {}, Random(seed, 11));
  }
  p.add("out", DType::F32, Role::Out, true, {rows, s.values});
  return p;
}

void gdn_cpu(Problem& p) {
  const Sizes s(p);
  const auto backend = make_cpu_backend({1, 0});
  GdnWeights w{s.key_heads,
               s.value_heads,
               kDim,
               kDim,
               s.taps,
               p["conv"].view(),
               p["a_log"].view(),
               p["dt_bias"].view(),
               p["norm"].view(),
               kEps,
               p.number("silu") != 0 ? Gate::Silu : Gate::Sigmoid};
  const LaneBatch lanes(p);
  backend->gdn(*backend->make_stream(), w, lanes.batch, p["qkv"].view(), p["z"].view(), p["b"].view(), p["a"].view(),
               {p["conv_state"].view(), p["delta"].view(), s.trials > 0 ? p["tried"].view() : View{}}, p["out"].view());
}

}  // namespace

void add_gdn(KernelList& list) {
  Entry e;
  e.record = {
      "gdn",
      "gdn",
      {{"gdn_conv_kernel", 64, 128, 0, 0, 0},
       {"gdn_conv_prompt_kernel", 64, 128, 0, 0, 0},
       {"gdn_row_kernel", 128, 128, 4096, 0, 0},
       {"gdn_recurrence_kernel", 128, 255, 0, 0, 0},
       {"gdn_prompt_kernel", 128, 255, 48 * 1024, 0, 0},
       {"gdn_norm_kernel", 128, 64, 0, 0, 0}},
      "key and value dims 128, value heads a multiple of key heads, 2 to 8 taps, any lanes and rows",
      "convolution: a warp a head of a row or of eight; recurrence: blocks by 32 value columns of a head, or by 16 of "
      "up to three heads of a key head, and by lane, and by 128 channels of the state; one row a lane: both in blocks "
      "by 32 value columns of a head and by lane; norm: a warp a head of a row",
      {{"qkv", "F32", "[rows, (2 key_heads + value_heads) * 128]", 16, "read"},
       {"z", "F32", "[rows, value_heads * 128]", 16, "read"},
       {"b", "F32", "[rows, value_heads]", 4, "read"},
       {"a", "F32", "[rows, value_heads]", 4, "read"},
       {"conv", "F32", "[channels, taps]", 4, "read"},
       {"a_log", "F32", "[value_heads]", 4, "read"},
       {"dt_bias", "F32", "[value_heads]", 4, "read"},
       {"norm", "F32", "[128]", 16, "read"},
       {"lanes", "I32", "[lanes, 4]", 16, "read"},
       {"trials", "I32", "[lanes, 2]", 8, "read"},
       {"conv_state", "F32", "[slots, taps - 1 + trials, channels]", 16, "read and written"},
       {"delta", "F32", "[slots, value_heads, 128, 128]", 16, "read and written"},
       {"tried", "F32", "[slots, trials, 2, value_heads]", 4, "read and written"},
       {"out", "F32", "[rows, value_heads * 128]", 16, "written"}},
      "none",
      "a row depends on its sequence's state and its rows before, tried and kept or not",
      "convolution: one chain, oldest tap first; S^T k and S^T q: 16 lanes chain 8 keys ascending, then a butterfly",
      "none",
      "none beyond fp32"};
  const auto shape = [](int64_t key_heads, int64_t value_heads, int64_t taps, bool silu, int64_t trials = 0) {
    return Shape{
        std::to_string(key_heads) + " / " + std::to_string(value_heads) + " heads, " + std::to_string(taps) +
            " taps, " + (silu ? "silu" : "sigmoid") + ", " + std::to_string(trials) + " trials",
        {{"key_heads", key_heads}, {"value_heads", value_heads}, {"taps", taps}, {"silu", silu}, {"trials", trials}}};
  };
  e.host_shapes = {shape(2, 4, 4, false), shape(1, 1, 3, true), shape(1, 2, 4, false, 3)};
  e.more_device_shapes = {shape(16, 48, 4, false)};
  e.value_rows = 4;
  e.bit_rows = 140;
  e.make = gdn_make;
  e.expect = gdn_expect;
  e.domain = [](const Problem& p) {
    require_range("taps", p.number("taps"), 2, 8);
    require_range("trials", p.number("trials"), 0, INT32_MAX);
    require_range("key heads", p.number("key_heads"), 1, INT32_MAX);
    require_range("value heads", p.number("value_heads"), 1, INT32_MAX, p.number("key_heads"));
  };
  e.host = [](Problem& p) { gdn_host(p, Fault::None); };
  e.cpu = gdn_cpu;
  e.part = lanes_part;
  e.refusals = {{"9 taps", set_number("taps", 9)},
                {"1 tap", set_number("taps", 1)},
                {"-1 trials", set_number("trials", -1)},
                {"5 value heads of 2 key heads", set_number("value_heads", 5)}};
  const auto inside = [](const char* name, Fault fault) {
    return host_control(name, 2, [fault](Problem& p) { gdn_host(p, fault); });
  };
  e.controls = {
      inside("state not decayed", Fault::NoDecay),
      inside("key head of the next group", Fault::NextKeyHead),
      inside("beta left out", Fault::NoBeta),
      inside("kept rows left out", Fault::ForgetsKept),
      inside("tried rows in the state", Fault::KeepsTried),
      host_control("keys in descending order above 16 rows", 3, [](Problem& p) { gdn_host(p, Fault::KeysDescending); }),
      crossed_slots(),
      spoil_control("state not kept", 2,
                    [](const Problem& given, Problem& done) { done["delta"].storage = given["delta"].storage; })};
#ifdef FNX_HAS_CUDA
  e.enqueue = [](const Problem& p, DeviceProblem& d) {
    const Sizes s(p);
    cuda::GdnParams g;
    g.qkv = d.get<float>("qkv"), g.z = d.get<float>("z"), g.b = d.get<float>("b"), g.a = d.get<float>("a");
    g.out = d.get<float>("out");
    g.conv = d.get<float>("conv"), g.a_log = d.get<float>("a_log"), g.dt_bias = d.get<float>("dt_bias");
    g.norm = d.get<float>("norm"), g.eps = kEps, g.silu_gate = p.number("silu") != 0;
    g.conv_state = d.get<float>("conv_state"), g.delta = d.get<float>("delta");
    g.tried = s.trials > 0 ? d.get<float>("tried") : nullptr, g.trials = s.trials;
    g.lanes = device_lanes(p, d);
    g.rows = p.rows, g.key_heads = s.key_heads, g.value_heads = s.value_heads, g.taps = s.taps;
    const int64_t rows = p.rows + g.lanes.count * s.trials;
    g.convolved = d.scratch_of<float>("convolved", rows * s.channels);
    g.gates = d.scratch_of<float>("gates", rows * s.value_heads * 2);
    cuda::gdn(g, d.stream());
  };
#endif
  list.push_back(make_kernel(std::move(e)));
}

}  // namespace fnx::contract
