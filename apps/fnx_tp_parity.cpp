// fnx-tp-parity: ranks that share the experts against one rank that has them all: equal bits first, then time.
#include <fmt/format.h>

#include <array>
#include <map>
#include <optional>

#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/cli/ranks.h"
#include "libcore/engine/parity.h"
#include "libcore/measure/clock.h"
#include "libcore/measure/statistics.h"

using namespace fnx;

namespace {

struct Options {
  ModelOptions model;
  std::string sequences = "1,4", modes = "greedy,seeded", plant = "none";
  int64_t context = 96, chunk_rows = 64, rounds = 16;
  bool slots = false;
  int pairs = 0;
  std::vector<std::string> gates;

  void add(CLI::App& app) {
    model.ranks = true;
    model.tp = 2;
    model.add(app);
    model.add_graphs(app);
    app.add_option("--sequences", sequences, "Sequences that run together, one cell each")
        ->type_name("LIST")
        ->capture_default_str();
    app.add_option("--modes", modes, "How tokens are drawn")
        ->check(CLI::IsMember({"greedy", "seeded", "greedy,seeded"}))
        ->capture_default_str();
    add_count(app, "--context", context, "Tokens of a sequence before its first decode round");
    add_count(app, "--chunk-rows", chunk_rows, "Prompt rows of one forward");
    add_count(app, "--rounds", rounds, "Decode rounds of a run");
    app.add_flag("--slots", slots, "Also compare every layer's expert outputs, in the runs without graphs");
    app.add_option("--plant", plant, "Plant a fault in what the ranks exchange; the comparison must find it")
        ->check(CLI::IsMember({"none", "add", "order", "shard-plan"}))
        ->capture_default_str();
    app.add_option("--pairs", pairs,
                   "Timed runs of each: one rank alone, all of them, and every rank by itself at the "
                   "same time, in the order A B C C B A; 0: no times")
        ->check(CLI::Range(0, 10000))
        ->capture_default_str();
    app.add_option("--gate", gates, "Limit, like c1/round/ratio>=1 or independent_ratio>=0.5")
        ->type_name("NAME>=VALUE");
  }
};

struct Cell {
  bool seeded = false;
  int64_t sequences = 1;
  std::string name() const { return fmt::format("{}/c{}", seeded ? "seeded" : "greedy", sequences); }
};

// One side: one rank alone, or all of them.
struct Arm {
  std::string name;
  Communicator* ranks = nullptr;
  Plant plant = Plant::None;
  int64_t lines = 0;  // of offloaded experts; 0: all are on the device
  std::optional<Weights> weights;
};

// What is timed: an engine of rank 0 alone, of all ranks together, or of each by itself at the same time.
struct Side {
  std::string name;
  Engine* engine = nullptr;
  bool alone = false, together = false;
  std::vector<double> prompt_ns{}, round_ns{};
  int runs = 0;  // that this rank took part in
};

class TpParity {
 public:
  TpParity(const Options& options, ToolRun& run)
      : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    if (model_.ranks == nullptr) throw Error(ErrorKind::Usage, "--tp 1 leaves nothing to compare; give --tp 2 or more");
    require_context(model_.config, o_.context + o_.rounds, "--context or --rounds");
    for (const bool seeded : {false, true})
      for (const int64_t n : parse_list(o_.sequences)) {
        if (n < 1 || n > kMostSequences)
          throw Error(ErrorKind::Usage, fmt::format("--sequences {}: give 1 to {}", o_.sequences, kMostSequences));
        if (o_.modes.find(seeded ? "seeded" : "greedy") != std::string::npos) cells_.push_back({seeded, n});
      }
  }

  void compare() {
    if (!make_arms()) return;
    limits_ = parse_gates(o_.gates, figure_names());
    run_.receipt().result["cells"] = Json::array();
    for (Arm& arm : arms_) {
      load(arm);
      for (const Cell& cell : cells_) {
        if (run_.stop_together()) return;
        records_[cell.name()].push_back(record(cell, arm));
      }
      report_pools(*arm.weights, run_, arm.name);
      if (o_.pairs == 0) arm.weights.reset();
    }
    for (const Cell& cell : cells_) judge(cell);
    measure_exchange();
    for (const Cell& cell : cells_)
      for (size_t a = 0; a < arms_.size(); a += 2)
        if (o_.pairs > 0 && !cell.seeded && different_ == 0 && !measure(cell, arms_[a], arms_[a + 1])) return;
    if (!run_.writes()) return;
    if (different_ > 0)
      for (const std::string& name : figure_names()) figures_.push_back({name, "ratio", 0, "the sides' bits differ"});
    judge_gates(limits_, figures_, run_.receipt());
  }

