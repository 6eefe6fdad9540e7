// fnx-reuse-check: two histories at once, each cold, warm, branched and rewound through snapshots, against the same
// requests without any; and a snapshot through a file.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/prompts.h"
#include "libcore/engine/scheduler.h"
#include "libcore/engine/snapshot_file.h"

using namespace fnx;

namespace {

constexpr std::array<const char*, 4> kPhases = {"cold", "warm", "branch", "rewind"};
constexpr int64_t kHistories = 2;

struct Options {
  ModelOptions model;
  int64_t history = 1000, suffix = 16, max_tokens = 16, chunk_rows = 256;
  std::vector<std::string> gates;

  void add(CLI::App& app) {
    model.add(app, true);
    model.add_graphs(app);
    add_count(app, "--history", history, "Tokens of each history");
    add_count(app, "--suffix", suffix, "Tokens behind it in a branch, behind its first half in a rewind");
    add_count(app, "--max-tokens", max_tokens, "Tokens of every answer");
    add_count(app, "--chunk-rows", chunk_rows, "Prompt rows of a sequence in one forward");
    app.add_option("--gate", gates, "Limit, like warm/ttft_ratio<=0.15")->type_name("NAME<=VALUE");
  }
};

struct RunOf {
  std::vector<std::vector<int32_t>> tokens;
  std::vector<std::string> logits, states;  // XXH3-128, one a request
  SchedulerStats stats;
};

class ReuseCheck {
 public:
  ReuseCheck(const Options& options, ToolRun& run)
      : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    if (o_.history < 4) throw Error(ErrorKind::Usage, "--history: give 4 or more");
    require_context(model_.config, o_.history - 1 + o_.suffix + o_.max_tokens, "--history, --suffix or --max-tokens");
    limits_ = parse_gates(o_.gates, {"warm/ttft_ratio", "branch/ttft_ratio", "rewind/ttft_ratio"});
    draft_ = model_.drafts(o_.model, "", run_);
  }

  void check() {
    // By phases, so that both histories are in the same one at a time.
    std::vector<Request> requests;
    for (size_t phase = 0; phase < kPhases.size(); ++phase)
      for (int64_t h = 0; h < kHistories; ++h) requests.push_back(request(phase, h));
    std::vector<Request> alone = requests;
    for (Request& r : alone) r.save_at.clear(), r.reuse_tokens = 0;
    EngineOptions eo = engine_options(requests);
    if (model_.plan(o_.model, eo, run_)) return;
    weights_.emplace(model_.load(o_.model, draft_.most > 0, run_));
    Engine engine(*weights_, *model_.backend, eo);
    const RunOf without = run(engine, alone, true);
    const RunOf with = run(engine, requests, false);
    if (run_.stopping()) return;
    compare(without, with);
    times(with);
    report_pools(*weights_, run_);
    if (eo.graphs) run_.receipt().evidence["graphs"] = graphs_json(engine.graph_counters());
    judge_gates(limits_, figures_, run_.receipt());
  }

 private:
  EngineOptions engine_options(const std::vector<Request>& requests) const {
    StateOptions state = state_for(requests, kHistories);
    state.draft_head = draft_.most > 0, state.trials = draft_.most;
    return model_.engine_options(state, max_rows_for(requests, kHistories, o_.chunk_rows, state.trials));
  }

  Request request(size_t phase, int64_t h) const {
    const auto stream = static_cast<uint64_t>(h);
    const std::vector<int32_t> history = made_up_prompt(o_.history, model_.config.vocab_size, stream);
    const int64_t kept = phase == 3 ? o_.history / 2 : o_.history - 1;
    Request r;
    r.max_tokens = o_.max_tokens;
    if (phase < 2) {
      r.prompt = history;
    } else {
      const std::vector<int32_t> end = made_up_prompt(o_.suffix, model_.config.vocab_size, stream + kHistories * phase);
      r.prompt.assign(history.begin(), history.begin() + kept);
      r.prompt.insert(r.prompt.end(), end.begin(), end.end());
    }
    if (phase == 0)
      r.save_at = {o_.history / 2, o_.history - 1};
    else
      r.reuse_of = static_cast<size_t>(h), r.reuse_tokens = kept;
    return r;
  }

  RunOf run(Engine& engine, const std::vector<Request>& requests, bool to_file) {
    RunOf out;
    out.tokens.resize(requests.size()), out.logits.resize(requests.size()), out.states.resize(requests.size());
    SchedulerEvents events;
    events.token = [&](size_t i, int32_t t) { out.tokens[i].push_back(t); };
    events.logits = [&](size_t i, std::span<const float> row) {
      out.logits[i] = xxh3_hex(row.data(), row.size() * sizeof(float)) + out.logits[i];
      out.logits[i] = xxh3_hex(out.logits[i].data(), out.logits[i].size());
    };
    events.closing = [&](size_t i, int32_t slot) {
      engine.settle(slot);
      const std::vector<std::byte> bytes = engine.state().dump(slot);
      out.states[i] = xxh3_hex(bytes.data(), bytes.size());
      if (to_file && i == 0) through_file(engine, engine.state().save(slot));
    };
    events.prompt_rows = [&](int64_t done, int64_t total) { run_.progress("prompt rows", done, total); };
    events.stop = [&] { return run_.stopping(); };
    SchedulerOptions so;
    so.chunk_rows = o_.chunk_rows, so.parallel = kHistories, so.draft = draft_;
    out.stats = run_requests(engine, requests, so, events);
    return out;
  }

