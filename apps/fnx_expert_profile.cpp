// fnx-expert-profile: looks after profiles of expert use, and replays recorded routing through pool policies.
#include <fmt/format.h>

#include <optional>

#include "kernels/error.h"
#include "libcore/base/path_text.h"
#include "libcore/cli/rows.h"
#include "libcore/cli/tool.h"
#include "libcore/engine/profile_report.h"
#include "libcore/engine/replay_table.h"
#include "libcore/format/fingerprint.h"

using namespace fnx;

namespace {

struct Options {
  std::string action, output, model, profile, lines, decay_touches, format = "table";
  std::vector<std::string> files, train, test;
  int64_t percent = -1;
  double link_gbps = 25;
};

[[noreturn]] void usage(const std::string& what) { throw Error(ErrorKind::Usage, what); }

Json file_print(const std::string& digest) { return make_fingerprint("file", "xxh3-128", digest, false); }

ExpertProfile load_profile(const std::string& file, ToolRun& run) {
  ExpertProfile p = ExpertProfile::load(file);
  run.receipt().add_subject("profile", bare_name(file), std::filesystem::file_size(file), file_print(p.digest));
  return p;
}

RoutingTrace load_trace(const std::string& file, ToolRun& run) {
  RoutingTrace t = RoutingTrace::load(file);
  run.receipt().add_subject("trace", bare_name(file), std::filesystem::file_size(file), file_print(t.digest));
  return t;
}

void verify(const Options& o, ToolRun& run) {
  std::optional<ExpertIdentity> wanted;
  if (!o.model.empty()) {
    const Checkpoint checkpoint(o.model);
    wanted = ExpertIdentity::of(ModelConfig::load(checkpoint.folder() / "config.json"),
                                fingerprint(checkpoint, FingerprintKind::Advisory).digest);
  } else {
    run.receipt().add_not_run("checkpoint and geometry", "compared when --model is given");
  }
  int64_t different = 0;
  for (const std::string& file : o.files) {
    const ExpertProfile p = load_profile(file, run);
    if (wanted) wanted->rank = p.identity.rank, wanted->world = p.identity.world;
    const std::string d = wanted ? p.identity.difference(*wanted) : "";
    different += d.empty() ? 0 : 1;
    run.receipt().result["rows"].push_back(
        Json{{"profile", bare_name(file)}, {"digest", p.digest}, {"difference", d.empty() ? Json() : Json(d)}});
  }
  run.receipt().add_gate("differences", static_cast<double>(different), "==", 0, "profiles");
}

// Of the misses of a one-row forward; times stay out of the result.
Json link_ms(const Options& o, const Json& row) {
  const Json& bytes = row["decode_row_bytes"];
  return bytes.is_null() ? Json() : Json(bytes.get<double>() / (o.link_gbps * 1e6));
}

void replay(const Options& o, ToolRun& run) {
  if (o.test.empty()) usage("replay needs --test TRACE");
  if (!o.train.empty() && !o.profile.empty()) usage("give --train or --profile, not both");
  ReplayTable table;
  for (const std::string& file : o.test) table.add_test(load_trace(file, run), bare_name(file));
  for (const std::string& file : o.train) table.add_train(load_trace(file, run), bare_name(file));
  if (!o.profile.empty()) table.set_profile(load_profile(o.profile, run), bare_name(o.profile));
  if (!o.decay_touches.empty()) table.decay_touches = parse_list(o.decay_touches);
  if (!o.lines.empty()) table.lines = parse_list(o.lines);
  table.stopping = [&] { return run.stopping(); };
  Json& result = run.receipt().result;
  table.identity().write(result);
  result["rows"] = table.run();
  const PoolCounters& c = table.counters();
  Json& evidence = run.receipt().evidence;
  evidence = {
      {"requests", c.requests}, {"waves", c.waves}, {"touches", c.touches}, {"hits", c.hits}, {"misses", c.misses}};
  for (int k = 0; k < kFillKinds; ++k)
    evidence[fmt::format("fills_{}", fill_kind_name(static_cast<FillKind>(k)))] =
        c.fills_by_kind[static_cast<size_t>(k)];
  for (const Json& row : result["rows"]) evidence["decode_row_link_ms"].push_back(link_ms(o, row));
  run.receipt().add_not_run("speed", "times are bytes over the link rate that was given; nothing was copied");
}

void need_files(const Options& o, size_t low, size_t high) {
  if (o.files.size() < low || o.files.size() > high)
    usage(fmt::format(
        "{} takes {}, {} given", o.action,
        low == high ? fmt::format("{} profile{}", low, low == 1 ? "" : "s") : fmt::format("{} profiles or more", low),
        o.files.size()));
}

void write_profile(const Options& o, const ExpertProfile& p, ToolRun& run) {
  if (o.output.empty()) usage(o.action + " needs --output FILE");
  p.save(o.output);
  describe(p, run.receipt().result);
  run.receipt().result["profile"] = bare_name(o.output);
}

void work(const Options& o, ToolRun& run) {
  Json& result = run.receipt().result;
  constexpr size_t kAny = 1 << 20;
  if (o.action == "replay") {
    need_files(o, 0, 0);
    replay(o, run);
  } else if (o.action == "verify") {
    need_files(o, 1, kAny);
    verify(o, run);
  } else if (o.action == "merge") {
    need_files(o, 2, kAny);
    ExpertProfile sum = load_profile(o.files[0], run);
    for (size_t i = 1; i < o.files.size(); ++i) sum.merge(load_profile(o.files[i], run));
    write_profile(o, sum, run);
  } else if (o.action == "diff") {
    need_files(o, 2, 2);
    const ExpertProfile a = load_profile(o.files[0], run), b = load_profile(o.files[1], run);
    const std::vector<int64_t> given = o.lines.empty() ? std::vector<int64_t>{} : parse_list(o.lines);
    if (given.size() > 1) usage(fmt::format("--lines {}: diff takes one number", o.lines));
    const int64_t lines = given.empty() ? std::max<int64_t>(1, a.identity.experts / 4) : given.front();
    result["identity_difference"] = a.identity.difference(b.identity);
    result["rows"] = diff_rows(a, b, lines);
    int64_t different = 0;
    for (size_t i = 0; i < a.counts.size(); ++i) different += a.counts[i] != b.counts[i] ? 1 : 0;
    run.receipt().add_gate("different_counts", static_cast<double>(different), "==", 0, "counts");
  } else {
    need_files(o, 1, 1);
    ExpertProfile p = load_profile(o.files[0], run);
    describe(p, result);
    if (o.action == "show") result["rows"] = show_rows(p);
    if (o.action == "export") result["counts"] = count_matrix(p);
    if (o.action == "warm-plan") {
      if (o.lines.empty()) usage("warm-plan needs --lines");
      result["rows"] = warm_rows(p, parse_list(o.lines));
    }
    if (o.action == "decay") {
      for (int64_t l = 0; l < p.identity.all_layers(); ++l) p.decay(l, o.percent < 0 ? p.decay_percent : o.percent);
      write_profile(o, p, run);
    }
  }
  Json shown = result;
  if (o.action == "replay")
    for (Json& row : shown["rows"]) row["decode_row_link_ms"] = link_ms(o, row);
  run.print(o.action == "export" && o.format != "json" ? rows_text(count_rows(shown["counts"], shown["layers"]), "csv")
                                                       : result_text(shown, o.format));
}

}  // namespace

