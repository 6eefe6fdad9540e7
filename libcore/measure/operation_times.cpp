#include "libcore/measure/operation_times.h"

#include <algorithm>

#include "kernels/expert_planner.h"
#include "libcore/measure/clock.h"
#include "libcore/measure/statistics.h"

namespace fnx {

namespace {

class Recording : public RecordingBackend {
 public:
  explicit Recording(Backend& inner) : inner_(inner) {}

  void start() override {
    names_.clear(), calls_.clear();
    recording_ = true;
  }
  RoundTimes times(Stream& stream, int repeats, bool in_round) override {
    recording_ = false;
    RoundTimes out;
    out.whole = time(stream, repeats, [](size_t) { return true; });
    for (size_t group = 0; group < names_.size(); ++group) {
      const auto count = std::count_if(calls_.begin(), calls_.end(), [&](const Call& c) { return c.group == group; });
      OperationTime& t = out.operations.emplace_back(time(stream, repeats, [&](size_t g) { return g == group; }));
      t.name = names_[group], t.calls = count;
      if (in_round)
        t.in_round = out.whole.seconds - time(stream, repeats, [&](size_t g) { return g != group; }).seconds;
    }
    return out;
  }

  std::string_view name() const override { return inner_.name(); }
  DType kv_dtype() const override { return inner_.kv_dtype(); }
  std::unique_ptr<Stream> make_stream() override { return inner_.make_stream(); }
  std::unique_ptr<Event> make_event() override { return inner_.make_event(); }
  std::unique_ptr<Event> make_timed_event() override { return inner_.make_timed_event(); }
  double elapsed_ns(Event& from, Event& to) override { return inner_.elapsed_ns(from, to); }
  void record(Stream& s, Event& e) override { inner_.record(s, e); }
  void wait(Stream& s, Event& e) override { inner_.wait(s, e); }
  void fill(Stream& s, ExpertBank& bank, int32_t expert, View line) override { inner_.fill(s, bank, expert, line); }
  void serve(Stream& s, ExpertBank& bank, std::span<const ServedExpert> served) override {
    inner_.serve(s, bank, served);
  }
  void check_served(Stream& s, const ExpertBank& bank) override { inner_.check_served(s, bank); }
  Buffer allocate(size_t bytes, Space space) override { return inner_.allocate(bytes, space); }
  uint64_t device_bytes() const override { return inner_.device_bytes(); }
  void reserve(Stream& s, const std::function<void()>& calls) override { inner_.reserve(s, calls); }
  std::unique_ptr<Graph> capture(Stream& s, const std::function<void()>& calls) override {
    return inner_.capture(s, calls);
  }
  std::unique_ptr<Linear> load_linear(LinearSource source) override { return inner_.load_linear(std::move(source)); }
  std::unique_ptr<ExpertBank> load_experts(std::vector<ExpertSource> experts, int64_t pooled) override {
    return inner_.load_experts(std::move(experts), pooled);
  }
  void copy(Stream& s, View dst, View src) override { inner_.copy(s, dst, src); }
  void clear(Stream& s, View dst) override { inner_.clear(s, dst); }

