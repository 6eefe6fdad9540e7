// fnx-generate's traces and profiles, and fnx-expert-profile, as a user runs them.
#include <doctest/doctest.h>

#include <fmt/format.h>

#include <fstream>

#include "kernels/expert_planner.h"
#include "libcore/engine/expert_profile.h"
#include "tests/support/routing.h"
#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;
namespace fs = std::filesystem;

namespace {

const std::string kTiny = FNX_SOURCE_DIR "/fixtures/flashnext-tiny";
constexpr const char* kTool = "fnx-expert-profile";

RunResult generate(std::vector<std::string> more) {
  more.insert(more.begin(), {tool_path("fnx-generate"), "--model", kTiny, "--ignore-eos"});
  return run_command(more);
}

RunResult profile_tool(std::vector<std::string> more) {
  more.insert(more.begin(), tool_path(kTool));
  return run_command(more);
}

Json result_of(const RunResult& run, int code = 0) {
  CAPTURE(run.err);
  REQUIRE(run.exit_code == code);
  return read_receipt(run, kTool)["result"];
}

void refused(const RunResult& run, int code, const std::string& words) {
  CAPTURE(run.err);
  CHECK(run.exit_code == code);
  CHECK(run.out == "");
  CHECK(run.err.find(words) != std::string::npos);
}

fs::path only_file(const fs::path& folder) {
  REQUIRE(std::distance(fs::directory_iterator(folder), {}) == 1);
  return fs::directory_iterator(folder)->path();
}

const char* const kPrompts =
    "{\"prompt\": \"In the beginning God created\"}\n{\"prompt\": \"The capital of Peru is\"}\n{\"prompt\": \"And\"}\n";

}  // namespace

TEST_CASE("expert_profile tool: a run's counts are the same however its rows are grouped, and its answers unchanged") {
  const TempDir dir;
  write_file(dir / "prompts", kPrompts);
  const std::vector<std::string> base = {"--jsonl", (dir / "prompts").string(), "--max-tokens", "6"};
  const RunResult plain = generate(base);
  Json first;
  int number = 0;
  for (const auto& grouping :
       std::vector<std::vector<std::string>>{{"--parallel", "1", "--chunk-rows", "2"}, {"--parallel", "3"}}) {
    std::vector<std::string> argv = base;
    const fs::path folder = dir / std::to_string(number++), trace = dir / fmt::format("{}.trace", number);
    argv.insert(argv.end(), grouping.begin(), grouping.end());
    argv.insert(argv.end(), {"--profile-dir", folder.string(), "--trace-experts", trace.string()});
    const RunResult run = generate(argv);
    REQUIRE(run.exit_code == 0);
    CHECK(run.out == plain.out);
    const Json receipt = read_receipt(run, "fnx-generate");
    CHECK(receipt["result_digest"] == read_receipt(plain, "fnx-generate")["result_digest"]);
    const Json counts = result_of(profile_tool({"export", only_file(folder).string()}))["counts"];
    if (first.is_null()) first = counts;
    CHECK(counts == first);

    const RoutingTrace t = RoutingTrace::load(trace);
    CHECK(receipt["evidence"]["traced_forwards"] == t.forwards.size());
    CHECK(receipt["evidence"]["forwards"] == t.forwards.size());
    const int64_t rows =
        receipt["evidence"]["prompt_rows"].get<int64_t>() + receipt["evidence"]["decode_rows"].get<int64_t>();
    CHECK(t.rows() == rows);
    ExpertProfile from_trace(t.identity);
    for (int64_t l = 0; l < t.identity.all_layers(); ++l)
      for (const RoutingTrace::Forward& f : t.forwards) from_trace.count(l, t.layer(f, l));
    CHECK(from_trace.counts == ExpertProfile::load(only_file(folder)).counts);
    CHECK(from_trace.total(7) == static_cast<uint64_t>(4 * rows));
    CHECK(from_trace.total(8) == 0);  // no draft head in this run
  }
}

TEST_CASE("expert_profile tool: traces the routed experts alone when the shared one lies in their bank") {
  const TempDir dir;
  const std::string trace = (dir / "trace").string();
  const RunResult run = run_command({tool_path("fnx-generate"), "--model", "synth:tiny,bits=6,layers=2", "--token-ids",
                                     "1,2,3", "--max-tokens", "3", "--ignore-eos", "--trace-experts", trace});
  REQUIRE(run.exit_code == 0);
  CHECK(read_receipt(run, "fnx-generate")["evidence"]["expert_choices"] == std::to_string(2 * 5 * 4));
  const RoutingTrace t = RoutingTrace::load(trace);
  for (const RoutingTrace::Forward& f : t.forwards)
    for (int64_t l = 0; l < 2; ++l) {
      const std::vector<int32_t> ids = t.layer(f, l);
      for (size_t i = 0; i < ids.size(); i += 4)
        CHECK(distinct_experts(std::span(ids).subspan(i, 4), static_cast<int32_t>(t.identity.experts)).size() == 4);
    }
}

