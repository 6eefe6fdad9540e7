#include <doctest/doctest.h>
#include <fcntl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "tests/support/run_tool.h"
#include "tests/support/temp_dir.h"

namespace fs = std::filesystem;
using fnx::Json, fnx::read_json, fnx::read_receipt, fnx::run_command, fnx::RunResult, fnx::test::TempDir;

namespace {

const std::string kTool = "fnx-frame-probe";

RunResult probe(std::vector<std::string> words, const std::vector<std::string>& env = {}, const std::string& cwd = "") {
  words.insert(words.begin(), fnx::tool_path(kTool));
  return run_command(words, "", env, cwd);
}

size_t lines(const std::string& text) { return static_cast<size_t>(std::count(text.begin(), text.end(), '\n')); }

// Runs a shell line with $0 as the probe.
RunResult shell(const std::string& line, const std::vector<std::string>& env = {}) {
  return run_command({"/bin/sh", "-c", line, fnx::tool_path(kTool)}, "", env);
}

}  // namespace

TEST_CASE("frame: writes a passed receipt with blocks in order when the body returns") {
  const RunResult run = probe({"--mode", "pass"});
  CHECK(run.exit_code == 0);
  CHECK(run.out == "done\n");
  CHECK(run.err == "fnx-frame-probe: an info line\n");
  const Json receipt = read_receipt(run, kTool);
  std::vector<std::string> keys;
  for (const auto& [key, value] : receipt.items()) keys.push_back(key);
  CHECK(keys == std::vector<std::string>{"schema", "tool", "invocation", "subjects", "platform", "requested",
                                         "effective", "evidence", "result", "result_digest", "measurements", "gates",
                                         "not_run", "run"});
  CHECK(receipt["run"]["outcome"] == "passed");
  CHECK(receipt["run"]["exit_code"] == 0);
  CHECK(receipt["tool"]["executable_sha256"] == fnx::sha256_file(fnx::tool_path(kTool)));
  const std::string canonical = receipt["result"].dump();
  CHECK(receipt["result_digest"] == fnx::xxh3_hex(canonical.data(), canonical.size()));
}

TEST_CASE("frame: maps every kind of failure to its exit code and one error line when the body throws") {
  struct Case {
    std::string mode;
    int code;
    std::string outcome, error;
  };
  const Case cases[] = {{"input", 3, "error", "/srv/models/pack/config.json: is missing; give --model"},
                        {"memory", 4, "error", "this machine has too little memory for the run"},
                        {"bug", 70, "error", "internal: a surprise"},
                        {"other", 2, "error", "--mode other is unknown"}};
  for (const Case& c : cases) {
    CAPTURE(c.mode);
    const RunResult run = probe({"--mode", c.mode});
    CHECK(run.exit_code == c.code);
    CHECK(run.err == "fnx-frame-probe: error: " + c.error + "\n");
    const Json receipt = read_receipt(run, kTool);
    CHECK(receipt["run"]["outcome"] == c.outcome);
    CHECK(receipt["run"]["exit_code"] == c.code);
    CHECK(receipt["result_digest"].is_null());
  }
}

TEST_CASE("frame: exits 1 with outcome failed when a gate fails") {
  const RunResult run = probe({"--mode", "gate"});
  CHECK(run.exit_code == 1);
  const Json receipt = read_receipt(run, kTool);
  CHECK(receipt["run"]["outcome"] == "failed");
  CHECK(receipt["gates"][0]["outcome"] == "fail");
  CHECK(receipt["result_digest"].is_string());
}

TEST_CASE("frame: names the closest option and still writes a receipt when an option is unknown") {
  const RunResult run = probe({"--modle", "x"});
  CHECK(run.exit_code == 2);
  CHECK(run.err == "fnx-frame-probe: error: unknown option --modle; did you mean --mode?\n");
  CHECK(read_receipt(run, kTool)["run"]["outcome"] == "error");
  CHECK(probe({"--max-count", "many"}).exit_code == 2);
  CHECK(probe({"--max-count"}).exit_code == 2);
  CHECK(probe({"--zzzzzzzzzzzzzz=4"}).err ==
        "fnx-frame-probe: error: unknown option --zzzzzzzzzzzzzz; --help lists the options\n");
  CHECK(probe({"stray"}).err == "fnx-frame-probe: error: unexpected argument 'stray'; --help shows the usage\n");
  CHECK(probe({"--", "--fast"}).err == "fnx-frame-probe: error: unexpected argument '--'; --help shows the usage\n");
  const RunResult no_path = probe({"--receipt"});
  CHECK(no_path.exit_code == 2);
  CHECK(lines(no_path.err) == 1);
}