 private:
  struct Recorded {
    std::string name;
    ParityRecord record;
  };

  // One rank, all of them; with a number of lines once more with offloaded experts, without one as memory asks. False
  // when the user wanted the plan alone.
  bool make_arms() {
    const Plant plant = o_.plant == "add" ? Plant::Add : o_.plant == "order" ? Plant::Order : Plant::None;
    const auto add = [&](int64_t one, int64_t all) {
      const auto name = [](int64_t ranks, int64_t lines) {
        return fmt::format("tp{}{}", ranks, lines > 0 ? "-offloaded" : "");
      };
      arms_.push_back({name(1, one), nullptr, Plant::None, one, {}});
      arms_.push_back({name(o_.model.tp, all), model_.communicator(), plant, all, {}});
    };
    add(0, 0);
    const Cell& largest = cells_.back();
    EngineOptions engine = engine_options(largest, arms_[1], false);
    if (model_.plan(o_.model, engine, run_)) return false;
    if (o_.model.expert_lines != "auto") {
      add(model_.expert_lines, model_.expert_lines);
    } else if (model_.backend->name() == "cuda") {
      const MemoryPlan alone = model_.plan_weights(o_.model, engine_options(largest, arms_[0], false), Shard{});
      require_fit(alone);
      arms_.clear();
      add(alone.lines, model_.expert_lines);
      run_.receipt().set_effective("expert_lines_of_one_rank", alone.lines, "default: the memory plan");
    }
    return true;
  }

  std::vector<std::string> figure_names() const {
    std::vector<std::string> names;
    for (const Cell& cell : cells_)
      for (size_t a = 1; a < arms_.size() && !cell.seeded && o_.pairs > 0; a += 2)
        for (const char* figure :
             {"/round/ratio", "/round/independent_ratio", "/prompts/ratio", "/prompts/independent_ratio"})
          names.push_back(timed_name(cell, arms_[a]) + figure);
    return names;
  }

  void load(Arm& arm) {
    LoadOptions load = model_.load_options(o_.model);
    load.pools.lines = arm.lines;
    load.draft_head = false;
    if (arm.ranks == nullptr) load.shard = {};
    load.plant_shard_plan = arm.ranks != nullptr && o_.plant == "shard-plan";
    arm.weights.emplace(model_.load(load, run_));
  }

  Workload workload(const Cell& cell) const {
    Workload work;
    for (int64_t i = 0; i < cell.sequences; ++i)
      work.prompts.push_back(made_up_prompt(o_.context, model_.config.vocab_size, static_cast<uint64_t>(i)));
    work.chunk_rows = o_.chunk_rows;
    work.rounds = o_.rounds;
    if (cell.seeded) work.sampling.temperature = 1, work.sampling.seed = 1;
    return work;
  }

  EngineOptions engine_options(const Cell& cell, const Arm& arm, bool graphs) const {
    const Workload work = workload(cell);
    EngineOptions eo = model_.engine_options(work.state(), work.max_rows());
    eo.graphs = graphs, eo.ranks = arm.ranks, eo.plant = arm.plant;
    return eo;
  }

  // Twice without graphs, twice with them where they were asked for.
  std::vector<Recorded> record(const Cell& cell, const Arm& arm) {
    std::vector<Recorded> out;
    for (const bool graphs : {false, true}) {
      if (graphs && !model_.graphs) continue;
      Engine engine(*arm.weights, *model_.backend, engine_options(cell, arm, graphs));
      for (const char* turn : {"first", "second"}) {
        const std::string name = fmt::format("{}{} {}", arm.name, graphs ? " graph" : "", turn);
        out.push_back(
            {name, record_run(engine, workload(cell), o_.slots && !graphs, [&] { return run_.stop_together(); })});
        run_.progress("runs", ++runs_, arms_.size() * cells_.size() * (model_.graphs ? 4 : 2));
      }
      if (graphs) report_graphs(cell, arm, engine);
    }
    return out;
  }

  void report_graphs(const Cell& cell, const Arm& arm, const Engine& engine) {
    const GraphCounters& g = engine.graph_counters();
    run_.receipt().evidence[cell.name()][arm.name] = graphs_json(g);
    if (arm.lines > 0 && (model_.planner == Planner::Host || o_.model.check_lines))
      run_.receipt().add_not_run(fmt::format("{}/{} replayed", cell.name(), arm.name),
                                 o_.model.check_lines ? "--check-lines reads every line before its use"
                                                      : "--planner host waits for every layer's choice");
    else
      run_.receipt().add_gate(fmt::format("{}/{}_replays", cell.name(), arm.name), static_cast<double>(g.replays),
                              ">=", 1, "replays");
  }

