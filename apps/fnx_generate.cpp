// Generates text from a checkpoint.
#include <fmt/format.h>

#include <numeric>
#include <optional>

#include "kernels/error.h"
#include "libcore/cli/model_options.h"
#include "libcore/cli/options.h"
#include "libcore/cli/outputs.h"
#include "libcore/cli/prompts.h"
#include "libcore/cli/routing_options.h"
#include "libcore/engine/scheduler.h"
#include "libcore/format/safetensors_writer.h"
#include "libcore/text/stream_decoder.h"

using namespace fnx;

namespace {

struct Options {
  ModelOptions model;
  PromptOptions prompts;
  RoutingOptions routing;
  int64_t max_tokens = 128, chunk_rows = 256, parallel = 4;
  bool ignore_eos = false;
  SampleParams sampling;
  std::string kv_dtype = "auto", logits_file, logits_rows = "last", format = "text";
  bool mtp_logits = false, reuse = false;

  void add(CLI::App& app) {
    model.ranks = true;
    model.add(app, true);
    model.add_pages(app);
    model.add_graphs(app);
    prompts.add(app);
    routing.add(app);
    app.add_option("--max-tokens", max_tokens, "Most tokens to generate a prompt")
        ->check(CLI::Range(int64_t{0}, int64_t{1} << 24))
        ->capture_default_str();
    app.add_flag("--ignore-eos", ignore_eos, "Go on after a stop token");
    app.add_option("--temperature", sampling.temperature, "0 takes the likeliest token")
        ->check(CLI::Range(0.0, 1e3))
        ->capture_default_str();
    app.add_option("--top-k", sampling.top_k, "Draw from the K likeliest; 0: all")
        ->check(CLI::NonNegativeNumber)
        ->capture_default_str();
    app.add_option("--top-p", sampling.top_p, "Draw from the likeliest that hold this share")
        ->check(CLI::Range(1e-6, 1.0))
        ->capture_default_str();
    app.add_option("--min-p", sampling.min_p, "Leave out tokens below this share of the likeliest")
        ->check(CLI::Range(0.0, 1.0))
        ->capture_default_str();
    app.add_option("--seed", sampling.seed, "Of the draws")->capture_default_str();
    app.add_option("--chunk-rows", chunk_rows, "Prompt rows of a sequence in one forward")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_option("--parallel", parallel, "Sequences that run at once")
        ->check(CLI::Range(1, kMostSequences))
        ->capture_default_str();
    app.add_option("--kv-dtype", kv_dtype, "How keys and values are stored; auto: bf16 on a GPU, else fp32")
        ->check(CLI::IsMember({"auto", "fp32", "bf16"}))
        ->capture_default_str();
    app.add_option("--format", format, "How one prompt's answer is printed")
        ->check(CLI::IsMember({"text", "ids", "jsonl"}))
        ->capture_default_str();
    app.add_option("--logits", logits_file, "Write logits [rows, vocab] and tokens to a safetensors file")
        ->type_name("FILE");
    app.add_option("--logits-rows", logits_rows, "last: rows that predict generated tokens; all: every row")
        ->check(CLI::IsMember({"last", "all"}))
        ->capture_default_str();
    app.add_flag("--reuse", reuse, "Go on from prefixes that prompts share, to the same answers");
    app.add_flag("--mtp-logits", mtp_logits, "Also the draft head's logits of every row");
  }
};

constexpr int64_t kLeastReuse = 32;  // tokens: below, a copy of the states costs more than the rows

// Everything one prompt produced.
struct Answer {
  std::vector<int32_t> tokens;
  std::string text;
  std::optional<Finish> finish;
  std::vector<float> logits, draft_logits;
  std::optional<StreamDecoder> decoder;
};

// The result of a prompt as JSON; with `hashes`, as the receipt keeps it.
Json answer_json(const Json& id, const Answer& a, bool has_text, bool hashes) {
  Json j = {{"id", id}, {"tokens", a.tokens}};
  if (has_text) j["text"] = a.text;
  j["finish"] = finish_name(a.finish.value_or(Finish::Interrupted));
  j["token_hash"] = token_hash(a.tokens);
  if (hashes && has_text) j["text_sha256"] = sha256_hex(a.text.data(), a.text.size());
  return j;
}

void write_logits(const std::string& file, const std::vector<Prompt>& prompts, std::vector<Answer>& answers,
                  int64_t vocab) {
  std::vector<NamedArray> arrays;
  std::vector<std::vector<int32_t>> tokens;
  tokens.reserve(prompts.size());
  const auto view = [](auto& v, DType dtype, int64_t width) {
    View out{reinterpret_cast<std::byte*>(v.data()), dtype, Space::Host, 1, {static_cast<int64_t>(v.size())}};
    return width == 0 ? out : out.reshape({static_cast<int64_t>(v.size()) / width, width});
  };
  for (size_t i = 0; i < prompts.size(); ++i) {
    const std::string prefix = prompts.size() == 1 ? "" : fmt::format("{}.", i);
    tokens.push_back(prompts[i].ids);
    tokens.back().insert(tokens.back().end(), answers[i].tokens.begin(), answers[i].tokens.end());
    arrays.push_back({prefix + "tokens", view(tokens.back(), DType::I32, 0)});
    arrays.push_back({prefix + "logits", view(answers[i].logits, DType::F32, vocab)});
    if (!answers[i].draft_logits.empty())
      arrays.push_back({prefix + "mtp_logits", view(answers[i].draft_logits, DType::F32, vocab)});
  }
  write_safetensors(file, arrays);
}

std::vector<Request> make_requests(const Options& o, const std::vector<Prompt>& prompts, const ModelConfig& config,
                                   const std::vector<int32_t>& stops) {
  std::vector<Request> requests;
  for (const Prompt& p : prompts) {
    const auto length = static_cast<int64_t>(p.ids.size()), room = config.max_position_embeddings - length;
    const std::string who = p.id.is_null() ? "the prompt" : "prompt " + p.id.dump();
    require_context(config, length + std::min<int64_t>(o.max_tokens, 1), "it", who + " with the shortest answer");
    for (int32_t id : p.ids)
      if (id >= config.vocab_size)
        throw Error(ErrorKind::Input,
                    fmt::format("{} holds token id {}, the vocabulary has {}", who, id, config.vocab_size));
    Request r;
    r.prompt = p.ids;
    r.max_tokens = std::min(o.max_tokens, room);
    if (!o.ignore_eos) r.stop_ids = stops;
    r.sampling = o.sampling;
    requests.push_back(std::move(r));
  }
  return requests;
}

void generate(const Options& o, ToolRun& run) {
  Receipt& receipt = run.receipt();
  OpenedModel model = OpenedModel::open(o.model, run);
  const std::optional<Tokenizer> tokenizer = model.tokenizer();
  if (tokenizer)
    receipt.add_subject("tokenizer", "tokenizer.json", tokenizer->file_bytes(),
                        make_fingerprint("file", "xxh3-128", tokenizer->fingerprint(), false));
  const std::vector<Prompt> prompts = read_prompts(o.prompts, tokenizer ? &*tokenizer : nullptr,
                                                   tokenizer ? tokenizer->vocab_limit() : model.config.vocab_size);
  const std::vector<int32_t> stops = o.ignore_eos ? std::vector<int32_t>{} : model.stop_ids();
  std::vector<Request> requests = make_requests(o, prompts, model.config, stops);
  if (o.reuse && (o.mtp_logits || o.logits_rows == "all"))
    throw Error(ErrorKind::Usage, "--reuse leaves rows out: it goes with neither --mtp-logits nor --logits-rows all");
  require_outputs(run, {{"--logits", o.logits_file}, {"--trace-experts", o.routing.trace_file}});
  if (o.reuse) plan_reuse(requests, kLeastReuse);
  if (o.mtp_logits && !has_draft_head(*model.source, model.config))
    throw Error(ErrorKind::Unsupported, "--mtp-logits: this checkpoint has no draft head");
  receipt.set_effective("stop_ids", stops, o.ignore_eos ? "flag" : "config");
  const DType kv_dtype =
      o.kv_dtype == "auto" ? model.backend->kv_dtype() : (o.kv_dtype == "bf16" ? DType::BF16 : DType::F32);
  receipt.set_effective("kv_dtype", kv_dtype == DType::BF16 ? "bf16" : "fp32",
                        o.kv_dtype == "auto" ? "default" : "flag");

  RoutingRecord routing(o.routing, *model.source, model.config, model.digest, model.shard());
  if (routing.reads_choices() && model.graphs) {
    model.graphs = false;
    receipt.set_effective("graph", "off", "every layer's choice is read by the host, as asked for");
  }
  const int64_t parallel = std::min<int64_t>(o.parallel, std::max<size_t>(1, requests.size()));
  StateOptions state = state_for(requests, parallel);
  const DraftOptions draft = model.drafts(o.model,
                                          o.mtp_logits ? "--mtp-logits shows the head in plain rounds"
                                          : !o.routing.trace_file.empty() ? "--trace-experts records plain rounds"
                                                                          : "",
                                          run);
  state.draft_head = o.mtp_logits || draft.most > 0, state.trials = draft.most;
  EngineOptions eo = model.engine_options(state, max_rows_for(requests, parallel, o.chunk_rows, state.trials));
  eo.state.kv_dtype = kv_dtype;
  if (model.plan(o.model, eo, run)) return;
  const Weights weights = model.load(o.model, eo.state.draft_head, run);
  routing.warm(weights);
  Engine engine(weights, *model.backend, eo);
  receipt.set_effective("parallel", parallel, parallel == o.parallel ? "flag" : "prompts");
  receipt.set_effective("state_bytes", engine.state().device_bytes(), "computed");

  routing.watch(engine);
  const bool jsonl = !o.prompts.jsonl.empty() || o.format == "jsonl", ids_only = !tokenizer || o.format == "ids";
  std::vector<Answer> answers(prompts.size());
  for (Answer& a : answers)
    if (tokenizer) a.decoder.emplace(*tokenizer);
  size_t printed = 0;
  const auto print_finished = [&] {
    for (; jsonl && printed < answers.size() && answers[printed].finish; ++printed)
      run.print(answer_json(prompts[printed].id, answers[printed], tokenizer.has_value(), false).dump() + "\n");
  };
  // Text waits until its token turns out not to be the stop token that ends the answer.
  SchedulerEvents events;
  events.token = [&](size_t i, int32_t token) {
    Answer& a = answers[i];
    a.tokens.push_back(token);
    const bool stop = std::find(stops.begin(), stops.end(), token) != stops.end();
    std::string piece;
    if (tokenizer && !stop) a.text += piece = a.decoder->push(token);
    if (!jsonl) run.print(ids_only ? fmt::format("{}{}", a.tokens.size() > 1 ? " " : "", token) : piece);
  };
  events.finished = [&](size_t i, Finish why) {
    Answer& a = answers[i];
    std::string piece;
    if (tokenizer) a.text += piece = a.decoder->finish();
    a.finish = why;
    if (!jsonl) run.print(ids_only ? "\n" : piece + "\n");
    print_finished();
  };
  if (!o.logits_file.empty())
    events.logits = [&](size_t i, std::span<const float> row) {
      answers[i].logits.insert(answers[i].logits.end(), row.begin(), row.end());
    };
  events.draft_logits = [&](size_t i, std::span<const float> row) {
    answers[i].draft_logits.insert(answers[i].draft_logits.end(), row.begin(), row.end());
  };
  events.prompt_rows = [&](int64_t done, int64_t total) { run.progress("prompt rows", done, total); };
  events.stop = [&] { return run.stop_together(); };

  SchedulerOptions so;
  so.chunk_rows = o.chunk_rows;
  so.parallel = parallel;
  so.valid_ids = tokenizer ? tokenizer->vocab_limit() : 0;
  so.all_logits = !o.logits_file.empty() && o.logits_rows == "all";
  so.draft_logits = o.mtp_logits;
  so.draft = draft;
  const SchedulerStats stats = run_requests(engine, requests, so, events);

  if (!o.logits_file.empty() && !run.stopping() && run.writes())
    write_logits(o.logits_file, prompts, answers, model.config.vocab_size);
  Json list = Json::array();
  for (size_t i = 0; i < prompts.size(); ++i)
    list.push_back(answer_json(prompts[i].id, answers[i], tokenizer.has_value(), true));
  receipt.result["answers"] = list;
  receipt.evidence = {{"forwards", stats.forwards},
                      {"prompt_rows", stats.prompt_rows},
                      {"decode_rows", stats.decode_rows},
                      {"selecting_rows", stats.selecting_rows}};
  if (draft.most > 0) {
    receipt.evidence["drafted_tokens"] = stats.drafted, receipt.evidence["kept_drafts"] = stats.drafts_kept;
    std::vector<int64_t> depths(static_cast<size_t>(draft.most) + 1);
    for (const DraftRound& r : stats.draft_rounds) ++depths[static_cast<size_t>(r.depth)];
    receipt.evidence["rounds_by_draft_depth"] = depths;
  }
  if (o.reuse) {
    receipt.evidence["reused_requests"] = stats.reused_requests;
    receipt.evidence["reused_tokens"] = stats.reused_tokens;
    receipt.evidence["snapshots"] = stats.snapshots;
    receipt.evidence["snapshot_bytes"] = stats.snapshot_bytes;
  }
  routing.finish(run);
  report_pools(weights, run);
  report_pages(engine.state(), run);
  if (eo.graphs) receipt.evidence["graphs"] = graphs_json(engine.graph_counters());
  if (model.backend->device_bytes() > 0) receipt.evidence["device_bytes"] = model.backend->device_bytes();
  if (!stats.prompt_ns.empty()) receipt.add_series("prompt_forward_ns", "ns", "warm", stats.prompt_ns);
  if (!stats.decode_ns.empty()) receipt.add_series("decode_forward_ns", "ns", "warm", stats.decode_ns);
  if (!stats.first_token_ns.empty()) receipt.add_series("first_token_ns", "ns", "warm", stats.first_token_ns);
  const double prompt_s = std::accumulate(stats.prompt_ns.begin(), stats.prompt_ns.end(), 0.0) / 1e9;
  const double decode_s = std::accumulate(stats.decode_ns.begin(), stats.decode_ns.end(), 0.0) / 1e9;
  run.info(fmt::format(
      "{} prompt rows in {:.2f} s, {} decode rows in {:.2f} s{}", stats.prompt_rows, prompt_s, stats.decode_rows,
      decode_s,
      decode_s > 0 ? fmt::format(" ({:.0f} tokens/s)", static_cast<double>(stats.decode_rows) / decode_s) : ""));
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const ToolInfo info{"fnx-generate",
                      "Generates text from an EXL3 qwen4_exp checkpoint.",
                      {"fnx-generate --model fixtures/flashnext-tiny --chat --thinking off --prompt \"What is the "
                       "capital of Paraguay?\"",
                       "fnx-generate --model DIR --jsonl prompts.jsonl --temperature 0.7 --seed 1 > answers.jsonl"}};
  return run_tool(
      argc, argv, info, [&](CLI::App& app) { options.add(app); }, [&](ToolRun& run) { generate(options, run); });
}