TEST_CASE("frame: prints nothing but the receipt on stdout when --receipt is -") {
  const RunResult run = probe({"--mode", "pass", "--receipt", "-"});
  CHECK(run.exit_code == 0);
  CHECK(Json::parse(run.out)["run"]["outcome"] == "passed");
  CHECK_FALSE(fs::exists(fs::path(run.receipt_dir) / (kTool + ".receipt.json")));
}

TEST_CASE("frame: writes the receipt into the current folder when no folder is given") {
  const TempDir folder;
  const RunResult run = probe({}, {"FNX_RECEIPT_DIR="}, folder.path());
  CHECK(run.exit_code == 0);
  CHECK(read_json(folder.path() / "fnx-frame-probe.receipt.json")["invocation"]["env_defaults"].empty());
}

TEST_CASE("frame: does no work and exits 6 when the receipt cannot be written") {
  const RunResult run = probe({"--mode", "pass", "--receipt", "/nonexistent-folder/r.json"});
  CHECK(run.exit_code == 6);
  CHECK(run.out == "");
  CHECK(run.err ==
        "fnx-frame-probe: error: receipt: /nonexistent-folder/r.json: cannot be written: No such file or directory\n");
  CHECK(probe({"--receipt", FNX_BINARY_DIR}).exit_code == 6);
}

TEST_CASE("frame: refuses to overwrite a file when the command line names it as input") {
  const TempDir folder;
  const fs::path file = folder.path() / "old.json";
  std::ofstream(file) << "{}";
  const RunResult run = probe({"--text=" + file.string(), "--receipt", file.string()});
  CHECK(run.exit_code == 2);
  CHECK(run.err.find("would overwrite") != std::string::npos);
  CHECK(read_json(file) == Json::object());
}

TEST_CASE("frame: overwrites receipts and empty files, and refuses a file that is something else") {
  const TempDir folder;
  const fs::path file = folder / "config.json";
  std::ofstream(file) << "{\"hidden_size\": 64}";
  const RunResult run = probe({"--mode", "pass", "--receipt", file.string()});
  CHECK(run.exit_code == 2);
  CHECK(run.err.find("would overwrite " + file.string() + ", which is no receipt") != std::string::npos);
  CHECK(read_json(file)["hidden_size"] == 64);
  std::ofstream(file).close();
  for (int i = 0; i < 2; ++i) CHECK(probe({"--mode", "pass", "--receipt", file.string()}).exit_code == 0);
  CHECK(read_json(file)["run"]["exit_code"] == 0);
}

TEST_CASE("frame: a value that a validator refuses is a usage error with a receipt") {
  const RunResult run = probe({"--max-count", "-3"});
  CHECK(run.exit_code == 2);
  CHECK(run.err.find("-3") != std::string::npos);
  const Json receipt = read_receipt(run, kTool);
  CHECK(receipt["run"]["exit_code"] == 2);
  CHECK(receipt["requested"]["max_count"] == "-3");
}

TEST_CASE("frame: refuses numbers that the parser takes and no option means, in one short line") {
  const std::pair<const char*, const char*> odd[] = {{"--ratio", "nan"},
                                                     {"--ratio", "-nan"},
                                                     {"--ratio", "inf"},
                                                     {"--ratio", "1e999"},
                                                     {"--seed", "-1"},
                                                     {"--max-count", "-1"},
                                                     {"--seed", "18446744073709551616"},
                                                     {"--max-count", "010"},
                                                     {"--seed", "010"},
                                                     {"--seed", "0x10"},
                                                     {"--max-count", "1e3"}};
  for (const auto& [option, value] : odd) {
    CAPTURE(value);
    const RunResult run = probe({option, value});
    CHECK(run.exit_code == 2);
    CHECK(run.err.find(option) != std::string::npos);
    CHECK(run.err.size() < 100);
  }
  for (const char* seed : {"0", "+7", "18446744073709551615"}) CHECK(probe({"--seed", seed}).exit_code == 0);
}

TEST_CASE("frame: replaces its own receipt of an earlier run, in both spellings of the option") {
  const TempDir folder;
  const std::string file = (folder.path() / "again.json").string();
  for (int i = 0; i < 2; ++i) {
    CHECK(probe({"--receipt", file}).exit_code == 0);
    CHECK(probe({"--receipt=" + file}).exit_code == 0);
  }
  CHECK(read_json(file)["run"]["outcome"] == "passed");
}

