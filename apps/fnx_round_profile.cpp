// Times the operations of one round, group by group.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/error.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/prompts.h"
#include "libcore/engine/engine.h"
#include "libcore/measure/clock.h"
#include "libcore/measure/operation_times.h"
#include "libcore/measure/statistics.h"

using namespace fnx;

namespace {

struct Options {
  ModelOptions model;
  int64_t rows = 1, lane_rows = 1, context = 64, chunk_rows = 512;
  int repeats = 7, rounds = 20;
  bool in_round = false;
};

// Rounds of a token, or more, a sequence after a prompt; the ids are made up, only their number matters.
class Rounds {
 public:
  // A signal cuts the prompts short.
  Rounds(Engine& engine, const Options& o, const ToolRun& run) : engine_(engine), o_(o) {
    for (int64_t i = 0; i < o.rows; ++i) slots_.push_back(engine.state().open());
    const std::vector<int32_t> prompt = made_up_prompt(o.context, engine.config().vocab_size);
    for (const int32_t slot : slots_)
      for (int64_t at = 0; at < o.context && !run.stopping(); at += o.chunk_rows) {
        const LaneInput lane{slot, std::span(prompt).subspan(at, std::min(o.chunk_rows, o.context - at))};
        engine_.round({&lane, 1}, {}, 1);
      }
  }
  ~Rounds() {
    for (const int32_t slot : slots_) engine_.state().close(slot);
  }
  Rounds(const Rounds&) = delete;
  Rounds& operator=(const Rounds&) = delete;
  void run() {
    std::vector<LaneInput> lanes;
    std::vector<Draw> draws;
    tokens_ = made_up_prompt(o_.lane_rows, engine_.config().vocab_size, ++round_);
    for (size_t i = 0; i < slots_.size(); ++i) {
      lanes.push_back({slots_[i], tokens_});
      draws.push_back({static_cast<int32_t>((i + 1) * tokens_.size() - 1), {}});
    }
    engine_.round(lanes, draws, engine_.config().vocab_size);
  }

