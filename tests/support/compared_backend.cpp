#include "tests/support/compared_backend.h"

#include <cmath>
#include <cstring>

#include "kernels/float16.h"

namespace fnx::test {

namespace {

struct TwoLinears : Linear {
  std::unique_ptr<Linear> device, cpu;
};
struct TwoBanks : ExpertBank {
  std::unique_ptr<ExpertBank> device, cpu;
};

double distance(const View& got, const View& want) {
  double error = 0, size = 0;
  for (int64_t i = 0; i < want.size(); ++i) {
    if (want.dtype == DType::I32) {
      error += got.as<int32_t>()[i] != want.as<int32_t>()[i], size += 1;
      continue;
    }
    const auto value = [&](const View& v) {
      return double{v.dtype == DType::BF16 ? bf16_to_f32(v.as<uint16_t>()[i]) : v.as<float>()[i]};
    };
    error += (value(got) - value(want)) * (value(got) - value(want)), size += value(want) * value(want);
  }
  if (want.dtype == DType::I32) return size == 0 ? 0 : error / size;
  return error == 0 ? 0 : std::sqrt(error / size);
}

class Compared : public ComparedBackend {
 public:
  Compared(Backend& device, Backend& cpu) : device_(device), cpu_(cpu), cpu_stream_(cpu.make_stream()) {}

  std::vector<ComparedOperation>& operations() override { return operations_; }
  std::string_view name() const override { return device_.name(); }
  DType kv_dtype() const override { return device_.kv_dtype(); }
  std::unique_ptr<Stream> make_stream() override { return device_.make_stream(); }
  std::unique_ptr<Event> make_event() override { return device_.make_event(); }
  std::unique_ptr<Event> make_timed_event() override { return device_.make_timed_event(); }
  double elapsed_ns(Event& from, Event& to) override { return device_.elapsed_ns(from, to); }
  void record(Stream& s, Event& e) override { device_.record(s, e); }
  void wait(Stream& s, Event& e) override { device_.wait(s, e); }
  Buffer allocate(size_t bytes, Space space) override { return device_.allocate(bytes, space); }
  uint64_t device_bytes() const override { return device_.device_bytes(); }
  void reserve(Stream& s, const std::function<void()>& calls) override {
    measuring_ = true;
    device_.reserve(s, calls);
    measuring_ = false;
  }
  std::unique_ptr<Graph> capture(Stream&, const std::function<void()>&) override { return nullptr; }
  std::unique_ptr<Linear> load_linear(LinearSource source) override {
    auto two = std::make_unique<TwoLinears>();
    two->in = source.in, two->out = source.out;
    two->device = device_.load_linear(source), two->cpu = cpu_.load_linear(source);
    return two;
  }
  std::unique_ptr<ExpertBank> load_experts(std::vector<ExpertSource> experts, int64_t pooled) override {
    auto two = std::make_unique<TwoBanks>();
    two->device = device_.load_experts(experts, pooled), two->cpu = cpu_.load_experts(experts, 0);
    return two;
  }
  void copy(Stream& s, View dst, View src) override { device_.copy(s, dst, src); }
  void clear(Stream& s, View dst) override { device_.clear(s, dst); }

