// fnx-pool-ab: two ways of running offloaded experts in one process, pools that start empty against warm ones or rounds
// planned on the host against rounds planned on the device: equal tokens first, then the times to the first token and
// of the rounds that follow, and how near these come to the least time that their misses leave.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>

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

using Names = std::array<std::string, 2>;
constexpr std::array<const char*, 2> kFigures = {"first_token", "round"};

struct Options {
  ModelOptions model;
  int64_t prompt = 64, chunk_rows = 256, rounds = 32, train_rounds = 128;
  int pairs = kFewestPairs;
  std::string compare = "start";
  double read_gbps = 0;
  std::vector<std::string> gates;

  bool planners() const { return compare != "start"; }
  // Of the arms, when they are planners.
  std::array<Planner, 2> arm_planners() const {
    return compare == "planner" ? std::array{Planner::Host, Planner::Device}
                                : std::array{Planner::Device, Planner::Ahead};
  }
  Names arms() const {
    if (!planners()) return {"cold", "warm"};
    return {std::string(planner_name(arm_planners()[0])), std::string(planner_name(arm_planners()[1]))};
  }

  void add(CLI::App& app) {
    model.add(app);
    model.add_graphs(app);
    add_count(app, "--prompt-tokens", prompt, "Tokens of the prompt");
    add_count(app, "--chunk-rows", chunk_rows, "Prompt rows of one forward");
    add_count(app, "--rounds", rounds, "Decode rounds of a run");
    add_count(app, "--train-rounds", train_rounds,
              "Decode rounds, after another prompt, that the warm pools' counts come from");
    add_pairs(app, pairs);
    app.add_option("--compare", compare,
                   "What differs between the arms: how pools start, cold or warm; or, of warm ones, the planner, host "
                   "or device, or whether the device's copies ahead")
        ->check(CLI::IsMember({"start", "planner", "ahead"}))
        ->capture_default_str();
    app.add_option("--read-gbps", read_gbps,
                   "Gigabytes (10^9) a second that the device reads, for the bound of a round; 0: the link's alone")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--gate", gates,
                   "Limit, like first_token/ratio>=1.2, round/ratio>=1 or device/bound_share>=0.8: of the bound that "
                   "the round's misses leave")
        ->type_name("NAME>=VALUE");
  }
};

// Samples of one arm.
struct Arm {
  std::array<std::vector<double>, 2> ns;  // by figure
  std::vector<int32_t> tokens;
  std::string logits_hash;  // of a run of its own
  int64_t other_tokens = 0;
  uint64_t misses = 0, fills = 0;
  PhaseCounters rounds;  // of the decode rounds that were timed
  double bound_ns = 0;   // of one of them
};

// Adds what was counted between two readings.
void add(PhaseCounters& sum, const PhaseCounters& before, const PhaseCounters& after) {
  for (const auto field : {&PhaseCounters::forwards, &PhaseCounters::misses, &PhaseCounters::bytes,
                           &PhaseCounters::foreseen_bytes, &PhaseCounters::vain_bytes})
    sum.*field += after.*field - before.*field;
}

class PoolAb {
 public:
  PoolAb(const Options& options, ToolRun& run)
      : o_(options), run_(run), model_(OpenedModel::open(options.model, run)), names_(options.arms()) {
    std::vector<std::string> names;
    for (const char* f : kFigures) names.push_back(std::string(f) + "/ratio");
    for (const std::string& a : names_) names.push_back(std::string(a) + "/bound_share");
    limits_ = parse_gates(o_.gates, names);
    run_.receipt().set_effective("arms", Json::array({names_[0], names_[1]}), "this tool runs both");
  }

  void measure() {
    const Workload work = workload(0, o_.rounds), train = workload(1, o_.train_rounds);
    EngineOptions eo = model_.engine_options(work.state(), work.max_rows());
    eo.state.tokens = eo.state.max_tokens = o_.prompt + std::max(o_.rounds, o_.train_rounds);
    require_context(model_.config, eo.state.max_tokens, "--prompt-tokens, --rounds or --train-rounds");
    if (model_.plan(o_.model, eo, run_)) return;
    if (model_.expert_lines == 0)
      throw Error(ErrorKind::Unsupported,
                  "every expert fits the device, there is nothing to compare; give "
                  "--expert-lines or a smaller --vram-limit");
    const Weights weights = model_.load(o_.model, false, run_);
    if (o_.planners())
      run_.receipt().set_effective("planner", Json::array({names_[0], names_[1]}), "this tool runs both");
    Engine engine(weights, *model_.backend, eo);
    ExpertPools& pools = *weights.pools;
    const auto stop = [&] { return run_.stopping(); };
    run_workload(engine, train, stop);
    for (int64_t b = 0; b < pools.banks(); ++b) heat_.emplace_back(pools.heat(b).begin(), pools.heat(b).end());
    for (int pair = 0; pair < o_.pairs; ++pair)
      for (int turn = 0; turn < 2 && !stop(); ++turn) {
        sample(static_cast<size_t>((pair + turn) % 2), engine, pools, work);
        run_.progress("runs", static_cast<uint64_t>(2 * pair + turn + 1), static_cast<uint64_t>(2 * o_.pairs));
      }
    for (size_t a = 0; a < 2 && !stop(); ++a) hash_logits(a, engine, pools, work);
    if (stop()) return;
    if (report()) bound(pools);
    if (eo.graphs) run_.receipt().evidence["graphs"] = graphs_json(engine.graph_counters());
    report_pools(weights, run_);
    judge_gates(limits_, figures_, run_.receipt());
  }

