// fnx-capacity: plans several long sequences, runs them, and says what they took: memory, time to the first token,
// decode rate along the context, page traffic, recall of hidden facts; bits against resident pages where both fit.
#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "kernels/devices.h"
#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/cli/ranks.h"
#include "libcore/cli/rows.h"
#include "libcore/engine/context_run.h"
#include "libcore/measure/memory.h"
#include "libcore/measure/statistics.h"
#include "libcore/text/needles.h"

using namespace fnx;

namespace {

struct Options {
  ModelOptions model;
  int64_t sequences = 2, tokens = 8192, chunk_rows = 4096, rounds = 16, needles = 8;
  std::string points;
  std::vector<std::string> gates;

  void add(CLI::App& app) {
    model.ranks = true;
    model.add(app);
    model.add_pages(app);
    model.add_graphs(app);
    app.add_option("--sequences", sequences, "Sequences that are held at once")
        ->check(CLI::Range(1, kMostSequences))
        ->capture_default_str();
    add_count(app, "--tokens", tokens, "Tokens of each");
    app.add_option("--points", points,
                   "Tokens of context at which decoding is timed besides the end; 8192 and its doubles unless given")
        ->type_name("LIST");
    add_count(app, "--rounds", rounds, "Decode rounds timed at each");
    add_count(app, "--chunk-rows", chunk_rows, "Prompt rows of a sequence in one forward");
    app.add_option("--needles", needles, "Facts hidden in each text, of a model with a tokenizer")
        ->check(CLI::Range(0, 1000))
        ->capture_default_str();
    app.add_option("--gate", gates, "Limit, like decode_ratio>=0.7 or recall>=0.9")->type_name("NAME<=VALUE");
  }
};

constexpr int64_t kFirstPoint = 8192;

class Capacity {
 public:
  Capacity(const Options& options, ToolRun& run)
      : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    choose_points();
    write_texts();
    require_context(model_.config, work_.state().max_tokens, "--tokens or --needles", "a sequence and its questions");
    std::vector<std::string> names{"ttft_ns", "decode_ratio", "device_bytes", "host_bytes"};
    for (const int64_t p : work_.points) names.push_back(fmt::format("t{}/tokens_per_s", p));
    if (!answers_.empty()) names.push_back("recall");
    limits_ = parse_gates(o_.gates, names);
  }

  void measure() {
    EngineOptions eo = model_.engine_options(work_.state(), work_.max_rows());
    const bool stop = model_.plan(o_.model, eo, run_);
    if (stop) return;
    if (model_.memory_plan) run_.print(plan_text(*model_.memory_plan));
    const bool compare = fits_resident(eo);
    const Weights weights = model_.load(o_.model, false, run_);
    const int64_t rows = o_.sequences * o_.tokens;
    work_.hash_states = compare;
    work_.stop = [&] { return run_.stop_together(); };
    work_.after = [&](int64_t done) {
      run_.progress("rows", static_cast<uint64_t>(std::min(done, rows)), static_cast<uint64_t>(rows));
      note_device();
    };
    work_.measured = [&](int64_t tokens, const std::vector<double>& round_ns) {
      run_.info(fmt::format("{} tokens a sequence: {:.3f} ms a round", tokens, median(round_ns) / 1e6));
    };
    ContextRun done;
    {
      Engine engine(weights, *model_.backend, eo);
      done = run_context(engine, work_);
      report_pages(engine.state(), run_);
      if (eo.graphs) run_.receipt().evidence["graphs"] = graphs_json(engine.graph_counters());
    }
    if (done.stopped) return;
    report(done);
    report_pools(weights, run_);
    if (compare) against_resident(weights, eo, done);
    judge_gates(limits_, figures_, run_.receipt());
  }

 private:
  void choose_points() {
    require_context(model_.config, o_.tokens, "--tokens");
    std::vector<int64_t>& points = work_.points;
    work_.rounds = o_.rounds, work_.chunk_rows = o_.chunk_rows;
    if (o_.points.empty())
      for (int64_t p = kFirstPoint; p < o_.tokens; p *= 2) points.push_back(p);
    else
      points = parse_list(o_.points);
    points.push_back(o_.tokens);
    std::sort(points.begin(), points.end());
    points.erase(std::unique(points.begin(), points.end()), points.end());
    int64_t before = 0;
    for (const int64_t p : points) {
      if (p > o_.tokens || p - before <= work_.rounds_at_point())
        throw Error(ErrorKind::Usage, fmt::format("--points: {} tokens after {} of {}; give each more than {} beyond "
                                                  "the one before, and --tokens as the last",
                                                  p, before, o_.tokens, work_.rounds_at_point()));
      before = p;
    }
    run_.receipt().set_effective("points", points, o_.points.empty() ? "default" : "flag");
  }