  void through_file(const Engine& engine, const Snapshot& snapshot) {
    std::error_code error;
    const auto folder = std::filesystem::temp_directory_path(error);
    if (error)
      throw Error(ErrorKind::Output, fmt::format("TMPDIR, the folder of temporary files: {}", error.message()));
    const auto file = folder / fmt::format("fnx-reuse-check-{}.fnxsnapshot", ::getpid());
    struct Removal {
      const std::filesystem::path& file;
      ~Removal() {
        std::error_code ignored;
        std::filesystem::remove(file, ignored);
      }
    } removal{file};
    const SnapshotOwner owner{model_.digest, std::string(model_.backend->name()), engine.options().state.kv_dtype,
                              engine.has_draft_head()};
    const auto refuses = [&](const SnapshotOwner& who) {
      try {
        read_snapshot(file, who);
        return 0;
      } catch (const Error&) {
        return 1;
      }
    };
    write_snapshot(file, owner, snapshot);
    const Snapshot back = read_snapshot(file, owner);
    const bool equal = back.tokens == snapshot.tokens && back.states == snapshot.states;
    SnapshotOwner foreign = owner;
    foreign.checkpoint += "0";
    int refused = refuses(foreign);
    const uint64_t bytes = std::filesystem::file_size(file);
    {
      std::fstream damage(file, std::ios::in | std::ios::out | std::ios::binary);
      damage.seekg(static_cast<std::streamoff>(bytes / 2));
      const int byte = damage.get();
      damage.seekp(static_cast<std::streamoff>(bytes / 2));
      damage.put(static_cast<char>(byte ^ 1));
    }
    refused += refuses(owner);
    std::filesystem::resize_file(file, bytes / 2);
    refused += refuses(owner);
    run_.receipt().add_gate("file/different", equal ? 0 : 1, "==", 0, "snapshots");
    run_.receipt().add_gate("file/refused", refused, "==", 3, "files");
    run_.receipt().evidence["snapshot_file_bytes"] = bytes;
  }

  void compare(const RunOf& without, const RunOf& with) {
    Receipt& receipt = run_.receipt();
    receipt.result["phases"] = Json::array();
    run_.print(fmt::format("{:<8}{:>12}{:>12}{:>12}\n", "phase", "tokens", "logits", "states"));
    for (size_t phase = 0; phase < kPhases.size(); ++phase) {
      std::array<int, 3> different{};
      Json entry{{"phase", kPhases[phase]}};
      for (int64_t h = 0; h < kHistories; ++h) {
        const size_t i = phase * kHistories + static_cast<size_t>(h);
        different[0] += with.tokens[i] != without.tokens[i];
        different[1] += with.logits[i] != without.logits[i];
        different[2] += with.states[i] != without.states[i];
        entry["histories"].push_back({{"token_hash", token_hash(with.tokens[i])},
                                      {"logits_hash", with.logits[i]},
                                      {"state_hash", with.states[i]}});
      }
      receipt.result["phases"].push_back(entry);
      const auto word = [](int n) { return n == 0 ? "equal" : "different"; };
      run_.print(fmt::format("{:<8}{:>12}{:>12}{:>12}\n", kPhases[phase], word(different[0]), word(different[1]),
                             word(different[2])));
      receipt.add_gate(fmt::format("{}/different", kPhases[phase]), different[0] + different[1] + different[2], "==", 0,
                       "outputs");
    }
    const SchedulerStats& s = with.stats;
    receipt.evidence["reused_requests"] = s.reused_requests, receipt.evidence["reused_tokens"] = s.reused_tokens;
    receipt.evidence["snapshots"] = s.snapshots, receipt.evidence["snapshot_bytes"] = s.snapshot_bytes;
    const int64_t whole = o_.history - 1, half = o_.history / 2;
    receipt.add_gate("reused_tokens", static_cast<double>(s.reused_tokens),
                     "==", static_cast<double>(kHistories * (2 * whole + half)), "tokens");
  }

  // From a request's start to its first token, both histories at once.
  void times(const RunOf& with) {
    double cold = 0;
    for (size_t phase = 0; phase < kPhases.size(); ++phase) {
      std::vector<double> ns;
      for (size_t i = phase * kHistories; i < (phase + 1) * kHistories; ++i)
        ns.push_back(with.stats.first_token_ns[i] - with.stats.started_ns[i]);
      const double slowest = *std::max_element(ns.begin(), ns.end());
      if (phase == 0) cold = slowest;
      const std::string name = kPhases[phase];
      run_.receipt().add_series(name + "/ttft_ns", "ns", phase == 0 ? "cold" : "warm", ns);
      run_.print(
          fmt::format("{:<8} first token after {:.2f} ms, {:.3f} of cold\n", name, slowest / 1e6, slowest / cold));
      if (phase > 0) figures_.push_back({name + "/ttft_ratio", "ratio", slowest / cold, ""});
    }
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  DraftOptions draft_;
  std::optional<Weights> weights_;
  std::vector<GateLimit> limits_;
  std::vector<Figure> figures_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{"fnx-reuse-check",
                      "Holds requests that go on from snapshots to the same requests without any.",
                      {"fnx-reuse-check --model fixtures/flashnext-tiny --history 300",
                       "fnx-reuse-check --model synth:flash-next-3.05bpw --history 16000 --gate "
                       "\"warm/ttft_ratio<=0.15\""}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) { ReuseCheck(options, run).check(); });
}