  // Each side against itself, then the first against the others.
  void judge(const Cell& cell) {
    const std::vector<std::vector<Recorded>>& sides = records_[cell.name()];
    Json result{{"cell", cell.name()}, {"runs", Json::array()}, {"comparisons", Json::array()}};
    for (const auto& side : sides)
      for (const Recorded& r : side) {
        Json j{{"name", r.name},
               {"forwards", r.record.forwards.size()},
               {"token_hash", token_hash(r.record.tokens())},
               {"logits_hash", r.record.logits_hash()}};
        if (!r.record.slots_hash().empty()) j["slots_hash"] = r.record.slots_hash();
        result["runs"].push_back(j);
      }
    for (const auto& side : sides)
      for (size_t i = 1; i < side.size(); ++i) hold(cell, side[0], side[i], result);
    for (const auto& side : std::span(sides).subspan(1))
      for (const Recorded& r : side) hold(cell, sides[0][0], r, result);
    run_.receipt().result["cells"].push_back(result);
  }

  void hold(const Cell& cell, const Recorded& a, const Recorded& b, Json& result) {
    Json j{{"a", a.name}, {"b", b.name}};
    const std::string names = fmt::format("{:<12}{} = {}", cell.name(), a.name, b.name);
    if (a.record.stopped || b.record.stopped) {
      j["outcome"] = "unverified";
    } else if (const auto d = first_difference(a.record, b.record)) {
      ++different_;
      j["outcome"] = "different";
      j["first_difference"] = {{"what", d->what}, {"forward", d->forward}, {"layer", d->layer},     {"row", d->row},
                               {"slot", d->slot}, {"expert", d->expert},   {"element", d->element}, {"a", d->a},
                               {"b", d->b}};
      run_.print(fmt::format("{:<60}different: {}\n", names, d->text()));
    } else {
      j["outcome"] = "equal";
      run_.print(fmt::format("{:<60}equal\n", names));
    }
    run_.receipt().add_gate(fmt::format("{}/{} = {}", cell.name(), a.name, b.name), j["outcome"] == "different",
                            "==", 0, "differences");
    result["comparisons"].push_back(j);
  }

  // What the ranks say to each other for one token of one sequence, without the work between.
  void measure_exchange() {
    const ModelConfig& c = model_.config;
    Communicator& ranks = *model_.communicator();
    const auto stream = model_.backend->make_stream();
    // Recorded where the backend records: then the host's part is not in it.
    const auto gather_ns = [&](int64_t floats) {
      const Buffer memory = model_.backend->allocate((ranks.world() + 1) * floats * sizeof(float), Space::Device);
      const View all = memory.view(DType::F32, {ranks.world() + 1, floats});
      constexpr int kCalls = 64;
      const auto calls = [&] {
        for (int i = 0; i < kCalls; ++i)
          ranks.all_gather(*stream, all.rows(ranks.world(), 1), all.rows(0, ranks.world()));
      };
      calls();
      stream->synchronize();
      const std::unique_ptr<Graph> graph = model_.backend->capture(*stream, calls);
      double ns = 0;
      for (int turn = 0; turn < 2; ++turn) {  // the first is a warmup
        stream->synchronize();
        ranks.agree(true);
        const double began = now_ns();
        graph ? graph->launch(*stream) : calls();
        stream->synchronize();
        ns = (now_ns() - began) / kCalls;
      }
      return ns;
    };
    const double slots = gather_ns((c.experts_per_token + 1) * c.hidden_size);
    const double head = gather_ns((c.vocab_size + ranks.world() - 1) / ranks.world());
    const double token = slots * static_cast<double>(c.layers()) + head;
    Receipt& receipt = run_.receipt();
    receipt.add_series("exchange_layer_ns", "ns", "warm", {slots});
    receipt.add_series("exchange_head_ns", "ns", "warm", {head});
    receipt.add_series("exchange_token_ns", "ns", "warm", {token});
    run_.print(fmt::format("exchange: {:.1f} us a layer, {:.1f} us the head, {:.3f} ms a token\n", slots / 1e3,
                           head / 1e3, token / 1e6));
  }