TEST_CASE("frame: leaves an incomplete receipt when the process is killed") {
  const RunResult run = probe({"--mode", "kill"});
  CHECK(run.exit_code == -9);
  const Json receipt = read_receipt(run, kTool);
  CHECK(receipt["run"]["outcome"] == "incomplete");
  CHECK(receipt["run"]["exit_code"].is_null());
}

TEST_CASE("frame: exits 130 or 143 with an interrupted receipt when a signal arrives") {
  const RunResult interrupted = probe({"--mode", "signal"});
  CHECK(interrupted.exit_code == 130);
  CHECK(read_receipt(interrupted, kTool)["run"]["outcome"] == "interrupted");
  const RunResult terminated = probe({"--mode", "terminate"});
  CHECK(terminated.exit_code == 143);
  CHECK(read_receipt(terminated, kTool)["run"]["exit_code"] == 143);
}

TEST_CASE("frame: exits 6 when stdout is closed or full") {
  CHECK(shell("\"$0\" --mode pass >&-").exit_code == 6);
  CHECK(shell("\"$0\" --mode pass >/dev/full").exit_code == 6);
  CHECK(shell("\"$0\" --version >/dev/full").exit_code == 6);
  const RunResult pipe = shell("{ sleep 0.2; \"$0\" --mode pass; echo \"code $?\" >&2; } | true");
  CHECK(pipe.err.find("code 6") != std::string::npos);
}

TEST_CASE("frame: waits for its reader when stdout is full and does not block") {
  int ends[2];
  REQUIRE(::pipe2(ends, O_NONBLOCK | O_CLOEXEC) == 0);
  const std::string filler(1 << 20, '.');
  const ssize_t filled = ::write(ends[1], filler.data(), filler.size());
  REQUIRE(filled > 0);
  const TempDir folder;
  const std::string tool = fnx::tool_path(kTool), receipt = (folder / "receipt.json").string();
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(ends[1], STDOUT_FILENO);
    ::execl(tool.c_str(), tool.c_str(), "--mode", "pass", "--receipt", receipt.c_str(), nullptr);
    ::_exit(127);
  }
  ::close(ends[1]);
  ::usleep(300'000);
  ::fcntl(ends[0], F_SETFL, 0);
  size_t got = 0;
  char bytes[4096];
  for (ssize_t n = 0; (n = ::read(ends[0], bytes, sizeof bytes)) > 0;) got += static_cast<size_t>(n);
  ::close(ends[0]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  CHECK(got > static_cast<size_t>(filled));
}

TEST_CASE("frame: exits 6 and leaves no part of a receipt when files may not grow") {
  const TempDir folder;
  const RunResult run = shell("ulimit -f 0; \"$0\" --mode pass --receipt " + (folder / "receipt.json").string());
  CHECK(run.exit_code == 6);
  CHECK(run.err.find("File too large") != std::string::npos);
  CHECK(fs::is_empty(folder.path()));
}

TEST_CASE("frame: writes in place when the receipt is a device or pipe") {
  CHECK(shell("\"$0\" --mode pass --receipt /dev/null").exit_code == 0);
  CHECK(fs::is_character_file("/dev/null"));
}

TEST_CASE("frame: writes the receipt once when it goes through a pipe, with a name or without") {
  const TempDir folder;
  const std::string pipe = (folder / "pipe").string();
  const RunResult named = shell("mkfifo " + pipe + "; cat " + pipe + " & timeout 20 \"$0\" --mode gate --receipt " +
                                pipe + "; echo \"code $?\" >&2; wait");
  CHECK(named.err == "code 1\n");
  CHECK(Json::parse(named.out)["run"]["outcome"] == "failed");
  const RunResult nameless = shell("\"$0\" -q --mode pass --receipt /dev/stderr");
  CHECK(nameless.exit_code == 0);
  CHECK(nameless.out == "done\n");
  CHECK(Json::parse(nameless.err)["run"]["outcome"] == "passed");
}

TEST_CASE("frame: records requested values, defaults and the environment defaults used") {
  const RunResult run = probe({"--max-count", "7", "--fast", "--gate", "a<=1", "--gate", "b<=2", "--seed",
                               "18446744073709551615", "--text=/srv/private/text.txt"},
                              {"FNX_MODEL=/srv/models/pack/"});
  const Json receipt = read_receipt(run, kTool);
  const Json expected = Json::parse(R"({"mode":"pass","model":"pack","text":"text.txt","max_count":"7","ratio":"0.5",
      "gate":["a<=1","b<=2"],"fast":true,"seed":"18446744073709551615"})");
  CHECK(receipt["requested"] == expected);
  CHECK(receipt["invocation"]["seed"] == "18446744073709551615");
  CHECK(receipt["invocation"]["env_defaults"]["FNX_MODEL"] == "pack");
  CHECK(receipt["invocation"]["env_defaults"].contains("FNX_RECEIPT_DIR"));
  CHECK(receipt["invocation"]["argv"][0] == "fnx-frame-probe");
  CHECK(receipt["invocation"]["argv"].back() == "--text=text.txt");
  const Json defaults = read_receipt(probe({"--model", "m"}, {"FNX_MODEL=/srv/other"}), kTool);
  CHECK(defaults["requested"]["model"] == "m");
  CHECK(defaults["requested"]["text"].is_null());
  CHECK(defaults["requested"]["gate"] == Json::array());
  CHECK(defaults["requested"]["fast"] == false);
  CHECK_FALSE(defaults["invocation"]["env_defaults"].contains("FNX_MODEL"));
}