  void gather(Stream& s, View ids, View from, View to, const RowCopies& copies) override {
    std::vector<View> outputs{to};
    if (copies) outputs.push_back(copies.to);
    run(
        s, "gather", [&] { device_.gather(s, ids, from, to, copies); }, outputs,
        [&] {
          const RowCopies theirs = copies ? RowCopies{host(copies.places), host(copies.to)} : RowCopies{};
          cpu_.gather(*cpu_stream_, host(ids), host(from), host(to), theirs);
        });
  }
  void embed(Stream& s, View tokens, View table, View out) override {
    run(
        s, "embed", [&] { device_.embed(s, tokens, table, out); }, {out},
        [&] { cpu_.embed(*cpu_stream_, host(tokens), host(table), host(out)); });
  }
  void grouped_norm(Stream& s, const NormWeights& w, int64_t group, View x, View out) override {
    run(
        s, "grouped_norm", [&] { device_.grouped_norm(s, w, group, x, out); }, {out},
        [&] { cpu_.grouped_norm(*cpu_stream_, host(w), group, host(x), host(out)); });
  }
  void linear(Stream& s, const Linear& l, View x, View y) override {
    const auto& two = static_cast<const TwoLinears&>(l);
    run(
        s, "linear [" + std::to_string(l.out) + ", " + std::to_string(l.in) + "] x " + std::to_string(x.shape[0]),
        [&] { device_.linear(s, *two.device, x, y); }, {y},
        [&] { cpu_.linear(*cpu_stream_, *two.cpu, host(x), host(y)); });
  }
  void linears(Stream& s, std::span<const Linear* const> list, View x, std::span<const View> y) override {
    std::vector<const Linear*> device, cpu;
    for (const Linear* l : list) {
      device.push_back(static_cast<const TwoLinears*>(l)->device.get());
      cpu.push_back(static_cast<const TwoLinears*>(l)->cpu.get());
    }
    run(
        s, "linears", [&] { device_.linears(s, device, x, y); }, {y.begin(), y.end()},
        [&] {
          std::vector<View> there;
          for (const View& v : y) there.push_back(host(v));
          cpu_.linears(*cpu_stream_, cpu, host(x), there);
        });
  }
  void add(Stream& s, int64_t repeat, View a, View b, View out) override {
    run(
        s, "add", [&] { device_.add(s, repeat, a, b, out); }, {out},
        [&] { cpu_.add(*cpu_stream_, repeat, host(a), host(b), host(out)); });
  }
  void hc_mix(Stream& s, const HcWeights& w, const Injection& lacking, View stack, View u, View inj) override {
    const auto part = [](const Linear* l, bool cpu) {
      const auto* two = static_cast<const TwoLinears*>(l);
      return two == nullptr ? nullptr : cpu ? two->cpu.get() : two->device.get();
    };
    const HcWeights here{w.norm, part(w.down, false), part(w.up, false), part(w.inject, false)};
    std::vector<View> out{u};
    if (w.inject != nullptr) out.push_back(inj);
    if (lacking) out.push_back(stack);
    run(
        s, "hc_mix", [&] { device_.hc_mix(s, here, lacking, stack, u, inj); }, out,
        [&] {
          const HcWeights there{host(w.norm), part(w.down, true), part(w.up, true), part(w.inject, true)};
          cpu_.hc_mix(*cpu_stream_, there, host(lacking), host(stack), host(u), w.inject != nullptr ? host(inj) : inj);
        });
  }
  void hc_inject(Stream& s, const Injection& lacking, View stack) override {
    run(
        s, "hc_inject", [&] { device_.hc_inject(s, lacking, stack); }, {stack},
        [&] { cpu_.hc_inject(*cpu_stream_, host(lacking), host(stack)); });
  }
  void gdn(Stream& s, const GdnWeights& w, const Batch& batch, View qkv, View z, View b, View a, const GdnState& state,
           View out) override {
    run(
        s, "gdn", [&] { device_.gdn(s, w, batch, qkv, z, b, a, state, out); }, {out, state.conv, state.delta},
        [&] {
          GdnWeights there = w;
          for (View* v : {&there.conv, &there.a_log, &there.dt_bias, &there.norm}) *v = host(*v);
          cpu_.gdn(*cpu_stream_, there, host(batch), host(qkv), host(z), host(b), host(a),
                   {host(state.conv), host(state.delta), host(state.tried)}, host(out));
        });
  }
  void qsa_write(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& r, const KvCache& kv) override {
    run(
        s, "qsa_write", [&] { device_.qsa_write(s, w, batch, r, kv); },
        {r.query_gate, r.key, r.index, kv.keys, kv.values, kv.index_keys, kv.raw_keys},
        [&] { cpu_.qsa_write(*cpu_stream_, host(w), host(batch), host(r), host(kv)); });
  }
  void qsa_select(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& r, const KvCache& kv) override {
    run(
        s, "qsa_select", [&] { device_.qsa_select(s, w, batch, r, kv); }, {r.selected},
        [&] { cpu_.qsa_select(*cpu_stream_, host(w), host(batch), host(r), host(kv)); });
  }
  void qsa_attend(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& r, const KvCache& kv,
                  View out) override {
    run(
        s, "qsa_attend", [&] { device_.qsa_attend(s, w, batch, r, kv, out); }, {out},
        [&] { cpu_.qsa_attend(*cpu_stream_, host(w), host(batch), host(r), host(kv), host(out)); });
  }
  void router(Stream& s, bool normalise, View logits, View ids, View weights) override {
    run(
        s, "router", [&] { device_.router(s, normalise, logits, ids, weights); }, {ids, weights},
        [&] { cpu_.router(*cpu_stream_, normalise, host(logits), host(ids), host(weights)); });
  }
  void fill(Stream& s, ExpertBank& bank, int32_t expert, View line) override {
    device_.fill(s, *static_cast<TwoBanks&>(bank).device, expert, line);
  }
  void serve(Stream& s, ExpertBank& bank, std::span<const ServedExpert> served) override {
    device_.serve(s, *static_cast<TwoBanks&>(bank).device, served);
  }
  void plan_experts(Stream& s, ExpertBank& bank, const PoolOptions& options, int64_t k, View ids, View state,
                    View lines, const Foreseen& foreseen) override {
    device_.plan_experts(s, *static_cast<TwoBanks&>(bank).device, options, k, ids, state, lines, foreseen);
  }
  void fill_planned(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                    const Foreseen& foreseen) override {
    device_.fill_planned(s, *static_cast<TwoBanks&>(bank).device, options, state, lines, foreseen);
  }
  void settle_planned(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                      const Foreseen& foreseen) override {
    device_.settle_planned(s, *static_cast<TwoBanks&>(bank).device, options, state, lines, foreseen);
  }
  void fill_foreseen(Stream& s, ExpertBank& bank, const PoolOptions& options, View state,
                     const Foreseen& foreseen) override {
    device_.fill_foreseen(s, *static_cast<TwoBanks&>(bank).device, options, state, foreseen);
  }
  void check_served(Stream& s, const ExpertBank& bank) override {
    device_.check_served(s, *static_cast<const TwoBanks&>(bank).device);
  }
  void experts(Stream& s, const ExpertBank& bank, View x, View ids, View slots) override {
    const auto& two = static_cast<const TwoBanks&>(bank);
    run(
        s, "experts x " + std::to_string(x.shape[0]), [&] { device_.experts(s, *two.device, x, ids, slots); }, {slots},
        [&] { cpu_.experts(*cpu_stream_, *two.cpu, host(x), host(ids), host(slots)); });
  }
  void take_slots(Stream& s, int64_t per_part, View ids, View parts, View slots) override {
    run(
        s, "take_slots", [&] { device_.take_slots(s, per_part, ids, parts, slots); }, {slots},
        [&] { cpu_.take_slots(*cpu_stream_, per_part, host(ids), host(parts), host(slots)); });
  }
  void join_columns(Stream& s, std::span<const View> parts, View out) override {
    run(
        s, "join_columns", [&] { device_.join_columns(s, parts, out); }, {out},
        [&] {
          std::vector<View> there;
          for (const View& v : parts) there.push_back(host(v));
          cpu_.join_columns(*cpu_stream_, there, host(out));
        });
  }
  void swiglu(Stream& s, View gate, View up, View out) override {
    run(
        s, "swiglu", [&] { device_.swiglu(s, gate, up, out); }, {out},
        [&] { cpu_.swiglu(*cpu_stream_, host(gate), host(up), host(out)); });
  }
  void combine(Stream& s, View slots, View weights, View shared, View gate, View y) override {
    run(
        s, "combine", [&] { device_.combine(s, slots, weights, shared, gate, y); }, {y},
        [&] {
          cpu_.combine(*cpu_stream_, host(slots), host(weights), shared ? host(shared) : shared, host(gate), host(y));
        });
  }
  void ngram_decode(Stream& s, int bits, View packed, View bias, View out) override {
    run(
        s, "ngram_decode", [&] { device_.ngram_decode(s, bits, packed, bias, out); }, {out},
        [&] { cpu_.ngram_decode(*cpu_stream_, bits, host(packed), bias ? host(bias) : bias, host(out)); });
  }
  void ple_mix(Stream& s, const PleWeights& w, const Batch& batch, View key, View value, View state,
               View stack) override {
    run(
        s, "ple_mix", [&] { device_.ple_mix(s, w, batch, key, value, state, stack); }, {stack, state},
        [&] {
          PleWeights there = w;
          there.norm_key = host(w.norm_key), there.norm_query = host(w.norm_query), there.norm_conv = host(w.norm_conv);
          there.conv = host(w.conv);
          cpu_.ple_mix(*cpu_stream_, there, host(batch), host(key), host(value), host(state), host(stack));
        });
  }
  void sample(Stream& s, int64_t valid, bool greedy, View params, View logits, View ids) override {
    run(
        s, "sample", [&] { device_.sample(s, valid, greedy, params, logits, ids); }, {ids},
        [&] { cpu_.sample(*cpu_stream_, valid, greedy, host(params), host(logits), host(ids)); });
  }