TEST_CASE("expert_profile tool: a second run adds to the profile, and the draft head's rows are in it when it ran") {
  const TempDir dir;
  const std::vector<std::string> argv = {"--token-ids",   "1,2,3,4,5,6,7,8,9,10", "--max-tokens", "3",
                                         "--profile-dir", (dir / "p").string(),   "--mtp-logits"};
  REQUIRE(generate(argv).exit_code == 0);
  const ExpertProfile once = ExpertProfile::load(only_file(dir / "p"));
  CHECK(once.total(0) == 4 * 12);
  CHECK(once.total(8) == 4 * 11);  // the last row waits for its next token
  const RunResult second = generate(argv);
  CHECK(read_receipt(second, "fnx-generate")["evidence"]["profile_earlier_runs"] == 1);
  const ExpertProfile twice = ExpertProfile::load(only_file(dir / "p"));
  CHECK(twice.runs == 2);
  for (size_t i = 0; i < once.counts.size(); ++i) CHECK(twice.counts[i] == once.counts[i] + once.counts[i] * 90 / 100);
}

TEST_CASE("expert_profile tool: generation refuses a profile of another kind before it starts, and leaves it alone") {
  const TempDir dir;
  REQUIRE(generate({"--token-ids", "1,2", "--max-tokens", "1", "--profile-dir", dir.path().string()}).exit_code == 0);
  const fs::path file = only_file(dir.path());
  ExpertProfile p = ExpertProfile::load(file);
  p.identity.experts_per_token = 5;
  p.save(file);
  refused(generate({"--token-ids", "1,2", "--max-tokens", "1", "--profile-dir", dir.path().string()}), 3,
          "experts_per_token 5, not 4");
  CHECK(ExpertProfile::load(file).runs == 1);
}

TEST_CASE("expert_profile tool: verify holds a profile to its checkpoint, and refuses what is none") {
  const TempDir dir;
  REQUIRE(generate({"--token-ids", "1,2", "--max-tokens", "1", "--profile-dir", dir.path().string()}).exit_code == 0);
  const std::string file = only_file(dir.path()).string(), other = (dir / "other").string(),
                    bad = (dir / "bad").string();
  CHECK(result_of(profile_tool({"verify", file, "--model", kTiny}))["rows"][0]["difference"].is_null());
  ExpertProfile(make_identity()).save(other);
  const Json rows = result_of(profile_tool({"verify", file, other, "--model", kTiny}), 1)["rows"];
  CHECK(rows[1]["difference"].get<std::string>().find("layers 3, not 8") != std::string::npos);
  CHECK(profile_tool({"verify", other}).exit_code == 0);
  write_file(bad, "fnxprof");
  refused(profile_tool({"verify", bad}), 3, "bad: is cut short");
  refused(profile_tool({"show", (dir / "none").string()}), 3, "none");
  refused(profile_tool({"show"}), 2, "show takes 1 profile, 0 given");
  refused(profile_tool({"merge", file}), 2, "merge takes 2 profiles or more");
  refused(profile_tool({"bake", file}), 2, "bake");
}

