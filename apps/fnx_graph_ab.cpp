// fnx-graph-ab: the same work with recorded launches replayed and without, in one process: equal bits first, then time.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>

#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/engine/floor.h"
#include "libcore/engine/workload.h"
#include "libcore/measure/statistics.h"

using namespace fnx;

namespace {

constexpr std::array<const char*, 2> kArms = {"off", "on"};

struct Options {
  ModelOptions model;
  std::string sequences = "1,2,4,8", cells = "decode,prefill", ceilings;
  int64_t context = 64, prompt = 512, chunk_rows = 256, rounds = 32;
  int pairs = kFewestPairs, warmup = 1;
  double read_gbps = 0, decode_gvps = 0;
  std::vector<std::string> gates;

  void add(CLI::App& app) {
    model.ranks = true;
    model.add(app);
    model.add_graphs(app, true);
    app.add_option("--sequences", sequences, "Sequences that run together, one cell each")
        ->type_name("LIST")
        ->capture_default_str();
    app.add_option("--cells", cells, "Kinds of cells")
        ->check(CLI::IsMember({"decode", "prefill", "decode,prefill"}))
        ->capture_default_str();
    add_count(app, "--context", context, "Tokens of a sequence before its first decode round");
    add_count(app, "--prompt-tokens", prompt, "Tokens of a sequence in a prefill cell");
    add_count(app, "--chunk-rows", chunk_rows, "Prompt rows of one forward");
    add_count(app, "--rounds", rounds, "Decode rounds of a run");
    add_pairs(app, pairs);
    app.add_option("--warmup", warmup, "Runs of each arm before the pairs")
        ->check(CLI::Range(0, 1000))
        ->capture_default_str();
    auto* read = app.add_option("--read-gbps", read_gbps, "What the device reads, for the floor, in GB/s");
    auto* decode = app.add_option("--decode-gvps", decode_gvps, "What it decodes, in 1e9 trellis values/s");
    read->check(CLI::PositiveNumber)->needs(decode);
    decode->check(CLI::PositiveNumber)->needs(read);
    app.add_option("--ceilings", ceilings, "Take both from this receipt of fnx-kernel-bench")
        ->type_name("FILE")
        ->excludes(read)
        ->excludes(decode);
    app.add_option("--gate", gates, "Limit, like ratio>=1 or decode/c1/ratio>=1.8 or decode/c1/floor_fraction>=0.45")
        ->type_name("NAME>=VALUE");
  }
};

struct Cell {
  bool decode = true;
  int64_t sequences = 1;
  std::string name() const { return fmt::format("{}/c{}", decode ? "decode" : "prefill", sequences); }
};

// One arm of a cell: an engine of its own, so that its graphs live from run to run, and its samples.
struct Arm {
  std::unique_ptr<Engine> engine;
  WorkloadRun reference;         // the run whose logits are hashed
  std::vector<double> ns;        // a sample a pair: of a decode round, or of all prompts
  std::vector<double> round_ns;  // every round of every run
  int64_t other_tokens = 0;      // timed runs whose tokens differ from the reference run's
};

class GraphAb {
 public:
  GraphAb(const Options& options, ToolRun& run)
      : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    require_context(model_.config, std::max(o_.context + o_.rounds, o_.prompt),
                    "--context, --rounds or --prompt-tokens");
    for (const bool decode : {true, false}) {
      if (o_.cells.find(decode ? "decode" : "prefill") == std::string::npos) continue;
      for (const int64_t c : parse_list(o_.sequences)) {
        if (c < 1 || c > kMostSequences)
          throw Error(ErrorKind::Usage, fmt::format("--sequences: {}: give 1 to {}", c, kMostSequences));
        cells_.push_back({decode, c});
      }
    }
    if (!o_.ceilings.empty())
      ceilings_ = load_ceilings(o_.ceilings);
    else if (o_.read_gbps > 0)
      ceilings_ = Ceilings{o_.read_gbps, o_.decode_gvps};
    std::vector<std::string> names;
    for (const Cell& c : cells_) {
      names.push_back(c.name() + "/ratio");
      if (c.decode) names.push_back(c.name() + "/floor_fraction");
    }
    limits_ = parse_gates(o_.gates, names);
    Receipt& receipt = run_.receipt();
    receipt.set_effective("arms", Json::array({kArms[0], kArms[1]}), "this tool runs both");
    if (ceilings_) {
      const std::string source = o_.ceilings.empty() ? "flag" : "receipt";
      receipt.set_effective("read_gb_per_s", ceilings_->read, source);
      receipt.set_effective("decode_gvalues_per_s", ceilings_->decode, source);
    } else {
      receipt.add_not_run("floor", "no ceilings: give --ceilings FILE, or --read-gbps and --decode-gvps");
    }
    receipt.result["cells"] = Json::array();
  }