int main(int argc, char** argv) {
  Options o;
  const ToolInfo info{"fnx-expert-profile",
                      "Looks after profiles of expert use, and replays recorded routing through pool policies.",
                      {"fnx-expert-profile show DIR/*.fnxprofile",
                       "fnx-expert-profile replay --train a.trace --test b.trace --lines 64-256*2 --link-gbps 25",
                       "fnx-expert-profile export FILE --format csv > layers-x-experts.csv"}};
  return run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("action", o.action, "show, verify, merge, diff, decay, export, warm-plan or replay")
            ->required()
            ->check(CLI::IsMember({"show", "verify", "merge", "diff", "decay", "export", "warm-plan", "replay"}));
        app.add_option("files", o.files, "Profiles")->type_name("FILE");
        app.add_option("--output", o.output, "Where merge and decay write")->type_name("FILE");
        app.add_option("--model", o.model, "verify: the checkpoint that the profiles should be of")->type_name("DIR");
        app.add_option("--percent", o.percent, "decay: of every count; by default the profile's own")
            ->check(CLI::Range(0, 100))
            ->default_str("");
        app.add_option("--lines", o.lines, "Expert lines a layer: of warm-plan and replay a list, of diff one number")
            ->type_name("LIST");
        app.add_option("--test", o.test, "replay: traces to report on")->type_name("TRACE");
        app.add_option("--train", o.train, "replay: traces to make a profile of, reported apart")->type_name("TRACE");
        app.add_option("--profile", o.profile, "replay: a profile to start warm from, in place of --train")
            ->type_name("FILE");
        app.add_option("--decay-touches", o.decay_touches,
                       "replay: touches of a layer between halvings of lfu-decay; by default four an expert")
            ->type_name("LIST");
        app.add_option("--link-gbps", o.link_gbps, "replay: gigabytes (10^9) a second from host to device")
            ->check(CLI::Range(1e-3, 1e6));
        app.add_option("--format", o.format, "Form of the output; export prints csv unless json is asked for")
            ->check(CLI::IsMember({"table", "json", "csv"}));
      },
      [&](ToolRun& run) { work(o, run); });
}
