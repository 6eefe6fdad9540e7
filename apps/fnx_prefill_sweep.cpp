// fnx-prefill-sweep: time and memory of prompts over their lengths and chunk sizes, and whether all chunk sizes agree.
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <set>

#include "kernels/error.h"
#include "libcore/cli/gates.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/outputs.h"
#include "libcore/cli/prompts.h"
#include "libcore/cli/routing_options.h"
#include "libcore/engine/workload.h"
#include "libcore/measure/memory.h"
#include "libcore/measure/statistics.h"
#include "libcore/receipt/writable.h"

using namespace fnx;

namespace {

struct Options {
  ModelOptions model;
  RoutingOptions routing;
  std::string lengths = "512-4096*2", chunks = "64-1024*4", format = "table";
  int repeat = 4;
  std::vector<std::string> gates;
  bool dry_run = false;

  void add(CLI::App& app) {
    model.add(app);
    routing.add(app);
    app.add_option("--lengths", lengths, "Prompt lengths, as a,b and first-last*mult")
        ->type_name("LIST")
        ->capture_default_str();
    app.add_option("--chunk-rows", chunks, "Prompt rows of one forward, as a,b and first-last*mult")
        ->type_name("LIST")
        ->capture_default_str();
    app.add_option("--repeat", repeat, "Warm runs a cell, after one cold run on a fresh engine")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    app.add_option("--gate", gates, "Limit on a warm median, like rows_per_s>=12000 or tokens512/chunk64/ttft_ns<=1e9")
        ->type_name("NAME>=VALUE");
    app.add_option("--format", format, "Form of the output")
        ->check(CLI::IsMember({"table", "csv"}))
        ->capture_default_str();
    app.add_flag("--dry-run", dry_run, "Print the cells and run none");
  }
};

struct Cell {
  int64_t length = 0, chunk = 0;  // rows of a forward, at most the length
  std::string name() const { return fmt::format("tokens{}/chunk{}", length, chunk); }
};

// What streamed experts cost the link in a run of a cell.
struct LinkUse {
  uint64_t forwards = 0;
  double needed_bytes = 0;  // without experts that were copied ahead and no row chose
};

// A run of a cell.
struct Sample {
  bool cold = false;
  double ttft_ns = 0;
  uint64_t peak_rss_bytes = 0, device_bytes = 0, state_bytes = 0;
  std::string hash;
};

std::vector<Cell> plan_cells(const Options& o, const ModelConfig& config) {
  std::vector<Cell> cells;
  std::set<std::pair<int64_t, int64_t>> seen;
  const std::vector<int64_t> chunks = parse_list(o.chunks);
  for (const int64_t length : parse_list(o.lengths)) {
    if (length < 1) throw Error(ErrorKind::Usage, fmt::format("--lengths: {}: give 1 or more", length));
    require_context(config, length, "--lengths");
    for (const int64_t chunk : chunks) {
      if (chunk < 1) throw Error(ErrorKind::Usage, fmt::format("--chunk-rows: {}: give 1 or more", chunk));
      if (seen.emplace(length, std::min(chunk, length)).second) cells.push_back({length, std::min(chunk, length)});
    }
  }
  return cells;
}

std::string csv_of(const std::vector<std::pair<Cell, std::vector<Sample>>>& all) {
  std::string out =
      "length_tokens,chunk_rows,phase,ttft_ns,rows_per_s,peak_rss_bytes,device_bytes,state_bytes,logits_hash\n";
  for (const auto& [cell, samples] : all)
    for (const Sample& s : samples)
      out += fmt::format("{},{},{},{:.0f},{:.3f},{},{},{},{}\n", cell.length, cell.chunk, s.cold ? "cold" : "warm",
                         s.ttft_ns, static_cast<double>(cell.length) / s.ttft_ns * 1e9, s.peak_rss_bytes,
                         s.device_bytes, s.state_bytes, s.hash);
  return out;
}

class Sweep {
 public:
  Sweep(const Options& options, ToolRun& run) : o_(options), run_(run), model_(OpenedModel::open(options.model, run)) {
    cells_ = plan_cells(o_, model_.config);
    std::vector<std::string> names;
    for (const Cell& c : cells_)
      for (const char* figure : {"/rows_per_s", "/ttft_ns", "/link_share"}) names.push_back(c.name() + figure);
    limits_ = parse_gates(o_.gates, names);
    run_.receipt().set_effective("cells", cells_.size(), "flag");
    if (const std::filesystem::path receipt = run_.receipt_path(); !receipt.empty() && !written_in_place(receipt))
      csv_file_ = std::filesystem::path(receipt).replace_extension("csv").string();
    require_outputs(run_, {{"the CSV beside it", csv_file_}, {"--trace-experts", o_.routing.trace_file}});
  }