  void measure() {
    std::vector<EngineOptions> engines;
    for (const Cell& cell : cells_) engines.push_back(engine_options(workload(cell), false));
    EngineOptions largest = largest_of(engines);
    largest.max_rows *= 2, largest.state.tokens *= 2, largest.state.slots *= 2;  // both arms together
    if (model_.plan(o_.model, largest, run_)) return;
    weights_.emplace(model_.load(o_.model, false, run_));
    run_.print(fmt::format("{:<14}{:>12}{:>12}{:>9}{:>18}{:>10}{:>10}{:>10}{:>12}{:>10}\n", "cell", "off ms", "on ms",
                           "off/on", "95 % interval", "off first", "on first", "replays", "floor ms", "reached"));
    for (const Cell& cell : cells_) {
      if (!run_cell(cell)) return;
      run_.progress("cells", ++done_, cells_.size());
    }
    report_pools(*weights_, run_);
    judge_gates(limits_, figures_, run_.receipt());
  }

 private:
  bool stopping() const { return run_.stop_together(); }

  Workload workload(const Cell& cell) const {
    Workload work;
    for (int64_t i = 0; i < cell.sequences; ++i)
      work.prompts.push_back(
          made_up_prompt(cell.decode ? o_.context : o_.prompt, model_.config.vocab_size, static_cast<uint64_t>(i)));
    work.chunk_rows = o_.chunk_rows;
    work.rounds = cell.decode ? o_.rounds : 0;
    return work;
  }

  EngineOptions engine_options(const Workload& work, bool graphs) const {
    EngineOptions eo = model_.engine_options(work.state(), work.max_rows());
    eo.graphs = graphs;
    return eo;
  }

  // False when a signal ended it.
  bool run_cell(const Cell& cell) {
    Workload work = workload(cell);
    std::array<Arm, 2> arms;
    for (size_t a = 0; a < arms.size(); ++a) {
      arms[a].engine = std::make_unique<Engine>(*weights_, *model_.backend, engine_options(work, a == 1));
      // Hashes first; a second run, whose rounds are replayed from the start, is the one that counts.
      work.hash_logits = true;
      for (int turn = 0; turn < 2; ++turn)
        arms[a].reference = run_workload(*arms[a].engine, work, [&] { return stopping(); });
      work.hash_logits = false;
    }
    const int64_t different = stopping() ? 0 : compare(cell, arms);
    for (int i = 0; i < o_.warmup && different == 0; ++i)
      for (Arm& arm : arms) run_workload(*arm.engine, work, [&] { return stopping(); });
    for (int pair = 0; pair < o_.pairs && different == 0; ++pair)
      for (int turn = 0; turn < 2; ++turn)
        if (!sample(arms[static_cast<size_t>((pair + turn) % 2)], work)) return false;
    if (stopping()) return false;
    report(cell, arms, different);
    return true;
  }

  bool sample(Arm& arm, const Workload& work) {
    const WorkloadRun run = run_workload(*arm.engine, work, [&] { return stopping(); });
    if (run.stopped) return false;
    arm.other_tokens += run.tokens != arm.reference.tokens;
    arm.ns.push_back(work.rounds > 0 ? run.rounds_ns() / static_cast<double>(work.rounds) : run.prompts_ns);
    arm.round_ns.insert(arm.round_ns.end(), run.round_ns.begin(), run.round_ns.end());
    return true;
  }

  // Rounds whose tokens or logits differ between the arms.
  int64_t compare(const Cell& cell, const std::array<Arm, 2>& arms) {
    const int64_t different = different_rounds(arms[0].reference, arms[1].reference);
    Json result{{"cell", cell.name()}};
    for (size_t a = 0; a < arms.size(); ++a)
      result[kArms[a]] = {{"token_hash", token_hash(arms[a].reference.tokens)},
                          {"logits_hash", logits_hash(arms[a].reference)}};
    result["comparison"] = different == 0 ? "equal" : "different";
    run_.receipt().result["cells"].push_back(result);
    run_.receipt().add_gate(cell.name() + "/different_rounds", static_cast<double>(different), "==", 0, "rounds");
    return different;
  }