TEST_CASE("frame: keeps absolute paths and names out of the receipt when an error names one") {
  const RunResult run = probe({"--mode", "input", "--model", "/srv/private/pack"});
  const std::string text = fnx::test::read_file(fs::path(run.receipt_dir) / (kTool + ".receipt.json"));
  CHECK(text.find("/srv/") == std::string::npos);
  CHECK(Json::parse(text)["run"]["error"] == "config.json: is missing; give --model");
}

TEST_CASE("frame: writes odd values so that every reader takes them") {
  const RunResult run = probe({"--mode", "odd-values"});
  CHECK(run.exit_code == 1);
  const Json receipt = read_receipt(run, kTool);
  CHECK(receipt["result"]["bytes"] == "a\xEF\xBF\xBD\xEF\xBF\xBD z");
  CHECK(receipt["result"]["nan"].is_null());
  CHECK(receipt["result"]["nan_reason"] == "not finite");
  CHECK(receipt["evidence"]["count"] == "18446744073709551615");
  CHECK(receipt["evidence"]["low"] == "-9223372036854775808");
  CHECK(receipt["measurements"][0]["median"].is_null());
  CHECK(receipt["measurements"][1]["median"] == 3.0);
  CHECK(receipt["gates"][0]["outcome"] == "fail");
}

TEST_CASE("frame: prints help, version, devices and completions without a receipt") {
  const RunResult help = probe({"--bogus", "--help"});
  CHECK(help.exit_code == 0);
  CHECK(help.out.starts_with("Examples:\n  fnx-frame-probe --mode pass\n"));
  CHECK(help.err == "");
  const RunResult version = probe({"--version"});
  CHECK(version.exit_code == 0);
  for (const char* part :
       {"commit: ", "dirty: ", "build type: ", "C++ compiler: ", "CUDA: ", "NCCL: ", "receipt schema: "})
    CHECK(version.out.find(part) != std::string::npos);
  const RunResult devices = probe({"--list-devices"});
  CHECK(devices.exit_code == 0);
  CHECK(devices.out.starts_with("cpu  "));
  for (const char* shell_name : {"bash", "zsh", "fish"}) {
    const RunResult script = probe({"--completion", shell_name});
    CHECK(script.exit_code == 0);
    CHECK(script.out.find("max-count") != std::string::npos);
    CHECK_FALSE(fs::exists(fs::path(script.receipt_dir) / (kTool + ".receipt.json")));
  }
  CHECK(probe({"--completion", "csh"}).exit_code == 2);
}

TEST_CASE("frame: completes options and values when bash sources the script") {
  const RunResult run = run_command({"/bin/bash", "-c",
                                     "eval \"$($0 --completion bash)\"; COMP_WORDS=(x --max); COMP_CWORD=1; "
                                     "_fnx_frame_probe; echo ${COMPREPLY[@]}; COMP_WORDS=(x --color a); COMP_CWORD=2; "
                                     "_fnx_frame_probe; echo ${COMPREPLY[@]}",
                                     fnx::tool_path(kTool)});
  CHECK(run.out == "--max-count\nauto always\n");
}

TEST_CASE("frame: obeys quiet, verbose and colour options") {
  CHECK(probe({"-q"}).err == "");
  CHECK(probe({"-v"}).err == "fnx-frame-probe: an info line\nfnx-frame-probe: a debug line\n");
  CHECK(probe({"--mode", "bug", "--color", "always"}).err.find("\033[31merror:\033[0m") != std::string::npos);
  CHECK(probe({"--mode", "bug"}, {"NO_COLOR=1"}).err.find('\033') == std::string::npos);
  CHECK(probe({"--color", "maybe"}).exit_code == 2);
}