  // False when a signal ended it.
  bool measure(const Cell& cell, const Arm& one, const Arm& all) {
    const Workload work = workload(cell);
    const Arm* arms[2] = {&one, &all};
    std::unique_ptr<Engine> engines[2];
    for (int a = 0; a < 2; ++a)
      engines[a] =
          std::make_unique<Engine>(*arms[a]->weights, *model_.backend, engine_options(cell, *arms[a], model_.graphs));
    std::array<Side, 3> sides;  // A B C C B A: each neighbours' pairs are balanced
    sides[0] = {one.name, engines[0].get(), true, false};
    sides[1] = {all.name, engines[1].get(), false, true};
    sides[2] = {one.name + "-independent", engines[0].get(), false, false};
    for (Side& side : sides)
      if (!sample(side, work, false)) return false;
    for (int pair = 0; pair < o_.pairs; ++pair)
      for (size_t turn = 0; turn < sides.size(); ++turn)
        if (!sample(sides[pair % 2 == 0 ? turn : sides.size() - 1 - turn], work, true)) return false;
    const std::string name = timed_name(cell, all);
    for (const Side& side : sides) run_.receipt().evidence["timed_runs"][name][side.name] = side.runs;
    if (!run_.writes()) return true;  // the others were not timed alone
    report_times(name + "/round", sides, &Side::round_ns);
    report_times(name + "/prompts", sides, &Side::prompt_ns);
    return true;
  }

  bool sample(Side& side, const Workload& work, bool keep) {
    Communicator& ranks = *model_.communicator();
    ranks.agree(true);  // all start together
    WorkloadRun run;
    if (!side.alone || ranks.rank() == 0) {
      run = run_workload(*side.engine, work, [&] { return side.together ? run_.stop_together() : run_.stopping(); });
      ++side.runs;
    }
    if (!ranks.agree(!run.stopped)) return false;
    double prompts = run.prompts_ns, round = run.round_ns.empty() ? 0 : median(run.round_ns);
    if (!side.alone && !side.together) prompts = between_ns(prompts), round = between_ns(round);
    if (keep) side.prompt_ns.push_back(prompts), side.round_ns.push_back(round);
    return true;
  }

  // Between two ends of equal work, when every rank does it by itself and takes `mine`.
  double between_ns(double mine) {
    double rate = 0;
    for (const std::string& s : model_.communicator()->channel().exchange(fmt::format("{}", mine)))
      rate += 1 / std::stod(s);
    return 1 / rate;
  }

  std::string timed_name(const Cell& cell, const Arm& all) const {
    return cell.name() + (all.lines > 0 ? "/offloaded" : "");
  }

  void report_times(const std::string& name, const std::array<Side, 3>& sides, std::vector<double> Side::*ns) {
    Receipt& receipt = run_.receipt();
    const auto &alone = sides[0].*ns, &all = sides[1].*ns, &independent = sides[2].*ns;
    for (const Side& side : sides) receipt.add_series(fmt::format("{}/{}_ns", name, side.name), "ns", "warm", side.*ns);
    const auto compare = [&](const char* figure, const std::vector<double>& others) {
      const PairedRatio ratio = paired_ratio(others, all);
      receipt.add_series(name + figure, "ratio", "warm", ratio.ratios);
      if (few_pairs(o_.pairs).empty())
        receipt.evidence["intervals"][name + figure] = {ratio.interval.low, ratio.interval.high};
      figures_.push_back({name + figure, "ratio", ratio.median, few_pairs(o_.pairs)});
      return fmt::format("{:.3f} ({})", ratio.median, interval_text(ratio));
    };
    const std::string ratio = compare("/ratio", alone), against = compare("/independent_ratio", independent);
    run_.print(fmt::format("{:<28}one rank alone {:.3f} ms, {} ranks {:.3f} ms: ratio {}\n", name, median(alone) / 1e6,
                           o_.model.tp, median(all) / 1e6, ratio));
    run_.print(fmt::format("{:<28}{} independent processes, together one every {:.3f} ms: ratio {}\n", "", o_.model.tp,
                           median(independent) / 1e6, against));
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  std::vector<Arm> arms_;  // one rank, then all, of each kind
  std::vector<Cell> cells_;
  std::map<std::string, std::vector<std::vector<Recorded>>> records_;  // by cell: of each arm its runs
  int64_t different_ = 0;
  uint64_t runs_ = 0;
  std::vector<GateLimit> limits_;
  std::vector<Figure> figures_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{"fnx-tp-parity",
                      "Compares ranks that share the experts with one rank, bit for bit, and times both.",
                      {"fnx-tp-parity --model fixtures/flashnext-tiny --tp 2 --slots",
                       "fnx-tp-parity --model synth:flash-next-3.05bpw,layers=8 --pairs 8"}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) {
        // Sides that are timed lie beside each other.
        options.model.models = options.pairs == 0 ? 1 : options.model.expert_lines == "auto" ? 2 : 4;
        TpParity(options, run).compare();
      });
}