 private:
  // The cpu backend runs first, on copies of everything; an array that two views name is copied once.
  void run(Stream& s, const std::string& name, const std::function<void()>& device, const std::vector<View>& outputs,
           const std::function<void()>& cpu) {
    if (measuring_) return device();
    copies_.clear();
    stream_ = &s;
    cpu();
    device();
    double worst = 0;
    for (const View& v : outputs) {
      std::vector<std::byte> bytes(v.bytes());
      View got = v;
      got.data = bytes.data(), got.space = Space::Host;
      device_.copy(s, got, v);
      s.synchronize();
      const double d = distance(got, host(v));
      if (!(d <= worst)) worst = d;
    }
    operations_.push_back({name, static_cast<int64_t>(operations_.size()), worst});
  }
  View host(const View& v) {
    if (!v) return v;
    for (const auto& [data, bytes] : copies_)
      if (data == v.data) {
        View h = v;
        h.data = const_cast<std::byte*>(bytes.data()), h.space = Space::Host;
        return h;
      }
    copies_.emplace_back(v.data, std::vector<std::byte>(v.bytes()));
    View h = v;
    h.data = copies_.back().second.data(), h.space = Space::Host;
    device_.copy(*stream_, h, v);
    stream_->synchronize();
    return h;
  }
  Injection host(const Injection& i) { return i ? Injection{host(i.inj), host(i.y)} : i; }
  NormWeights host(const NormWeights& w) { return {host(w.weight), w.eps}; }
  QsaWeights host(const QsaWeights& w) {
    QsaWeights h = w;
    h.inv_freq = host(w.inv_freq);
    h.q_norm = host(w.q_norm), h.k_norm = host(w.k_norm);
    h.index_q_norm = host(w.index_q_norm), h.index_k_norm = host(w.index_k_norm);
    return h;
  }
  Batch host(const Batch& b) {
    Batch h = b;
    h.lane_table = host(b.lane_table), h.positions = host(b.positions), h.block_table = host(b.block_table);
    h.kv_table = host(b.kv_table);
    h.trials = host(b.trials);
    return h;
  }
  QsaRows host(const QsaRows& r) {
    return {host(r.query_gate), host(r.key), host(r.value), host(r.index), host(r.selected)};
  }
  KvCache host(const KvCache& kv) {
    return {kv.page_tokens,    host(kv.keys),     host(kv.values),    host(kv.index_keys),
            host(kv.raw_keys), host(kv.far_keys), host(kv.far_values)};
  }

  Backend& device_;
  Backend& cpu_;
  std::unique_ptr<Stream> cpu_stream_;
  Stream* stream_ = nullptr;
  bool measuring_ = false;
  std::vector<std::pair<std::byte*, std::vector<std::byte>>> copies_;
  std::vector<ComparedOperation> operations_;
};

}  // namespace

std::unique_ptr<ComparedBackend> make_compared_backend(Backend& device, Backend& cpu) {
  return std::make_unique<Compared>(device, cpu);
}

}  // namespace fnx::test
