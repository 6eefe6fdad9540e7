#include "libcore/cli/model_options.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "kernels/devices.h"
#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/qualification.h"
#include "libcore/cli/ranks.h"
#include "libcore/engine/pool_plan.h"
#include "libcore/format/fingerprint.h"
#include "libcore/format/synthetic_source.h"
#include "libcore/measure/clock.h"

namespace fnx {

namespace {
constexpr int kMostRanks = 64;  // a process each is started before the model is known

// Of an option that takes words as well.
int64_t whole_number(const char* option, const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size())
    throw Error(ErrorKind::Usage, fmt::format("{} {}: a number is decimal digits alone", option, text));
  return number;
}
}  // namespace

void ModelOptions::add(CLI::App& app, bool drafts) {
  app.add_option("--model", model, "Checkpoint folder (EXL3 qwen4_exp), or synth:NAME,... (fnx-synth --help)")
      ->required()
      ->type_name("DIR");
  app.add_option("--backend", backend, "Where the model runs")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  app.add_option("--threads", threads, "Threads of the cpu backend; 0: one a core")
      ->check(CLI::Range(0, 1024))
      ->capture_default_str();
  app.add_option("--device", device, "Number of the GPU; the cpu backend has none")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  app.add_option("--vram-limit", vram_limit, "Most device memory to use, as 16GiB; without it, what is free")
      ->type_name("BYTES");
  app.add_option("--expert-lines", expert_lines,
                 "Experts a layer that have a place on the device at a time, the others wait in host memory: a number, "
                 "or auto for what fits")
      ->type_name("N|auto")
      ->capture_default_str();
  app.add_option("--planner", planner,
                 "Where decode rounds with experts in host memory are planned; device: by kernels, which graphs "
                 "record; ahead: the same, and experts that the next layer will probably choose are copied early; "
                 "auto: ahead on a GPU, else host")
      ->check(CLI::IsMember({"auto", "host", "device", "ahead"}))
      ->capture_default_str();
  app.add_flag("--check-lines", check_lines, "Check before each use that a line holds its expert; slow, for debugging");
  app.add_flag("--memory-plan", memory_plan, "Print the device memory that the run needs, and stop");
  app.add_option("--tp", tp, "Ranks that share the experts, one a GPU: started here, or by torchrun, mpirun or srun")
      ->check(CLI::Range(1, kMostRanks))
      ->capture_default_str();
  if (drafts) {
    draft = "auto";
    app.add_option("--draft", draft, "Tokens to draft a round: auto (as measured), off or 1 to 8")
        ->check(CLI::IsMember({"auto", "off"}) | CLI::Range(0, kMostDrafts))
        ->type_name("auto|off|N")
        ->capture_default_str();
  }
  app.add_flag("--accept-raw-norms", accept_raw_norms, "Take norms that average above 0.6 as they are stored");
}