  void print_plan() {
    int64_t rows = 0;
    for (const Cell& c : cells_) {
      run_.print(fmt::format("{:>9} tokens in chunks of {:>6}: {} runs\n", c.length, c.chunk, 1 + o_.repeat));
      rows += c.length * (1 + o_.repeat);
    }
    run_.print(fmt::format("{} cells, {} prompt rows\n", cells_.size(), rows));
    run_.receipt().result = {{"cells", cells_.size()}, {"prompt_rows", rows}};
    run_.receipt().add_not_run("every cell", "--dry-run");
  }

  void measure() {
    std::vector<EngineOptions> engines;
    for (const Cell& cell : cells_) engines.push_back(engine_options(workload(cell)));
    EngineOptions largest = largest_of(engines);
    if (model_.plan(o_.model, largest, run_)) return;
    routing_.emplace(o_.routing, *model_.source, model_.config, model_.digest);
    weights_.emplace(model_.load(o_.model, false, run_));
    routing_->warm(*weights_);
    if (o_.format == "table")
      run_.print(fmt::format("{:>9}{:>8}{:>13}{:>13}{:>12}{:>12}{:>12}  {}\n", "tokens", "chunk", "cold ms", "warm ms",
                             "rows/s", "RSS MiB", "device MiB", "logits"));
    for (const Cell& cell : cells_) {
      run_cell(cell);
      if (run_.stopping()) return;
      run_.progress("cells", results_.size(), cells_.size());
    }
    compare();
    routing_->finish(run_);
    link_bound();
    report_pools(*weights_, run_);
    judge_gates(limits_, figures_, run_.receipt());
    const std::string csv = csv_of(results_);
    if (o_.format == "csv") run_.print(csv);
    if (!csv_file_.empty()) write_file_atomic(csv_file_, csv);
  }

 private:
  Workload workload(const Cell& cell) const {
    Workload work;
    work.prompts = {made_up_prompt(cell.length, model_.config.vocab_size)};
    work.chunk_rows = cell.chunk;
    return work;
  }

  EngineOptions engine_options(const Workload& work) const {
    return model_.engine_options(work.state(), work.max_rows());
  }

  void run_cell(const Cell& cell) {
    const Workload work = workload(cell);
    reset_peak_rss();
    Engine engine(*weights_, *model_.backend, engine_options(work));
    routing_->watch(engine);
    std::vector<Sample> samples;
    LinkUse link;
    for (int i = 0; i <= o_.repeat; ++i) {
      const LinkUse before = link_use();
      const WorkloadRun timed = run_workload(engine, work, [&] { return run_.stopping(); });
      if (timed.stopped) return;
      samples.push_back({i == 0, timed.prompts_ns, peak_rss_bytes(), model_.backend->device_bytes(),
                         static_cast<uint64_t>(engine.state().device_bytes()), drawn_logits_hash(engine)});
      const LinkUse after = link_use();
      link = {after.forwards - before.forwards, after.needed_bytes - before.needed_bytes};
    }
    record(cell, samples);
    links_.push_back(link);
  }

  LinkUse link_use() const {
    if (!weights_->pools) return {};
    const StreamCounters& s = weights_->pools->streamed();
    const double spare = static_cast<double>(s.ahead + s.demand - s.needed);
    return {s.forwards, static_cast<double>(weights_->pools->prompts().bytes) -
                            spare * static_cast<double>(weights_->pools->line_bytes())};
  }

  // The least time of a prompt whose forwards stream experts: those that its rows chose, once a forward, over the link
  // at the faster of what the forwards reached and what a fill of all lines does by itself.
  void link_bound() {
    const bool streamed = std::any_of(links_.begin(), links_.end(), [](const LinkUse& l) { return l.forwards > 0; });
    const TimelineSummary line = streamed ? weights_->pools->timeline() : TimelineSummary{};
    const double rate =
        streamed ? std::max(filling_rate(), static_cast<double>(line.copied_bytes) / line.copying_ns * 1e9) : 0;
    for (size_t i = 0; i < results_.size(); ++i) {
      const std::string name = results_[i].first.name();
      if (links_[i].forwards == 0) {
        figures_.push_back({name + "/link_share", "ratio", 0, "its forwards stream no experts"});
        continue;
      }
      const double least = links_[i].needed_bytes / rate * 1e9, share = least / results_[i].second.back().ttft_ns;
      run_.receipt().evidence["link"][name] = {
          {"needed_bytes", links_[i].needed_bytes}, {"least_ns", least}, {"share", share}};
      figures_.push_back({name + "/link_share", "ratio", share, ""});
      if (o_.format == "table")
        run_.print(fmt::format("{}: {:.1f} GB of experts at {:.1f} GB/s: {:.0f} ms at least, {:.3f} of it reached\n",
                               name, links_[i].needed_bytes / 1e9, rate / 1e9, least / 1e6, share));
    }
    if (!streamed) return;
    run_.receipt().evidence["link"]["bytes_per_s"] = rate;
    if (o_.format == "table")
      run_.print(fmt::format("{:.3f} of the time of copies lies under the computation of experts\n",
                             line.overlapped_ns / line.copying_ns));
  }