 private:
  Engine& engine_;
  const Options& o_;
  std::vector<int32_t> slots_, tokens_;
  uint64_t round_ = 0;
};

constexpr int kWarmRounds = 3;

// A device that idled takes as long to reach its clocks.
void warm_up(Engine& engine, const Options& o, const ToolRun& run) {
  for (const double until = now_ns() + 5e8; now_ns() < until && !run.stopping();) {
    Rounds rounds(engine, o, run);
    for (int i = 0; i < kWarmRounds; ++i) rounds.run();
  }
}

// NaN when a signal ended it.
double median_ns(Rounds&& rounds, int count, const ToolRun& run) {
  std::vector<double> samples;
  for (int i = 0; i < count + kWarmRounds; ++i) {
    if (run.stopping()) return std::nan("");
    const double began = now_ns();
    rounds.run();
    if (i >= kWarmRounds) samples.push_back(now_ns() - began);
  }
  return median(samples);
}

void profile(const Options& o, ToolRun& run) {
  OpenedModel model = OpenedModel::open(o.model, run);
  const int64_t tokens = o.context + o.lane_rows * (o.rounds + 10);
  require_context(model.config, tokens, "--context, --lane-rows or --rounds");
  EngineOptions eo = model.engine_options({o.rows, o.rows * tokens, tokens},
                                          std::max(o.rows * o.lane_rows, std::min(o.chunk_rows, o.context)));
  if (model.plan(o.model, eo, run)) return;
  const Weights weights = model.load(o.model, false, run);
  run.receipt().set_effective("arms", Json::array({"replayed", "eager"}), "this tool runs both");
  const std::unique_ptr<RecordingBackend> backend = make_recording_backend(*model.backend);
  double eager = 0, replayed = 0;
  for (const bool graphs : {true, false}) {
    eo.graphs = graphs;
    Engine engine(weights, *backend, eo);
    warm_up(engine, o, run);
    (graphs ? replayed : eager) = median_ns(Rounds(engine, o, run), o.rounds, run);
    if (run.stopping()) return;
    if (graphs) {
      run.receipt().evidence["graphs"] = graphs_json(engine.graph_counters());
      continue;
    }
    Rounds rounds(engine, o, run);  // behind the context alone, which the rounds before went beyond
    if (run.stopping()) return;
    backend->start();
    rounds.run();
    RoundTimes round = backend->times(engine.stream(), o.repeats, o.in_round);
    std::vector<OperationTime>& times = round.operations;
    std::sort(times.begin(), times.end(), [](const auto& a, const auto& b) { return a.seconds > b.seconds; });
    double sum = 0;
    run.print(fmt::format("{:<26} {:>6} {:>9} {:>10} {:>10}{}\n", "operation", "calls", "launches", "us each", "us",
                          o.in_round ? "   in round" : ""));
    for (const OperationTime& t : times) {
      sum += t.seconds;
      run.print(fmt::format("{:<26} {:>6} {:>9} {:>10.2f} {:>10.1f}{}\n", t.name, t.calls, t.launches,
                            t.seconds * 1e6 / static_cast<double>(t.calls), t.seconds * 1e6,
                            o.in_round ? fmt::format("{:>11.1f}", t.in_round * 1e6) : ""));
      run.receipt().add_series(t.name, "ns", "warm", {t.seconds * 1e9});
      if (o.in_round) run.receipt().add_series(t.name + " in round", "ns", "warm", {t.in_round * 1e9});
    }
    run.receipt().evidence["launches"] = round.whole.launches;
    run.receipt().add_series("device_round_ns", "ns", "warm", {round.whole.seconds * 1e9});
    run.print(
        fmt::format("{:<26} {:>6} {:>9} {:>10} {:>10.1f}\n", "together", "", round.whole.launches, "", sum * 1e6));
    run.print(fmt::format("the round's launches back to back: {:.1f} us\n", round.whole.seconds * 1e6));
  }
  report_pools(weights, run);
  run.receipt().add_series("eager_round_ns", "ns", "warm", {eager});
  run.receipt().add_series("graph_round_ns", "ns", "warm", {replayed});
  run.print(fmt::format("a round: {:.1f} us eager, {:.1f} us replayed\n", eager / 1e3, replayed / 1e3));
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  const ToolInfo info{"fnx-round-profile",
                      "Times the operations of one round, group by group.",
                      {"fnx-round-profile --model DIR", "fnx-round-profile --model DIR --rows 8 --context 4096",
                       "fnx-round-profile --model DIR --lane-rows 4096 --rounds 3"}};
  return run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        o.model.add(app);
        o.model.add_graphs(app, true);
        app.add_option("--rows", o.rows, "Sequences of the round")->check(CLI::Range(1, 1024))->capture_default_str();
        app.add_option("--lane-rows", o.lane_rows, "Tokens of each sequence in the round: 1 decodes, more is a prompt")
            ->check(CLI::Range(1, 1 << 16))
            ->capture_default_str();
        app.add_option("--context", o.context, "Tokens before the round, and before the first of the whole rounds")
            ->check(CLI::Range(1, 1 << 20))
            ->capture_default_str();
        app.add_option("--chunk-rows", o.chunk_rows, "Prompt rows in one forward")
            ->check(CLI::Range(1, 1 << 20))
            ->capture_default_str();
        app.add_option("--repeat", o.repeats, "Samples a group")->check(CLI::Range(1, 1000))->capture_default_str();
        app.add_flag("--in-round", o.in_round, "Also time the round without each group: what a group adds to it");
        app.add_option("--rounds", o.rounds, "Whole rounds timed")->check(CLI::Range(1, 1000))->capture_default_str();
      },
      [&](ToolRun& run) { profile(o, run); });
}
