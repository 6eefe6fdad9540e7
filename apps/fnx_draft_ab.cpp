// fnx-draft-ab: the same texts with drafts and without, in one process: equal bits first, then time. The plain arm
// never loads the draft head.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <numeric>
#include <optional>

#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/engine/scheduler.h"
#include "libcore/measure/statistics.h"

using namespace fnx;

namespace {

constexpr std::array<const char*, 2> kArms = {"plain", "drafted"};

// Sequence i of a cell starts with line i of its text.
const std::vector<std::pair<const char*, std::vector<const char*>>> kTexts = {
    {"code",
     {"def add(a, b):\n    return a + b\n", "for i in range(10):\n    print(i)\n", "int main() {\n  return 0;\n}\n",
      "struct Point {\n  int x, y;\n};\n", "while (left < right) {\n  left += 1;\n}\n",
      "if value is None:\n    value = []\n", "const total = items.length;\n",
      "SELECT name FROM cities WHERE country = 'Peru';\n"}},
    {"chat",
     {"What is the capital of Peru?\n", "What is the capital of France?\n", "Who are you?\n",
      "What is two plus three?\n", "Tell me about the sea.\n", "What is the capital of Chile?\n",
      "How many days has a week?\n", "What is the largest city of Japan?\n"}},
    {"prose",
     {"In the beginning there was a river. ", "The old man walked slowly down to the water. ",
      "And it came to pass in those days ", "She opened the letter and read it twice. ",
      "The king called his servants together ", "Nobody in the village remembered the winter ",
      "Long before the road was built ", "They waited until the rain had stopped "}}};

struct Options {
  ModelOptions model;
  std::string sequences = "1,2,4,8", texts = "code,chat,prose", sampling = "greedy,seeded";
  int64_t max_tokens = 192, chunk_rows = 256;
  int pairs = kFewestPairs, warmup = 2;
  std::vector<std::string> gates;

  void add(CLI::App& app) {
    model.models = 2;  // plain, and with the draft head
    model.add(app, true);
    model.add_graphs(app);
    app.add_option("--sequences", sequences, "Sequences that run together, one cell each")
        ->type_name("LIST")
        ->capture_default_str();
    app.add_option("--texts", texts, "Kinds of prompts: code, chat, prose; made-up for a model without a tokenizer")
        ->type_name("LIST")
        ->capture_default_str();
    app.add_option("--sampling", sampling, "How tokens are drawn")
        ->check(CLI::IsMember({"greedy", "seeded", "greedy,seeded"}))
        ->capture_default_str();
    app.add_option("--max-tokens", max_tokens, "Tokens of every answer")
        ->check(CLI::Range(int64_t{2}, int64_t{1} << 20))
        ->capture_default_str();
    app.add_option("--chunk-rows", chunk_rows, "Prompt rows of a sequence in one forward")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    add_pairs(app, pairs);
    app.add_option("--warmup", warmup, "Runs of each arm before those of a pair")
        ->check(CLI::Range(0, 1000))
        ->capture_default_str();
    app.add_option("--gate", gates, "Limit, like ratio>=1 or chat/c1/greedy/ratio>=1.2")->type_name("NAME>=VALUE");
  }
};

struct Cell {
  std::string text;
  int64_t sequences = 1;
  bool seeded = false;
  std::string name() const { return fmt::format("{}/c{}/{}", text, sequences, seeded ? "seeded" : "greedy"); }
};

struct RunOf {
  std::vector<int32_t> tokens;  // of all answers, one after the other
  std::string logits_hash;      // XXH3-128 of their rows, sequence by sequence; of a run that asks for it
  double ns = 0;                // all decode rounds
  SchedulerStats stats;
};

// One arm of a cell: what it learns of drafts lives from run to run; its engine, whose graphs do, is that of a pair.
struct Arm {
  std::unique_ptr<Engine> engine;
  DraftOptions draft;
  std::unique_ptr<DraftPolicy> policy;
  RunOf reference;
  std::vector<double> ns_per_token;
  int64_t other_tokens = 0;  // timed runs whose tokens differ from the reference run's
  int64_t drafted = 0, kept = 0, rounds = 0;
  GraphCounters graphs;  // of the engines of all pairs; bytes of the largest
  std::array<int64_t, kMostDrafts + 1> depths{};
  std::array<std::vector<double>, kMostDrafts + 1> round_ns;  // by depth
};

class DraftAb {
 public:
  DraftAb(const Options& options, ToolRun& run)
      : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    draft_ = model_.drafts(o_.model, "", run_);
    if (draft_.most == 0)
      throw Error(ErrorKind::Unsupported,
                  "nothing to compare: give --draft auto or a number, and a checkpoint with a "
                  "draft head");
    tokenizer_ = model_.tokenizer();
    std::vector<std::string> texts = CLI::detail::split(o_.texts, ',');
    if (!tokenizer_) texts = {"made-up"};
    std::vector<std::string> names;
    for (const std::string& text : texts) {
      if (tokenizer_ && std::none_of(kTexts.begin(), kTexts.end(), [&](const auto& t) { return text == t.first; }))
        throw Error(ErrorKind::Usage, fmt::format("--texts {}: give code, chat or prose", text));
      for (const int64_t c : parse_list(o_.sequences)) {
        if (c < 1 || c > 256) throw Error(ErrorKind::Usage, fmt::format("--sequences: {}: give 1 to 256", c));
        for (const bool seeded : {false, true}) {
          if (o_.sampling.find(seeded ? "seeded" : "greedy") == std::string::npos) continue;
          cells_.push_back({text, c, seeded});
          names.push_back(cells_.back().name() + "/ratio");
        }
      }
    }
    limits_ = parse_gates(o_.gates, names);
    run_.receipt().set_effective("arms", Json::array({kArms[0], kArms[1]}), "this tool runs both");
    run_.receipt().result["cells"] = Json::array();
  }