 private:
  Workload workload(uint64_t seed, int64_t rounds) const {
    Workload work;
    work.prompts = {made_up_prompt(o_.prompt, model_.config.vocab_size, seed)};
    work.chunk_rows = o_.chunk_rows;
    work.rounds = rounds;
    return work;
  }

  // Pools as the arm's runs find them.
  void start(size_t a, Engine& engine, ExpertPools& pools) {
    pools.reset();
    if (o_.planners()) pools.set_planner(o_.arm_planners()[a]);
    if (a == 1 || o_.planners())
      pools.warm([&](int64_t b) -> std::span<const uint64_t> { return heat_[static_cast<size_t>(b)]; });
    engine.stream().synchronize();
  }

  void hash_logits(size_t a, Engine& engine, ExpertPools& pools, Workload work) {
    start(a, engine, pools);
    work.hash_logits = true;
    arms_[a].logits_hash = logits_hash(run_workload(engine, work, [&] { return run_.stopping(); }));
  }

  void sample(size_t a, Engine& engine, ExpertPools& pools, const Workload& work) {
    const PoolCounters before = pools.counters();
    const PhaseCounters rounds_before = pools.rounds();
    start(a, engine, pools);
    const WorkloadRun run = run_workload(engine, work, [&] { return run_.stopping(); });
    if (run.stopped) return;
    Arm& arm = arms_[a];
    if (arm.tokens.empty()) arm.tokens = run.tokens;
    arm.other_tokens += run.tokens != arm.tokens;
    arm.ns[0].push_back(run.prompts_ns);
    arm.ns[1].push_back(run.rounds_ns() / static_cast<double>(o_.rounds));
    const PoolCounters after = pools.counters();
    arm.misses += after.misses - before.misses, arm.fills += after.fills - before.fills;
    add(arm.rounds, rounds_before, pools.rounds());
  }

  // The least time of a round: its misses over the link, beside its reads on the device. And what keeps a round from
  // it: misses that no guess brought, which computing waits for; the rest of a round, beside which guesses are copied;
  // and guesses in vain.
  void bound(ExpertPools& pools) {
    const double link = pools.link_bytes_per_s();
    const double read = o_.read_gbps <= 0
                            ? 0
                            : floor_ns(decode_cost(*model_.source, model_.config, 1, o_.prompt + o_.rounds / 2),
                                       {o_.read_gbps, std::numeric_limits<double>::infinity()});
    Receipt& receipt = run_.receipt();
    if (o_.read_gbps <= 0) receipt.add_not_run("reads of the device", "asked for by --read-gbps");
    receipt.evidence["link_bytes_per_s"] = link;
    for (size_t a = 0; a < 2; ++a) {
      Arm& arm = arms_[a];
      const auto a_round = [&](uint64_t n) {
        return static_cast<double>(n) / static_cast<double>(arm.rounds.forwards);
      };
      const auto link_time = [&](double bytes) { return bytes / link * 1e9; };
      const double bytes = a_round(arm.rounds.bytes), misses = a_round(arm.rounds.misses), link_ns = link_time(bytes);
      const double ahead = a_round(arm.rounds.foreseen_bytes), vain = a_round(arm.rounds.vain_bytes);
      const double late_ns = link_time(bytes - ahead);
      arm.bound_ns = std::max(link_ns, read);
      const double round_ns = median(arm.ns[1]), share = arm.bound_ns / round_ns;
      receipt.evidence[names_[a]].update(Json{{"rounds", arm.rounds.forwards},
                                              {"round_misses", misses},
                                              {"round_link_bytes", bytes},
                                              {"round_link_ns", link_ns},
                                              {"round_foreseen_bytes", ahead},
                                              {"round_late_bytes", bytes - ahead},
                                              {"round_late_link_ns", late_ns},
                                              {"round_other_ns", round_ns - late_ns},
                                              {"round_vain_bytes", vain},
                                              {"round_vain_link_ns", link_time(vain)},
                                              {"round_read_ns", read},
                                              {"round_bound_share", share}});
      figures_.push_back({fmt::format("{}/bound_share", names_[a]), "ratio", share, ""});
      run_.print(
          fmt::format("{}: {:.1f} misses a round, {:.1f} MB at {:.1f} GB/s: {:.3f} ms at least, {:.3f} of it "
                      "reached\n",
                      names_[a], misses, bytes / 1e6, link / 1e9, arm.bound_ns / 1e6, share));
      run_.print(
          fmt::format("{}: {:.3f} ms waits for the link, for {:.1f} MB that came after the choice; beside the "
                      "other {:.3f} ms {:.1f} MB came ahead of it, and {:.1f} MB in vain, {:.3f} ms of the "
                      "link\n",
                      names_[a], late_ns / 1e6, (bytes - ahead) / 1e6, (round_ns - late_ns) / 1e6, ahead / 1e6,
                      vain / 1e6, link_time(vain) / 1e6));
    }
  }