void ModelOptions::add_pages(CLI::App& app) {
  kv_device_tokens = "auto";
  app.add_option(
         "--kv-device-tokens", kv_device_tokens,
         "Tokens of all sequences whose keys and values stay on the device, the newest; older ones wait in host "
         "memory: a number, or auto for all, and for a thirty-second of a device that the model does not fit")
      ->check(CLI::IsMember({"auto"}) | CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->type_name("N|auto")
      ->capture_default_str();
}

void ModelOptions::add_graphs(CLI::App& app, bool both) {
  graph = "auto";
  offers_graph = !both;
  if (offers_graph)
    app.add_option("--graph", graph, "Replay recorded launches of decode rounds; auto: on a GPU")
        ->check(CLI::IsMember({"auto", "off", "on"}))
        ->capture_default_str();
  app.add_option("--inject-capture-failure", inject_capture_failure, "Let the first N recordings fail, for tests")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
}

namespace {
// What the common flags may ask for and no run of this tool can do.
void refuse_impossible(const ModelOptions& o) {
  if (!o.vram_limit.empty()) parse_size(o.vram_limit);  // the cpu backend would not look at it
  if (o.tp != 1 && !o.ranks)
    throw Error(ErrorKind::Unsupported, fmt::format("--tp {}: this tool runs one rank; use --tp 1", o.tp));
}

// Why the cuda backend cannot run the model here; empty when it can.
std::string cuda_problem(int device) {
  if (cuda_runtime_version() == "none") return "no cuda backend in this build";
  const std::vector<GpuInfo> gpus = list_gpus();
  if (gpus.empty()) return "no GPU that this build can drive";
  if (device >= static_cast<int>(gpus.size()))
    return fmt::format("no GPU {} among {}, see --list-devices", device, gpus.size());
  return qualification_problem(gpus[device].architecture);
}

// The GPU of this rank: the one asked for and those after it, a rank each, unless the launcher shows each rank its own.
int device_of(const ModelOptions& o, const Ranks* ranks) {
  if (ranks == nullptr || (ranks->place().launched && ranks->place().socket < 0 && list_gpus().size() == 1))
    return o.device;
  return o.device + ranks->place().local_rank;
}

std::unique_ptr<Backend> choose_backend(const ModelOptions& o, int device, Receipt& receipt) {
  const std::string problem = o.backend == "cpu" ? "" : cuda_problem(device);
  if (o.backend == "cuda" && !problem.empty())
    throw Error(ErrorKind::Unsupported, fmt::format("--backend cuda: {}; or use --backend cpu", problem));
  const bool cuda = o.backend != "cpu" && problem.empty();
  receipt.set_effective("backend", cuda ? "cuda" : "cpu",
                        o.backend != "auto" ? "flag" : "default: " + (cuda ? "a qualified GPU" : problem));
  if (!cuda) {
    if (!o.vram_limit.empty() && !o.memory_plan)
      receipt.add_not_run("--vram-limit", "the cpu backend has no device memory");
    return make_cpu_backend({o.threads, 0});
  }
  receipt.set_effective("device", device, device != o.device ? "rank" : o.device == 0 ? "default" : "flag");
  return make_cuda_backend({device, o.vram_limit.empty() ? 0 : o.models * parse_size(o.vram_limit)});
}

// Whether decode rounds are recorded.
bool choose_graphs(const ModelOptions& o, bool cuda, Receipt& receipt) {
  if (o.graph == "on" && !cuda)
    throw Error(ErrorKind::Unsupported, "--graph on: the cpu backend records no launches; use --graph off");
  const bool graphs = o.graph == "on" || (o.graph == "auto" && cuda);
  if (o.offers_graph) receipt.set_effective("graph", graphs ? "on" : "off", o.graph == "auto" ? "default" : "flag");
  if (o.inject_capture_failure > 0 && !graphs)
    throw Error(ErrorKind::Unsupported,
                fmt::format("--inject-capture-failure {}: nothing is recorded, {}; leave it out",
                            o.inject_capture_failure, cuda ? "--graph off" : "the cpu backend has no launches"));
  return graphs;
}

// Ranks of one model on one kind of backend, or none.
void connect_ranks(OpenedModel& m, Receipt& receipt) {
  const std::string mine = fmt::format("{} on {}", m.digest, m.backend->name());
  const std::vector<std::string> all = m.ranks->channel().exchange(mine);
  for (size_t r = 1; r < all.size(); ++r)
    if (all[r] != all[0])
      throw Error(ErrorKind::Unsupported,
                  fmt::format("rank 0 runs checkpoint {}, rank {} {}; give every rank the same", all[0], r, all[r]));
  const bool cuda = m.backend->name() == "cuda";
  const uint64_t free = cuda ? free_device_bytes() : 0;  // asking makes a context
  m.ranks->connect(cuda);
  if (!cuda) return;
  receipt.set_effective("nccl", nccl_runtime_version(), "library");
  // NCCL takes what it keeps with the first calls; until then a plan cannot count it.
  const auto stream = m.backend->make_stream();
  const int64_t ranks = m.ranks->communicator().world();
  const Buffer memory = m.backend->allocate((ranks + 1) * 4, Space::Device);
  const View words = memory.view(DType::F32, {ranks + 1, 1});
  m.ranks->communicator().all_gather(*stream, words.rows(ranks, 1), words.rows(0, ranks));
  m.ranks->communicator().broadcast(*stream, words.rows(0, 1), 0);
  stream->synchronize();
  m.exchange_bytes = free - std::min(free, free_device_bytes());
}

// The tensors, the config and the receipt's subject.
void open_source(const std::string& model, OpenedModel& m, Receipt& receipt) {
  if (is_synthetic(model)) {
    auto source = std::make_unique<SyntheticSource>(SyntheticSpec::parse(model));
    m.config = ModelConfig::parse(source->config_json());
    m.synthetic_stops = source->stop_ids();
    receipt.add_subject("checkpoint", source->spec().text(), source->bytes(), source->fingerprint());
    receipt.add_not_run("text", "the weights are made up: speed and bits mean something, words do not");
    m.source = std::move(source);
    return;
  }
  auto checkpoint = std::make_unique<Checkpoint>(model);
  m.folder = checkpoint->folder();
  m.config = ModelConfig::load(m.folder / "config.json");
  // Cheap, and enough to tell revisions apart; fnx-fingerprint reads every byte.
  receipt.add_subject("checkpoint", bare_name(model), checkpoint->file_bytes(),
                      fingerprint(*checkpoint, FingerprintKind::Advisory).subject());
  m.source = std::move(checkpoint);
}

// Of a device's memory, what keys and values take by themselves when not everything fits.
constexpr uint64_t kPageShare = 32;

// What one rank holds.
Json shard_json(const Weights& w) {
  const int64_t each = w.config.experts / w.shard.world, first = w.shard.rank * each;
  const bool bank = !w.layers.empty() && w.layers[0].moe.shared_in_bank();
  Json out{{"rank", w.shard.rank},
           {"ranks", w.shard.world},
           {"first_expert", first},
           {"experts", each},
           {"shared_expert", !bank || w.shard.rank == w.shard.world - 1},
           {"draft_head", w.mtp.has_value()}};
  int64_t column = 0;
  for (int r = 0; r < w.shard.rank && !w.head_columns.empty(); ++r) column += w.head_columns[r];
  out["first_head_column"] = column;
  out["head_columns"] = w.head_columns.empty() ? w.config.vocab_size : w.head_columns[w.shard.rank];
  return out;
}
}  // namespace

OpenedModel OpenedModel::open(const ModelOptions& options, ToolRun& run) {
  OpenedModel m;
  refuse_impossible(options);
  m.ranks = run.start_ranks(options.tp);
  open_source(options.model, m, run.receipt());
  m.digest = run.receipt().subjects.back()["fingerprint"]["digest"];
  m.device = device_of(options, m.ranks);
  m.backend = choose_backend(options, m.device, run.receipt());
  const bool cuda = m.backend->name() == "cuda";
  m.planner = cuda ? Planner::Ahead : Planner::Host;
  for (const Planner p : kPlanners)
    if (planner_name(p) == options.planner) m.planner = p, m.planner_asked = true;
  m.graphs = choose_graphs(options, cuda, run.receipt());
  m.inject_capture_failures = options.inject_capture_failure;
  if (m.ranks != nullptr) connect_ranks(m, run.receipt());
  return m;
}

Communicator* OpenedModel::communicator() const { return ranks == nullptr ? nullptr : &ranks->communicator(); }

Shard OpenedModel::shard() const {
  return ranks == nullptr ? Shard{} : Shard{ranks->place().rank, ranks->place().world};
}

std::optional<Tokenizer> OpenedModel::tokenizer() const {
  std::error_code ignored;
  if (folder.empty() || !std::filesystem::exists(folder / "tokenizer.json", ignored)) return std::nullopt;
  return Tokenizer::load(folder);
}

DraftOptions OpenedModel::drafts(const ModelOptions& options, const std::string& why_not, ToolRun& run) const {
  const std::string problem = fnx::has_draft_head(*source, config) ? why_not : "this checkpoint has no draft head";
  DraftOptions d;
  const bool number = options.draft != "auto" && options.draft != "off";
  if (number) d.most = static_cast<int>(whole_number("--draft", options.draft)), d.fixed = true;
  if (options.draft == "auto" && problem.empty()) d.most = kAutoDrafts;
  if (number && d.most > 0 && !problem.empty())
    throw Error(ErrorKind::Unsupported, fmt::format("--draft {}: {}; use --draft off", options.draft, problem));
  run.receipt().set_effective("draft", d.most == 0 ? Json("off") : Json(d.most),
                              options.draft != "auto" ? "flag"
                              : problem.empty()       ? "default: at most, as measured"
                                                      : "default: " + problem);
  return d;
}

MemoryPlan OpenedModel::plan_weights(const ModelOptions& options, EngineOptions engine, const Shard& shard) const {
  engine.ranks = nullptr;  // a plan's engine agrees with nobody
  LoadOptions load = load_options(options);
  load.draft_head = engine.state.draft_head;
  load.shard = shard, load.pools.lines = 0;
  uint64_t limit = options.vram_limit.empty() ? 0 : parse_size(options.vram_limit);
  const std::vector<GpuInfo> gpus = list_gpus();
  if (limit == 0 && device < static_cast<int>(gpus.size())) limit = gpus[device].memory_bytes / options.models;
  if (ranks != nullptr) limit = static_cast<uint64_t>(ranks->communicator().minimum(static_cast<int64_t>(limit)));
  if (options.expert_lines != "auto") {
    load.pools.lines = whole_number("--expert-lines", options.expert_lines);
    return plan_memory(*source, config, load, engine, limit, exchange_bytes);
  }
  MemoryPlan plan = plan_lines(*source, config, load, engine, limit, exchange_bytes);
  if (ranks == nullptr) return plan;
  // The rank with the least room decides for all.
  constexpr int64_t kEveryExpert = INT64_MAX;
  const int64_t lines = ranks->communicator().minimum(plan.lines == 0 ? kEveryExpert : plan.lines);
  if (lines == kEveryExpert || lines == plan.lines) return plan;
  load.pools.lines = lines;
  return plan_memory(*source, config, load, engine, limit, exchange_bytes);
}

bool OpenedModel::plan(const ModelOptions& options, EngineOptions& engine, ToolRun& run) {
  const bool share_pages = options.kv_device_tokens == "auto";
  if (!share_pages && options.kv_device_tokens != "all")
    engine.state.device_tokens = whole_number("--kv-device-tokens", options.kv_device_tokens);
  const bool automatic = options.expert_lines == "auto";
  if (!automatic) expert_lines = whole_number("--expert-lines", options.expert_lines);
  const bool counted = backend->name() == "cuda" || options.memory_plan;
  const int64_t most = config.experts / shard().world;
  if (!automatic && (expert_lines < 1 || expert_lines > most))
    throw Error(ErrorKind::Usage, fmt::format("--expert-lines {}: give auto or 1 to {}, the experts of a layer{}",
                                              options.expert_lines, most, ranks != nullptr ? " on a rank" : ""));
  const auto note_pages = [&](const char* otherwise) {
    if (options.kv_device_tokens == "all") return;
    const bool some = engine.state.device_tokens > 0 && engine.state.device_tokens < engine.state.tokens;
    run.receipt().set_effective("kv_device_tokens", some ? Json(engine.state.device_tokens) : Json("all"),
                                share_pages ? otherwise : "flag");
  };
  if (!counted) {
    note_pages("default: the cpu backend has no device memory");
    run.receipt().set_effective("expert_lines", expert_lines,
                                automatic ? "default: the cpu backend has no device memory" : "flag");
    return false;
  }
  MemoryPlan plan = plan_weights(options, engine, shard());
  if (share_pages && plan.limit > 0) {
    bool tight = plan.lines > 0 || plan.total() > plan.limit;
    if (ranks != nullptr) tight = ranks->communicator().minimum(tight ? 0 : 1) == 0;
    const uint64_t token = std::max<uint64_t>(1, kv_token_bytes(config, engine.state));
    const auto share = std::max<int64_t>(1, static_cast<int64_t>(plan.limit / kPageShare / token));
    if (tight && share < engine.state.tokens) {
      engine.state.device_tokens = share;
      plan = plan_weights(options, engine, shard());
    }
  }
  note_pages("default: the memory plan");
  expert_lines = plan.lines, memory_plan = plan;
  run.receipt().set_effective("expert_lines", expert_lines, automatic ? "default: the memory plan" : "flag");
  run.receipt().set_effective("memory_plan",
                              Json{{"weights_bytes", plan.weights},
                                   {"expert_lines_bytes", plan.pools},
                                   {"states_bytes", plan.states},
                                   {"scratch_bytes", plan.scratch},
                                   {"workspaces_bytes", plan.workspaces},
                                   {"exchange_bytes", plan.exchange},
                                   {"limit_bytes", plan.limit},
                                   {"pinned_host_bytes", plan.host},
                                   {"pinned_host_pages_bytes", plan.host_pages}},
                              "computed");
  if (options.memory_plan) run.print(plan_text(plan));
  require_fit(plan);
  return options.memory_plan;
}

EngineOptions OpenedModel::engine_options(const StateOptions& state, int64_t max_rows) const {
  EngineOptions eo;
  eo.state = state, eo.state.kv_dtype = backend->kv_dtype();
  eo.max_rows = max_rows;
  eo.graphs = graphs, eo.inject_capture_failures = inject_capture_failures;
  eo.ranks = communicator();
  return eo;
}

LoadOptions OpenedModel::load_options(const ModelOptions& options) const {
  LoadOptions load;
  load.accept_raw_norms = options.accept_raw_norms;
  load.shard = shard();
  load.pools.lines = expert_lines, load.pools.planner = planner, load.pools.check_lines = options.check_lines;
  return load;
}

Weights OpenedModel::load(const ModelOptions& options, bool draft_head, ToolRun& run) {
  LoadOptions load = load_options(options);
  load.draft_head = draft_head;
  Weights w = this->load(load, run);
  if (w.pools && graphs && planner == Planner::Host) {
    const char* why = "--planner host waits for every layer's choice";
    if (options.offers_graph)
      run.receipt().set_effective("graph", "off", why);
    else
      run.receipt().add_not_run("recorded rounds", why);
  }
  return w;
}

Weights OpenedModel::load(const LoadOptions& options, ToolRun& run) {
  const double began = now_ns();
  Weights w = Weights::load(*source, config, *backend, options, [&](int64_t done, int64_t total) {
    run.progress("loading layers", done, total);
    if (ranks != nullptr) ranks->communicator().check();
    if (run.stopping()) throw Error(ErrorKind::Internal, "interrupted while loading");
  });
  run.receipt().add_series("load_ns", "ns", "cold", {now_ns() - began});
  if (w.pools)
    run.receipt().set_effective("planner", planner_name(w.pools->options().planner),
                                planner_asked ? "flag" : "default");
  if (w.shard.world > 1) run.receipt().set_effective("shard", shard_json(w), "computed");
  return w;
}

EngineOptions largest_of(const std::vector<EngineOptions>& engines) {
  EngineOptions out = engines.at(0);
  for (const EngineOptions& eo : engines) {
    out.max_rows = std::max(out.max_rows, eo.max_rows);
    if (eo.state.tokens > out.state.tokens) out.state = eo.state;
  }
  return out;
}

Json graphs_json(const GraphCounters& c) {
  return {{"captures", c.captures},
          {"replays", c.replays},
          {"eager", c.eager},
          {"failed", c.failed},
          {"graph_bytes", c.bytes}};
}

void report_pools(const Weights& weights, ToolRun& run, const std::string& part) {
  if (!weights.pools) return;
  const PoolCounters c = weights.pools->counters();
  const PoolCopies copies = weights.pools->copies();
  Json& all = run.receipt().evidence["expert_pools"];
  Json& e = part.empty() ? all : all[part];
  e = {{"lines", weights.pools->options().lines},
       {"policy", pool_policy_name(weights.pools->options().policy)},
       {"planner", planner_name(weights.pools->options().planner)},
       {"checked_lines", weights.pools->options().check_lines},
       {"requests", c.requests},
       {"waves", c.waves},
       {"touches", c.touches},
       {"hits", c.hits},
       {"misses", c.misses},
       {"evictions", c.evictions}};
  for (int k = 0; k < kFillKinds; ++k)
    e[std::string(fill_kind_name(static_cast<FillKind>(k)))] = {{"copies", copies.copies[k]},
                                                                {"bytes", copies.bytes[k]}};
  e["copied_bytes"] = copies.total_bytes;
  e["taken_from_stage_bytes"] = copies.taken_bytes;
  e["in_place"] = {{"reads", copies.in_place}, {"bytes", copies.in_place_bytes}};
  const auto phase = [&](const char* name, const PhaseCounters& p) {
    e[name] = {{"forwards", p.forwards}, {"misses", p.misses}, {"link_bytes", p.bytes}};
  };
  phase("rounds", weights.pools->rounds());
  e["rounds"]["foreseen_bytes"] = weights.pools->rounds().foreseen_bytes;
  e["rounds"]["vain_bytes"] = weights.pools->rounds().vain_bytes;
  phase("prompts", weights.pools->prompts());
  const StreamCounters& t = weights.pools->streamed();
  if (t.forwards == 0) return;
  const TimelineSummary line = weights.pools->timeline();
  e["timeline"] = {{"forwards", line.forwards},           {"window_ns", line.window_ns},
                   {"copying_ns", line.copying_ns},       {"computing_ns", line.computing_ns},
                   {"overlapped_ns", line.overlapped_ns}, {"copied_bytes", line.copied_bytes}};
  e["streamed"] = {{"forwards", t.forwards},
                   {"batches", t.batches},
                   {"needed", t.needed},
                   {"copied_ahead", t.ahead},
                   {"copied_on_demand", t.demand}};
}

void report_pages(const StatePool& state, ToolRun& run) {
  if (!state.host_tier()) return;
  const PageTraffic t = state.traffic();
  run.receipt().evidence["kv_pages"] = {{"page_tokens", state.page_tokens()}, {"on_device", state.pages().near()},
                                        {"host_bytes", state.host_bytes()},   {"spilled", t.pages.spilled},
                                        {"spilled_bytes", t.spilled_bytes},   {"never_on_device", t.pages.born_far},
                                        {"freed_in_host", t.pages.freed_far}, {"staged", t.staged},
                                        {"staged_bytes", t.staged_bytes},     {"rows_in_place", t.rows_in_place}};
}

}  // namespace fnx