  void report(const Cell& cell, const std::array<Arm, 2>& arms, int64_t different) {
    Receipt& receipt = run_.receipt();
    const std::string name = cell.name();
    const GraphCounters graphs = arms[1].engine->graph_counters();
    for (size_t a = 0; a < arms.size(); ++a)
      receipt.evidence[name][kArms[a]] = graphs_json(arms[a].engine->graph_counters());
    if (different > 0) {
      run_.print(fmt::format("{:<14}the arms differ in {} rounds; no times\n", name, different));
      for (const char* figure : {"/ratio", "/floor_fraction"})
        figures_.push_back({name + figure, "ratio", 0, "the arms' bits differ"});
      return;
    }
    receipt.add_gate(name + "/runs_of_other_tokens", static_cast<double>(arms[0].other_tokens + arms[1].other_tokens),
                     "==", 0, "runs");
    const bool can_record = model_.backend->name() != "cpu";
    if (cell.decode && can_record)
      receipt.add_gate(name + "/replays", static_cast<double>(graphs.replays), ">=", 1, "replays");
    else if (graphs.replays == 0)
      receipt.add_not_run(name + " graphs", can_record ? "prompts are not recorded" : kNotApplicable);

    for (size_t a = 0; a < arms.size(); ++a) {
      receipt.add_series(fmt::format("{}/{}_ns", name, kArms[a]), "ns", "warm", arms[a].ns);
      if (cell.decode)
        receipt.add_series(fmt::format("{}/{}_round_ns", name, kArms[a]), "ns", "warm", arms[a].round_ns);
    }
    const PairedRatio ratio = paired_ratio(arms[0].ns, arms[1].ns);
    receipt.add_series(name + "/ratio", "ratio", "warm", ratio.ratios);
    std::string missing = few_pairs(o_.pairs);
    if (missing.empty()) {
      receipt.evidence[name]["ratio_interval"] = {ratio.interval.low, ratio.interval.high};
      receipt.evidence[name]["ratio_off_first"] = ratio.a_first;
      receipt.evidence[name]["ratio_on_first"] = ratio.b_first;
    }
    if (graphs.replays == 0) missing = can_record ? "no round was replayed" : kNotApplicable;
    figures_.push_back({name + "/ratio", "ratio", ratio.median, missing});
    std::string floor_text = fmt::format("{:>12}{:>10}", "-", "-");
    if (cell.decode) floor_text = report_floor(cell, median(arms[1].ns));
    run_.print(fmt::format("{:<14}{:>12.3f}{:>12.3f}{:>9.3f}{:>18}{:>10.3f}{:>10.3f}{:>10}{}\n", name,
                           median(arms[0].ns) / 1e6, median(arms[1].ns) / 1e6, ratio.median, interval_text(ratio),
                           ratio.a_first, ratio.b_first, graphs.replays > 0 ? std::to_string(graphs.replays) : "none",
                           floor_text));
  }

  std::string report_floor(const Cell& cell, double on_ns) {
    Receipt& receipt = run_.receipt();
    const std::string name = cell.name() + "/floor_fraction";
    if (!ceilings_) {
      figures_.push_back({name, "ratio", 0, "no ceilings were given"});
      return fmt::format("{:>12}{:>10}", "-", "-");
    }
    const std::vector<CostTerm> terms =
        decode_cost(*model_.source, model_.config, cell.sequences, o_.context + o_.rounds / 2);
    const double floor = floor_ns(terms, *ceilings_), fraction = floor / on_ns;
    double bytes = 0, values = 0;
    std::map<std::string, double> families;
    for (const CostTerm& t : terms) {
      bytes += t.bytes, values += t.values;
      families[t.name] += floor_ns({&t, 1}, *ceilings_);
    }
    Json& evidence = receipt.evidence[cell.name()]["floor"];
    evidence = {{"round_ns", floor}, {"bytes", bytes}, {"trellis_values", values}, {"by_family_ns", families}};
    receipt.add_series(name, "ratio", "warm", {fraction});
    figures_.push_back({name, "ratio", fraction, few_pairs(o_.pairs)});
    return fmt::format("{:>12.3f}{:>10.3f}", floor / 1e6, fraction);
  }

  static constexpr const char* kNotApplicable = "not applicable: the cpu backend has no launches to record";
  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  std::optional<Weights> weights_;
  std::optional<Ceilings> ceilings_;
  std::vector<Cell> cells_;
  std::vector<GateLimit> limits_;
  std::vector<Figure> figures_;
  uint64_t done_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{
      "fnx-graph-ab",
      "Runs the same work with and without recorded launches: equal bits first, then the ratio of times.",
      {"fnx-graph-ab --model fixtures/flashnext-tiny --sequences 1,2 --rounds 16",
       "fnx-graph-ab --model synth:flash-next-3.05bpw --ceilings fnx-kernel-bench.receipt.json --gate "
       "\"decode/c1/ratio>=1.8\" --gate \"decode/c1/floor_fraction>=0.45\""}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) { GraphAb(options, run).measure(); });
}