  // False when there are no times.
  bool report() {
    Receipt& receipt = run_.receipt();
    const bool equal = arms_[0].tokens == arms_[1].tokens && arms_[0].other_tokens + arms_[1].other_tokens == 0;
    receipt.result["token_hash"] = token_hash(arms_[0].tokens);
    receipt.add_gate("different_tokens", equal ? 0 : 1, "==", 0, "arms");
    for (size_t a = 0; a < 2; ++a) receipt.result["logits_hash"][names_[a]] = arms_[a].logits_hash;
    receipt.add_gate("different_logits", arms_[0].logits_hash == arms_[1].logits_hash ? 0 : 1, "==", 0, "arms");
    if (o_.planners())
      receipt.add_gate("different_misses", arms_[0].misses == arms_[1].misses ? 0 : 1, "==", 0, "arms");
    for (size_t a = 0; a < arms_.size(); ++a)
      receipt.evidence[names_[a]] = {{"misses", arms_[a].misses}, {"fills", arms_[a].fills}};
    if (!equal) {
      run_.print("the arms' tokens differ; no times\n");
      for (const char* f : kFigures) figures_.push_back({std::string(f) + "/ratio", "ratio", 0, "the arms differ"});
      for (const std::string& a : names_)
        figures_.push_back({std::string(a) + "/bound_share", "ratio", 0, "the arms differ"});
      return false;
    }
    run_.print(fmt::format("{:<14}{:>12}{:>12}{:>13}{:>18}\n", "", names_[0] + std::string(" ms"),
                           names_[1] + std::string(" ms"), fmt::format("{}/{}", names_[0], names_[1]),
                           "95 % interval"));
    for (size_t f = 0; f < kFigures.size(); ++f) {
      const std::string name = kFigures[f];
      for (size_t a = 0; a < arms_.size(); ++a)
        receipt.add_series(fmt::format("{}/{}_ns", name, names_[a]), "ns", "warm", arms_[a].ns[f]);
      const PairedRatio ratio = paired_ratio(arms_[0].ns[f], arms_[1].ns[f]);
      receipt.add_series(name + "/ratio", "ratio", "warm", ratio.ratios);
      const std::string missing = few_pairs(o_.pairs);
      figures_.push_back({name + "/ratio", "ratio", ratio.median, missing});
      if (missing.empty()) receipt.evidence[name + "_ratio_interval"] = {ratio.interval.low, ratio.interval.high};
      run_.print(fmt::format("{:<14}{:>12.3f}{:>12.3f}{:>13.3f}{:>18}\n", name, median(arms_[0].ns[f]) / 1e6,
                             median(arms_[1].ns[f]) / 1e6, ratio.median, interval_text(ratio)));
    }
    return true;
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  const Names names_;
  std::vector<std::vector<uint64_t>> heat_;  // by bank
  std::array<Arm, 2> arms_;
  std::vector<GateLimit> limits_;
  std::vector<Figure> figures_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{
      "fnx-pool-ab",
      "Times two ways of running offloaded experts: warm pools against empty ones, or planner against planner.",
      {"fnx-pool-ab --model fixtures/flashnext-tiny --expert-lines 8 --rounds 8",
       "fnx-pool-ab --model synth:flash-next-3.05bpw,skew=1 --vram-limit 16GiB --compare planner"}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) {
        if (options.planners()) {
          if (options.model.planner != "auto")
            throw Error(ErrorKind::Usage, fmt::format("--planner {}: --compare {} runs two planners; leave it out",
                                                      options.model.planner, options.compare));
          options.model.planner = planner_name(options.arm_planners()[1]);  // can run both
        }
        PoolAb(options, run).measure();
      });
}