  void gather(Stream& s, View ids, View from, View to, const RowCopies& copies) override {
    run(s, "gather", [=, this](Stream& t) { inner_.gather(t, ids, from, to, copies); });
  }
  void embed(Stream& s, View tokens, View table, View out) override {
    run(s, "embed", [=, this](Stream& t) { inner_.embed(t, tokens, table, out); });
  }
  void grouped_norm(Stream& s, const NormWeights& w, int64_t group, View x, View out) override {
    run(s, "grouped_norm", [=, this](Stream& t) { inner_.grouped_norm(t, w, group, x, out); });
  }
  void linear(Stream& s, const Linear& l, View x, View y) override {
    run(s, "linear " + std::to_string(l.in) + " -> " + std::to_string(l.out),
        [=, this, &l](Stream& t) { inner_.linear(t, l, x, y); });
  }
  void linears(Stream& s, std::span<const Linear* const> list, View x, std::span<const View> y) override {
    std::string name = "linears " + std::to_string(list[0]->in) + " ->";
    for (const Linear* l : list) name += " " + std::to_string(l->out);
    run(s, name,
        [this, x, linears = std::vector<const Linear*>(list.begin(), list.end()),
         outputs = std::vector<View>(y.begin(), y.end())](Stream& t) { inner_.linears(t, linears, x, outputs); });
  }
  void add(Stream& s, int64_t repeat, View a, View b, View out) override {
    run(s, "add", [=, this](Stream& t) { inner_.add(t, repeat, a, b, out); });
  }
  void hc_mix(Stream& s, const HcWeights& w, const Injection& lacking, View stack, View u, View inj) override {
    run(s, "hc_mix", [=, this](Stream& t) { inner_.hc_mix(t, w, lacking, stack, u, inj); });
  }
  void hc_inject(Stream& s, const Injection& lacking, View stack) override {
    run(s, "hc_inject", [=, this](Stream& t) { inner_.hc_inject(t, lacking, stack); });
  }
  void gdn(Stream& s, const GdnWeights& w, const Batch& batch, View qkv, View z, View b, View a, const GdnState& state,
           View out) override {
    run(s, "gdn", [=, this](Stream& t) { inner_.gdn(t, w, batch, qkv, z, b, a, state, out); });
  }
  void qsa_write(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& rows, const KvCache& kv) override {
    run(s, "qsa_write", [=, this](Stream& t) { inner_.qsa_write(t, w, batch, rows, kv); });
  }
  void qsa_select(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& rows, const KvCache& kv) override {
    run(s, "qsa_select", [=, this](Stream& t) { inner_.qsa_select(t, w, batch, rows, kv); });
  }
  void qsa_attend(Stream& s, const QsaWeights& w, const Batch& batch, const QsaRows& rows, const KvCache& kv,
                  View out) override {
    run(s, "qsa_attend", [=, this](Stream& t) { inner_.qsa_attend(t, w, batch, rows, kv, out); });
  }
  void router(Stream& s, bool normalise, View logits, View ids, View weights) override {
    run(s, "router", [=, this](Stream& t) { inner_.router(t, normalise, logits, ids, weights); });
  }
  void experts(Stream& s, const ExpertBank& bank, View x, View ids, View slots) override {
    run(s, "experts", [=, this, &bank](Stream& t) { inner_.experts(t, bank, x, ids, slots); });
  }
  void plan_experts(Stream& s, ExpertBank& bank, const PoolOptions& options, int64_t k, View ids, View state,
                    View lines, const Foreseen& foreseen) override {
    run(s, "plan_experts",
        [=, this, &bank](Stream& t) { inner_.plan_experts(t, bank, options, k, ids, state, lines, foreseen); });
  }
  void fill_planned(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                    const Foreseen& foreseen) override {
    run(s, "fill_planned",
        [=, this, &bank](Stream& t) { inner_.fill_planned(t, bank, options, state, lines, foreseen); });
  }
  void settle_planned(Stream& s, ExpertBank& bank, const PoolOptions& options, View state, View lines,
                      const Foreseen& foreseen) override {
    run(s, "settle_planned",
        [=, this, &bank](Stream& t) { inner_.settle_planned(t, bank, options, state, lines, foreseen); });
  }
  void fill_foreseen(Stream& s, ExpertBank& bank, const PoolOptions& options, View state,
                     const Foreseen& foreseen) override {
    run(s, "fill_foreseen", [=, this, &bank](Stream& t) { inner_.fill_foreseen(t, bank, options, state, foreseen); });
  }
  void take_slots(Stream& s, int64_t per_part, View ids, View parts, View slots) override {
    run(s, "take_slots", [=, this](Stream& t) { inner_.take_slots(t, per_part, ids, parts, slots); });
  }
  void join_columns(Stream& s, std::span<const View> parts, View out) override {
    run(s, "join_columns", [this, out, views = std::vector<View>(parts.begin(), parts.end())](Stream& t) {
      inner_.join_columns(t, views, out);
    });
  }
  void swiglu(Stream& s, View gate, View up, View out) override {
    run(s, "swiglu", [=, this](Stream& t) { inner_.swiglu(t, gate, up, out); });
  }
  void combine(Stream& s, View slots, View weights, View shared, View shared_gate, View y) override {
    run(s, "combine", [=, this](Stream& t) { inner_.combine(t, slots, weights, shared, shared_gate, y); });
  }
  void ngram_decode(Stream& s, int bits, View packed, View bias, View out) override {
    run(s, "ngram_decode", [=, this](Stream& t) { inner_.ngram_decode(t, bits, packed, bias, out); });
  }
  void ple_mix(Stream& s, const PleWeights& w, const Batch& batch, View key, View value, View state,
               View stack) override {
    run(s, "ple_mix", [=, this](Stream& t) { inner_.ple_mix(t, w, batch, key, value, state, stack); });
  }
  void sample(Stream& s, int64_t valid, bool greedy, View params, View logits, View ids) override {
    run(s, "sample", [=, this](Stream& t) { inner_.sample(t, valid, greedy, params, logits, ids); });
  }

 private:
  static constexpr int kBurst = 4;  // rounds between two readings of the clock
  struct Call {
    size_t group = 0;  // index of its name
    std::function<void(Stream&)> run;
  };
  void run(Stream& s, const std::string& name, std::function<void(Stream&)> call) {
    call(s);
    if (!recording_) return;
    const auto it = std::find(names_.begin(), names_.end(), name);
    const auto group = static_cast<size_t>(it - names_.begin());
    if (it == names_.end()) names_.push_back(name);
    calls_.push_back({group, std::move(call)});
  }
  // Of the calls of those groups, in the order of the round.
  OperationTime time(Stream& stream, int repeats, const std::function<bool(size_t)>& takes) {
    const auto all = [&] {
      for (const Call& c : calls_)
        if (takes(c.group)) c.run(stream);
    };
    const std::unique_ptr<Graph> graph = inner_.capture(stream, all);
    std::vector<double> samples;
    for (int i = 0; i < repeats + 1; ++i) {
      stream.synchronize();
      const double began = now_ns();
      for (int j = 0; j < kBurst; ++j) graph ? graph->launch(stream) : all();
      stream.synchronize();
      if (i > 0) samples.push_back((now_ns() - began) / 1e9 / kBurst);
    }
    OperationTime t;
    t.seconds = median(samples);
    if (graph) t.launches = graph->launches();
    return t;
  }

  Backend& inner_;
  bool recording_ = false;
  std::vector<std::string> names_;
  std::vector<Call> calls_;
};

}  // namespace

std::unique_ptr<RecordingBackend> make_recording_backend(Backend& backend) {
  return std::make_unique<Recording>(backend);
}

}  // namespace fnx