  void measure() {
    std::vector<EngineOptions> engines;
    for (const Cell& cell : cells_) engines.push_back(engine_options(cell, requests(cell), 1));
    EngineOptions largest = largest_of(engines);
    if (model_.plan(o_.model, largest, run_)) return;
    for (size_t a = 0; a < weights_.size(); ++a) weights_[a].emplace(model_.load(o_.model, a == 1, run_));
    run_.print(fmt::format("{:<20}{:>12}{:>12}{:>9}{:>18}{:>9}{:>9}  {}\n", "cell", "plain tok/s", "drafted", "ratio",
                           "95 % interval", "tok/rnd", "kept", "rounds by depth"));
    for (const Cell& cell : cells_) {
      if (!run_cell(cell)) return;
      run_.progress("cells", ++done_, cells_.size());
    }
    for (size_t a = 0; a < weights_.size(); ++a) report_pools(*weights_[a], run_, kArms[a]);
    judge_gates(limits_, figures_, run_.receipt());
  }

 private:
  std::vector<Request> requests(const Cell& cell) const {
    std::vector<Request> out;
    for (int64_t i = 0; i < cell.sequences; ++i) {
      Request r;
      if (tokenizer_) {
        const auto& lines =
            std::find_if(kTexts.begin(), kTexts.end(), [&](const auto& t) { return cell.text == t.first; })->second;
        std::string text;
        for (size_t j = 0; j < lines.size(); ++j) text += lines[(j + static_cast<size_t>(i)) % lines.size()];
        r.prompt = tokenizer_->encode(text);
      } else {
        r.prompt = made_up_prompt(64, model_.config.vocab_size, static_cast<uint64_t>(i));
      }
      r.max_tokens = o_.max_tokens;
      require_context(model_.config, static_cast<int64_t>(r.prompt.size()) + r.max_tokens, "--max-tokens");
      if (cell.seeded) r.sampling = {0.8f, 0.95f, 0, 40, 1};
      out.push_back(std::move(r));
    }
    return out;
  }