  void write_texts() {
    tokenizer_ = model_.tokenizer();
    const int64_t needles = tokenizer_ ? o_.needles : 0;
    if (needles == 0)
      run_.receipt().add_not_run("recall", tokenizer_ ? "--needles 0" : "there is no tokenizer: the ids are made up");
    for (int64_t i = 0; i < o_.sequences; ++i) {
      const auto stream = static_cast<uint64_t>(i);
      if (needles == 0) {
        work_.texts.push_back(made_up_prompt(o_.tokens, model_.config.vocab_size, stream));
        continue;
      }
      NeedleText text = make_needle_text(*tokenizer_, o_.tokens, needles, stream);
      work_.texts.push_back(std::move(text.ids));
      work_.questions.emplace_back(), answers_.emplace_back();
      for (Needle& n : text.needles) {
        work_.questions.back().push_back(std::move(n.question));
        answers_.back().push_back(n.answer);
      }
    }
  }

  // Whether all keys and values could lie on the device beside the same weights, with what plans leave free.
  bool fits_resident(EngineOptions eo) {
    std::string why;
    if (eo.state.device_tokens == 0) {
      why = "they are: --kv-device-tokens keeps fewer there";
    } else if (model_.backend->name() == "cuda") {
      ModelOptions same = o_.model;
      if (model_.expert_lines > 0) same.expert_lines = std::to_string(model_.expert_lines);
      eo.state.device_tokens = 0;
      const MemoryPlan plan = model_.plan_weights(same, eo, model_.shard());
      const uint64_t needed = plan.total() + kPlanReserve;
      const bool fits = needed <= plan.limit && plan.lines == model_.expert_lines;
      if (!fits) why = fmt::format("it needs {} bytes of device memory and may use {}", needed, plan.limit);
      if (Communicator* all = model_.communicator(); all != nullptr && all->minimum(fits ? 1 : 0) == 0 && fits)
        why = "it does not fit another rank";
    }
    if (!why.empty()) run_.receipt().add_not_run("the same with all keys and values on the device", why);
    return why.empty();
  }

  void note_device() {
    const std::vector<GpuInfo> gpus = model_.backend->name() == "cuda" ? list_gpus() : std::vector<GpuInfo>{};
    const auto device = static_cast<size_t>(model_.device);
    const uint64_t free = free_device_bytes();
    if (device < gpus.size() && free > 0) device_peak_ = std::max(device_peak_, gpus[device].memory_bytes - free);
  }

  void report(const ContextRun& done) {
    Receipt& receipt = run_.receipt();
    Json rows = Json::array();
    double first = 0, last = 0;
    for (const ContextRun::Point& p : done.points) {
      const std::string name = fmt::format("t{}", p.tokens);
      const double rate = static_cast<double>(o_.sequences) * 1e9 / median(p.round_ns);
      if (first == 0) first = rate;
      last = rate;
      receipt.add_series(name + "/round_ns", "ns", "warm", p.round_ns);
      figures_.push_back({name + "/tokens_per_s", "tokens/s", rate, ""});
      rows.push_back({{"context", p.tokens}, {"round_ms", median(p.round_ns) / 1e6}, {"tokens_per_s", rate}});
    }
    receipt.add_series("ttft_ns", "ns", "cold", done.prompt_ns);
    const double ttft = *std::max_element(done.prompt_ns.begin(), done.prompt_ns.end());
    figures_.push_back({"ttft_ns", "ns", ttft, ""});
    figures_.push_back({"decode_ratio", "ratio", last / first, ""});
    receipt.result["token_hash"] = token_hash(done.tokens);
    receipt.result["logits_hashes"] = done.logits_hashes;
    run_.print(rows_text(rows, "table"));
    run_.print(
        fmt::format("prompts: {:.2f} s a sequence of {} tokens, {:.0f} rows/s; decoding at the end {:.3f} of the "
                    "first\n",
                    ttft / 1e9, o_.tokens,
                    static_cast<double>(o_.sequences * o_.tokens) * 1e9 /
                        std::accumulate(done.prompt_ns.begin(), done.prompt_ns.end(), 0.0),
                    last / first));
    report_memory();
    recall(done);
  }

