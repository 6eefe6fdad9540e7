// fnx-pool-ab: pools of offloaded experts that start warm against pools that start empty, in one process: equal tokens
// first, then the times to the first token and of the rounds that follow.
#include <fmt/format.h>

#include <array>
#include <optional>

#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/engine/workload.h"
#include "libcore/measure/statistics.h"

using namespace fnx;

namespace {

constexpr std::array<const char*, 2> kArms = {"cold", "warm"};
constexpr std::array<const char*, 2> kFigures = {"first_token", "round"};

struct Options {
  ModelOptions model;
  int64_t prompt = 64, chunk_rows = 256, rounds = 32, train_rounds = 128;
  int pairs = kFewestPairs;
  std::vector<std::string> gates;

  void add(CLI::App& app) {
    model.add(app);
    add_count(app, "--prompt-tokens", prompt, "Tokens of the prompt");
    add_count(app, "--chunk-rows", chunk_rows, "Prompt rows of one forward");
    add_count(app, "--rounds", rounds, "Decode rounds of a run");
    add_count(app, "--train-rounds", train_rounds,
              "Decode rounds, after another prompt, that the warm pools' counts come from");
    add_pairs(app, pairs);
    app.add_option("--gate", gates, "Limit, like first_token/ratio>=1.2 or round/ratio>=1")->type_name("NAME>=VALUE");
  }
};

// Samples of one arm.
struct Arm {
  std::array<std::vector<double>, 2> ns;  // by figure
  std::vector<int32_t> tokens;
  int64_t other_tokens = 0;
  uint64_t misses = 0, fills = 0;
};

class PoolAb {
 public:
  PoolAb(const Options& options, ToolRun& run) : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    std::vector<std::string> names;
    for (const char* f : kFigures) names.push_back(std::string(f) + "/ratio");
    limits_ = parse_gates(o_.gates, names);
    run_.receipt().set_effective("arms", Json::array({kArms[0], kArms[1]}), "this tool runs both");
  }

  void measure() {
    const Workload work = workload(0, o_.rounds), train = workload(1, o_.train_rounds);
    EngineOptions eo;
    eo.state = work.state();
    eo.state.tokens = eo.state.max_tokens = o_.prompt + std::max(o_.rounds, o_.train_rounds);
    eo.state.kv_dtype = model_.backend->kv_dtype();
    eo.max_rows = work.max_rows();
    eo.graphs = o_.model.graph == "on";
    if (model_.plan(o_.model, eo, run_)) return;
    if (model_.expert_lines == 0)
      throw Error(ErrorKind::Unsupported,
                  "every expert fits the device, there is nothing to compare; give "
                  "--expert-lines or a smaller --vram-limit");
    const Weights weights = model_.load(o_.model, false, run_);
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
    if (stop()) return;
    report();
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

  void sample(size_t a, Engine& engine, ExpertPools& pools, const Workload& work) {
    const PoolCounters before = pools.counters();
    pools.reset();
    if (a == 1) pools.warm([&](int64_t b) -> std::span<const uint64_t> { return heat_[static_cast<size_t>(b)]; });
    engine.stream().synchronize();
    const WorkloadRun run = run_workload(engine, work, [&] { return run_.stopping(); });
    if (run.stopped) return;
    Arm& arm = arms_[a];
    if (arm.tokens.empty()) arm.tokens = run.tokens;
    arm.other_tokens += run.tokens != arm.tokens;
    arm.ns[0].push_back(run.prompts_ns);
    arm.ns[1].push_back(run.rounds_ns() / static_cast<double>(o_.rounds));
    const PoolCounters after = pools.counters();
    arm.misses += after.misses - before.misses, arm.fills += after.fills - before.fills;
  }

  void report() {
    Receipt& receipt = run_.receipt();
    const bool equal = arms_[0].tokens == arms_[1].tokens && arms_[0].other_tokens + arms_[1].other_tokens == 0;
    receipt.result["token_hash"] = token_hash(arms_[0].tokens);
    receipt.add_gate("different_tokens", equal ? 0 : 1, "==", 0, "arms");
    for (size_t a = 0; a < arms_.size(); ++a)
      receipt.evidence[kArms[a]] = {{"misses", arms_[a].misses}, {"fills", arms_[a].fills}};
    if (!equal) {
      run_.print("the arms' tokens differ; no times\n");
      for (const char* f : kFigures) figures_.push_back({std::string(f) + "/ratio", "ratio", 0, "the arms differ"});
      return;
    }
    run_.print(fmt::format("{:<14}{:>12}{:>12}{:>11}{:>18}\n", "", "cold ms", "warm ms", "cold/warm", "95 % interval"));
    for (size_t f = 0; f < kFigures.size(); ++f) {
      const std::string name = kFigures[f];
      for (size_t a = 0; a < arms_.size(); ++a)
        receipt.add_series(fmt::format("{}/{}_ns", name, kArms[a]), "ns", "warm", arms_[a].ns[f]);
      const PairedRatio ratio = paired_ratio(arms_[0].ns[f], arms_[1].ns[f]);
      receipt.add_series(name + "/ratio", "ratio", "warm", ratio.ratios);
      const bool enough = o_.pairs >= kFewestPairs;
      figures_.push_back({name + "/ratio", "ratio", ratio.median,
                          enough ? "" : fmt::format("{} pairs, a claim needs {}", o_.pairs, kFewestPairs)});
      if (enough) receipt.evidence[name + "_ratio_interval"] = {ratio.interval.low, ratio.interval.high};
      run_.print(fmt::format(
          "{:<14}{:>12.3f}{:>12.3f}{:>11.3f}{:>18}\n", name, median(arms_[0].ns[f]) / 1e6, median(arms_[1].ns[f]) / 1e6,
          ratio.median,
          enough ? fmt::format("{:.3f} .. {:.3f}", ratio.interval.low, ratio.interval.high) : "too few pairs"));
    }
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
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
      "Times runs whose pools of offloaded experts start warm against runs whose pools start empty.",
      {"fnx-pool-ab --model fixtures/flashnext-tiny --expert-lines 8 --rounds 8",
       "fnx-pool-ab --model synth:flash-next-3.05bpw,skew=1 --vram-limit 16GiB --pairs 8 --gate \"round/ratio>=1\""}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) { PoolAb(options, run).measure(); });
}