  RunOf run(Arm& arm, const std::vector<Request>& requests, bool hash) {
    RunOf out;
    std::vector<std::vector<int32_t>> tokens(requests.size());
    std::vector<std::string> hashes(requests.size());
    SchedulerEvents events;
    events.token = [&](size_t i, int32_t t) { tokens[i].push_back(t); };
    if (hash)
      events.logits = [&](size_t i, std::span<const float> row) {
        hashes[i] += xxh3_hex(row.data(), row.size() * sizeof(float));
      };
    events.stop = [&] { return run_.stopping(); };
    SchedulerOptions so;
    so.chunk_rows = o_.chunk_rows;
    so.parallel = static_cast<int64_t>(requests.size());
    so.valid_ids = tokenizer_ ? tokenizer_->vocab_limit() : 0;
    so.draft = arm.draft, so.policy = arm.policy.get();
    out.stats = run_requests(*arm.engine, requests, so, events);
    for (const auto& t : tokens) out.tokens.insert(out.tokens.end(), t.begin(), t.end());
    const std::string all = fmt::format("{}", fmt::join(hashes, ""));
    if (hash) out.logits_hash = xxh3_hex(all.data(), all.size());
    out.ns = std::accumulate(out.stats.decode_ns.begin(), out.stats.decode_ns.end(), 0.0);
    return out;
  }

  EngineOptions engine_options(const Cell& cell, const std::vector<Request>& work, size_t arm) const {
    StateOptions state = state_for(work, cell.sequences);
    state.draft_head = arm == 1, state.trials = arm == 1 ? draft_.most : 0;
    return model_.engine_options(state, max_rows_for(work, cell.sequences, o_.chunk_rows, state.trials));
  }

  std::unique_ptr<Engine> make_engine(const Cell& cell, const std::vector<Request>& work, size_t arm) const {
    return std::make_unique<Engine>(*weights_[arm], *model_.backend, engine_options(cell, work, arm));
  }

  // One timed run. False when a signal ended it.
  bool sample(Arm& arm, const std::vector<Request>& work) {
    const RunOf got = run(arm, work, false);
    if (run_.stopping()) return false;
    arm.other_tokens += got.tokens != arm.reference.tokens;
    arm.ns_per_token.push_back(got.ns / static_cast<double>(got.stats.decode_rows));
    arm.drafted += got.stats.drafted, arm.kept += got.stats.drafts_kept;
    for (const DraftRound& r : got.stats.draft_rounds) {
      arm.rounds += static_cast<int64_t>(r.streams.size());
      ++arm.depths[static_cast<size_t>(r.depth)];
      arm.round_ns[static_cast<size_t>(r.depth)].push_back(r.ns);
    }
    const GraphCounters g = arm.engine->graph_counters();
    arm.graphs.captures += g.captures, arm.graphs.replays += g.replays;
    arm.graphs.eager += g.eager, arm.graphs.failed += g.failed;
    arm.graphs.bytes = std::max(arm.graphs.bytes, g.bytes);
    return true;
  }

  // False when a signal ended it.
  bool run_cell(const Cell& cell) {
    const std::vector<Request> work = requests(cell);
    std::array<Arm, 2> arms;
    arms[1].draft = draft_;
    for (size_t a = 0; a < arms.size(); ++a) {
      arms[a].policy = std::make_unique<DraftPolicy>(arms[a].draft);
      arms[a].engine = make_engine(cell, work, a);
      arms[a].reference = run(arms[a], work, true);
    }
    const bool equal = !run_.stopping() && compare(cell, arms);
    for (int pair = 0; pair < o_.pairs && equal; ++pair) {
      // Where an engine's memory lies changes its times: every pair makes its own, each arm's first in two of four.
      for (Arm& arm : arms) arm.engine.reset();
      for (int turn = 0; turn < 2; ++turn) {
        const auto a = static_cast<size_t>((pair / 2 + turn) % 2);
        arms[a].engine = make_engine(cell, work, a);
      }
      for (int i = 0; i < o_.warmup; ++i)
        for (Arm& arm : arms) run(arm, work, false);
      for (int turn = 0; turn < 2; ++turn)
        if (!sample(arms[static_cast<size_t>((pair + turn) % 2)], work)) return false;
    }
    if (run_.stopping()) return false;
    report(cell, arms, equal);
    return true;
  }