  // Of a fill of all lines with nothing beside it.
  double filling_rate() {
    ExpertPools& pools = *weights_->pools;
    std::vector<std::vector<uint64_t>> heat;
    for (int64_t b = 0; b < pools.banks(); ++b) heat.emplace_back(pools.heat(b).begin(), pools.heat(b).end());
    pools.reset();
    pools.warm([&](int64_t b) -> std::span<const uint64_t> { return heat[static_cast<size_t>(b)]; });
    return pools.link_bytes_per_s();
  }

  void record(const Cell& cell, const std::vector<Sample>& samples) {
    Receipt& receipt = run_.receipt();
    std::vector<double> cold, warm;
    for (const Sample& s : samples) (s.cold ? cold : warm).push_back(s.ttft_ns);
    const auto rss = static_cast<double>(samples.back().peak_rss_bytes);
    const auto device = static_cast<double>(samples.back().device_bytes);
    receipt.add_series(cell.name() + "/ttft_ns", "ns", "cold", cold);
    receipt.add_series(cell.name() + "/ttft_ns", "ns", "warm", warm);
    receipt.add_series(cell.name() + "/peak_rss_bytes", "bytes", "warm", {rss});
    receipt.add_series(cell.name() + "/device_bytes", "bytes", "warm", {device});
    const double rate = static_cast<double>(cell.length) / median(warm) * 1e9;
    figures_.push_back({cell.name() + "/rows_per_s", "rows/s", rate, ""});
    figures_.push_back({cell.name() + "/ttft_ns", "ns", median(warm), ""});
    const double mib = 1 << 20;
    if (o_.format == "table")
      run_.print(fmt::format("{:>9}{:>8}{:>13.3f}{:>13.3f}{:>12.1f}{:>12.0f}{:>12.0f}  {}\n", cell.length, cell.chunk,
                             cold.front() / 1e6, median(warm) / 1e6, rate, rss / mib, device / mib,
                             samples.front().hash));
    results_.emplace_back(cell, samples);
  }

  // One hash a length, whatever the chunks.
  void compare() {
    Receipt& receipt = run_.receipt();
    receipt.result["lengths"] = Json::array();
    std::set<int64_t> lengths;
    for (const Cell& c : cells_) lengths.insert(c.length);
    for (const int64_t length : lengths) {
      std::set<std::string> hashes;
      Json by_chunk = Json::object();
      for (const auto& [cell, samples] : results_) {
        if (cell.length != length) continue;
        for (const Sample& s : samples) hashes.insert(s.hash);
        by_chunk[std::to_string(cell.chunk)] = samples.front().hash;
      }
      receipt.result["lengths"].push_back(Json{{"length_tokens", length}, {"logits_hash_by_chunk", by_chunk}});
      if (!receipt.add_gate(fmt::format("tokens{}/different_logits", length), static_cast<double>(hashes.size()),
                            "==", 1, "hashes"))
        run_.info(fmt::format("{} tokens: the last row's logits differ between chunk sizes", length));
    }
  }

  const Options& o_;
  ToolRun& run_;
  OpenedModel model_;
  std::optional<RoutingRecord> routing_;
  std::optional<Weights> weights_;
  std::vector<Cell> cells_;
  std::string csv_file_;  // empty: the receipt has no name to put it beside
  std::vector<GateLimit> limits_;
  std::vector<std::pair<Cell, std::vector<Sample>>> results_;
  std::vector<LinkUse> links_;  // of each result's last run
  std::vector<Figure> figures_;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{"fnx-prefill-sweep",
                      "Times prompts over lengths and chunk sizes and holds all chunk sizes to the same logits.",
                      {"fnx-prefill-sweep --model fixtures/flashnext-tiny --lengths 64-512*2 --chunk-rows 16,64,512",
                       "fnx-prefill-sweep --model synth:flash-next-3.05bpw --lengths 8192 --chunk-rows 1024-8192*2 "
                       "--gate \"rows_per_s>=12000\""}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); },
      [&](ToolRun& run) {
        Sweep sweep(options, run);
        if (options.dry_run)
          sweep.print_plan();
        else
          sweep.measure();
      });
}