  // Of every rank.
  void report_memory() {
    Receipt& receipt = run_.receipt();
    const std::string mine = fmt::format("{} {}", device_peak_, peak_rss_bytes());
    const auto all = model_.ranks ? model_.ranks->channel().exchange(mine) : std::vector<std::string>{mine};
    uint64_t most_device = 0, most_host = 0;
    for (size_t r = 0; r < all.size(); ++r) {
      const uint64_t device = std::stoull(all[r]), host = std::stoull(all[r].substr(all[r].find(' ')));
      most_device = std::max(most_device, device), most_host = std::max(most_host, host);
      receipt.evidence["peak_memory"].push_back({{"rank", r}, {"device_bytes", device}, {"host_bytes", host}});
      run_.print(fmt::format("rank {}: at most {:.3f} GiB of the device in use, {:.3f} GiB of the host\n", r,
                             static_cast<double>(device) / (1 << 30), static_cast<double>(host) / (1 << 30)));
    }
    const bool device = model_.backend->name() == "cuda";
    figures_.push_back({"device_bytes", "bytes", static_cast<double>(most_device), device ? "" : "no device"});
    figures_.push_back({"host_bytes", "bytes", static_cast<double>(most_host), ""});
    if (device && !o_.model.vram_limit.empty())
      receipt.add_gate("device_bytes", static_cast<double>(most_device),
                       "<=", static_cast<double>(parse_size(o_.model.vram_limit)), "bytes");
  }

  void recall(const ContextRun& done) {
    int64_t asked = 0, found = 0;
    Json places = Json::array();
    for (size_t i = 0; i < done.answers.size(); ++i)
      for (size_t q = 0; q < done.answers[i].size(); ++q) {
        const std::string text = tokenizer_->decode(done.answers[i][q]);
        const bool right = text.find(answers_[i][q]) != std::string::npos;
        ++asked, found += right;
        places.push_back(
            {{"sequence", i}, {"needle", q}, {"answer", text}, {"expected", answers_[i][q]}, {"found", right}});
      }
    if (asked == 0) return;
    run_.receipt().result["needles"] = places;
    figures_.push_back({"recall", "share", static_cast<double>(found) / static_cast<double>(asked), ""});
    run_.print(fmt::format("recall: {} of {} facts\n", found, asked));
  }

  void against_resident(const Weights& weights, EngineOptions eo, const ContextRun& tiered) {
    eo.state.device_tokens = 0;
    if (weights.pools) weights.pools->reset();
    Engine engine(weights, *model_.backend, eo);
    const ContextRun resident = run_context(engine, work_);
    if (resident.stopped) return;
    const auto gate = [&](const char* what, bool equal) {
      run_.receipt().add_gate(fmt::format("resident/different_{}", what), equal ? 0 : 1, "==", 0, "runs");
      run_.print(fmt::format("{} with all pages on the device: {}\n", what, equal ? "equal" : "different"));
    };
    gate("tokens", resident.tokens == tiered.tokens);
    gate("logits", resident.logits_hashes == tiered.logits_hashes);
    gate("states", resident.state_hashes == tiered.state_hashes);
    run_.receipt().result["state_hashes"] = tiered.state_hashes;
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  std::optional<Tokenizer> tokenizer_;
  ContextWork work_;
  std::vector<std::vector<std::string>> answers_;
  std::vector<GateLimit> limits_;
  std::vector<Figure> figures_;
  uint64_t device_peak_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{"fnx-capacity",
                      "Runs several long sequences at once and reports memory, speed along the context and recall.",
                      {"fnx-capacity --model fixtures/flashnext-tiny --tokens 2000 --points 500 --kv-device-tokens 512",
                       "fnx-capacity --model DIR --sequences 2 --tokens 200000 --vram-limit 16GiB --gate "
                       "\"decode_ratio>=0.7\""}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) { Capacity(options, run).measure(); });
}