  bool compare(const Cell& cell, const std::array<Arm, 2>& arms) {
    const RunOf &a = arms[0].reference, &b = arms[1].reference;
    const bool equal = a.tokens == b.tokens && a.logits_hash == b.logits_hash;
    Json result{{"cell", cell.name()}};
    for (size_t i = 0; i < arms.size(); ++i)
      result[kArms[i]] = {{"token_hash", token_hash(arms[i].reference.tokens)},
                          {"logits_hash", arms[i].reference.logits_hash}};
    result["comparison"] = equal ? "equal" : "different";
    run_.receipt().result["cells"].push_back(result);
    run_.receipt().add_gate(cell.name() + "/different", equal ? 0 : 1, "==", 0, "runs");
    return equal;
  }

  void report(const Cell& cell, const std::array<Arm, 2>& arms, bool equal) {
    Receipt& receipt = run_.receipt();
    const std::string name = cell.name();
    if (!equal) {
      run_.print(fmt::format("{:<20}the arms' bits differ; no times\n", name));
      figures_.push_back({name + "/ratio", "ratio", 0, "the arms' bits differ"});
      return;
    }
    receipt.add_gate(name + "/runs_of_other_tokens", static_cast<double>(arms[0].other_tokens + arms[1].other_tokens),
                     "==", 0, "runs");
    const Arm& d = arms[1];
    Json& evidence = receipt.evidence[name];
    evidence = {{"drafted_tokens", d.drafted}, {"kept_drafts", d.kept}, {"rounds_by_draft_depth", d.depths}};
    for (const std::vector<double>& ns : d.round_ns)
      evidence["median_round_ns_by_draft_depth"].push_back(ns.empty() ? Json() : Json(median(ns)));
    evidence["graphs"] = graphs_json(d.graphs);
    for (size_t a = 0; a < arms.size(); ++a)
      receipt.add_series(fmt::format("{}/{}_ns_per_token", name, kArms[a]), "ns", "warm", arms[a].ns_per_token);
    const PairedRatio ratio = paired_ratio(arms[0].ns_per_token, d.ns_per_token);
    receipt.add_series(name + "/ratio", "ratio", "warm", ratio.ratios);
    const std::string missing = few_pairs(o_.pairs);
    if (missing.empty()) {
      evidence["ratio_interval"] = {ratio.interval.low, ratio.interval.high};
      evidence["ratio_plain_first"] = ratio.a_first;
      evidence["ratio_drafted_first"] = ratio.b_first;
    }
    figures_.push_back({name + "/ratio", "ratio", ratio.median, missing});
    const auto share = [](int64_t a, int64_t b) { return b > 0 ? static_cast<double>(a) / static_cast<double>(b) : 0; };
    run_.print(fmt::format("{:<20}{:>12.1f}{:>12.1f}{:>9.3f}{:>18}{:>9.2f}{:>9.2f}  {}\n", name,
                           1e9 / median(arms[0].ns_per_token), 1e9 / median(d.ns_per_token), ratio.median,
                           interval_text(ratio), 1 + share(d.kept, d.rounds), share(d.kept, d.drafted),
                           fmt::join(d.depths, " ")));
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  DraftOptions draft_;
  std::optional<Tokenizer> tokenizer_;
  std::array<std::optional<Weights>, 2> weights_;
  std::vector<Cell> cells_;
  std::vector<GateLimit> limits_;
  std::vector<Figure> figures_;
  uint64_t done_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{"fnx-draft-ab",
                      "Runs the same texts with and without drafts: equal bits first, then the ratio of times.",
                      {"fnx-draft-ab --model fixtures/flashnext-tiny --sequences 1,2 --texts chat",
                       "fnx-draft-ab --model synth:flash-next-3.05bpw --gate \"ratio>=1.0\""}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) { DraftAb(options, run).measure(); });
}