TEST_CASE("expert_profile tool: merge, decay, diff, show, warm-plan and export agree with the counts") {
  const TempDir dir;
  ExpertProfile a(make_identity()), b(make_identity());
  a.runs = b.runs = 1;
  for (int64_t e = 0; e < 8; ++e) a.layer(1)[e] = static_cast<uint64_t>(10 * e), b.layer(1)[e] = 70u - 10 * e;
  const std::string fa = (dir / "a").string(), fb = (dir / "b").string(), out = (dir / "out").string();
  a.save(fa), b.save(fb);

  CHECK(result_of(profile_tool({"merge", fa, fb, "--output", out}))["runs"] == 2);
  CHECK(ExpertProfile::load(out).layer(1)[3] == 70);
  result_of(profile_tool({"decay", out, "--output", out, "--percent", "50"}));
  CHECK(ExpertProfile::load(out).layer(1)[3] == 35);
  refused(profile_tool({"decay", out}), 2, "--output");

  CHECK(profile_tool({"diff", fa, fa}).exit_code == 0);
  CHECK(profile_tool({"diff", fa, fa, "--lines", "4,8"}).exit_code == 2);
  const Json diff = result_of(profile_tool({"diff", fa, fb, "--lines", "4"}), 1)["rows"];
  CHECK(diff[1]["common_hottest"] == 0);
  CHECK(diff[1]["distance_ratio"].get<double>() == doctest::Approx(16.0 / 28));
  CHECK(diff[0]["distance_ratio"] == 0.0);

  const Json shown = result_of(profile_tool({"show", fa}))["rows"];
  REQUIRE(shown.size() == 4);
  CHECK(shown[1]["choices"] == 280);
  CHECK(shown[1]["experts_used"] == 7);
  CHECK(shown[1]["half_ratio"].get<double>() == doctest::Approx(22.0 / 28));
  CHECK(shown[3]["draft"] == true);

  const Json plan = result_of(profile_tool({"warm-plan", fa, "--lines", "2,4"}))["rows"];
  REQUIRE(plan.size() == 8);
  CHECK(plan[1]["experts"] == Json::array({7, 6}));
  CHECK(plan[5]["experts"] == Json::array({7, 6, 5, 4}));
  CHECK(plan[0]["experts"].empty());
  refused(profile_tool({"warm-plan", fa, "--lines", "9"}), 2, "9 expert lines");
  refused(profile_tool({"warm-plan", fa}), 2, "needs --lines");

  const RunResult csv = profile_tool({"export", fa, "--format", "csv"});
  CHECK(std::count(csv.out.begin(), csv.out.end(), '\n') == 33);
  CHECK(csv.out.starts_with("layer,draft,expert,count\n0,false,0,0\n"));
  CHECK(csv.out.find("\n1,false,7,70\n") != std::string::npos);
  CHECK(Json::parse(profile_tool({"export", fa, "--format", "json"}).out)["counts"][1][7] == 70);
}

TEST_CASE("expert_profile tool: replay reports each policy beside the best possible, trained and held out apart") {
  const TempDir dir;
  const ExpertIdentity id = make_identity(2, 16, 3);
  const std::string train = (dir / "train").string(), test = (dir / "test").string();
  write_trace(train, id, 6, 80, 1);
  write_trace(test, id, 6, 50, 2);
  const RunResult run =
      profile_tool({"replay", "--train", train, "--test", test, "--lines", "2,8,16", "--link-gbps", "2"});
  const Json rows = result_of(run)["rows"];
  REQUIRE(rows.size() == 2 * 3 * 2 * 2);
  for (const Json& r : rows) {
    CAPTURE(r.dump());
    CHECK(r["hit_ratio"].get<double>() <= r["best_hit_ratio"].get<double>());
    CHECK(r["decode_row_bytes"].get<double>() >= 0);
    CHECK((r["warm_bytes"] == 0) == (r["start"] == "cold"));
    if (r["lines"] == 16 && r["split"] == "train" && r["start"] == "warm") CHECK(r["hit_ratio"] == 1.0);
  }
  CHECK(rows[0]["split"] == "test");
  CHECK(rows.back()["split"] == "train");
  const Json evidence = read_receipt(run, kTool)["evidence"];
  CHECK(evidence["touches"].get<int64_t>() == evidence["hits"].get<int64_t>() + evidence["misses"].get<int64_t>());
  CHECK(evidence["fills_demand"] == evidence["misses"]);
  CHECK(evidence["fills_warm_start"].get<int64_t>() > 0);
  REQUIRE(evidence["decode_row_link_ms"].size() == rows.size());
  CHECK(evidence["decode_row_link_ms"][0].get<double>() ==
        doctest::Approx(rows[0]["decode_row_bytes"].get<double>() / 2e9 * 1e3));
  CHECK(run.out.find("decode_row_link_ms") != std::string::npos);

  const RunResult again =
      profile_tool({"replay", "--train", train, "--test", test, "--lines", "2,8,16", "--link-gbps", "2"});
  CHECK(read_receipt(again, kTool)["result_digest"] == read_receipt(run, kTool)["result_digest"]);
  const Json alone = result_of(profile_tool({"replay", "--test", test, "--format", "csv"}))["rows"];
  CHECK(alone.size() == 2 * 6);  // lines 1, 2, 3, 4, 8, 16, all cold
  refused(profile_tool({"replay", "--train", test, "--test", test}), 3, "given twice");
  write_trace(dir / "other", make_identity(2, 8, 3), 1, 1, 1);
  refused(profile_tool({"replay", "--train", (dir / "other").string(), "--test", test}), 3, "experts 8, not 16");
  refused(profile_tool({"replay", "--test", test, "--lines", "17"}), 2, "17 expert lines");
  refused(profile_tool({"replay", "--test", kTiny + "/config.json"}), 3, "is no routing trace");
  refused(profile_tool({"replay"}), 2, "needs --test");
}
