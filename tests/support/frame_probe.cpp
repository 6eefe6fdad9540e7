// A tool whose body does what the tests of the frame need to see.
#include <csignal>
#include <limits>
#include <new>
#include <thread>

#include "kernels/error.h"
#include "libcore/cli/tool.h"

int main(int argc, char** argv) {
  struct {
    std::string mode = "pass", model, text;
    int count = 3;
    double ratio = 0.5;
    std::vector<std::string> gates;
    bool fast = false;
    uint64_t seed = 0;
  } options;
  const fnx::ToolInfo info{"fnx-frame-probe",
                           "Shows the frame of every tool at work.",
                           {"fnx-frame-probe --mode pass", "fnx-frame-probe --mode gate --receipt -"}};
  return fnx::run_tool(
      argc, argv, info,
      [&](CLI::App& app) {
        app.add_option("--mode", options.mode, "What to do");
        app.add_option("--model", options.model, "Checkpoint folder");
        app.add_option("--text", options.text, "Text for the result");
        app.add_option("--max-count", options.count, "A number")->check(CLI::NonNegativeNumber);
        app.add_option("--ratio", options.ratio, "A fraction");
        app.add_option("--gate", options.gates, "NAME<=VALUE");
        app.add_flag("--fast", options.fast, "A flag");
        app.add_option("--seed", options.seed, "Seed");
      },
      [&](fnx::ToolRun& run) {
        using fnx::Error, fnx::ErrorKind;
        fnx::Receipt& receipt = run.receipt();
        receipt.result["text"] = options.text;
        const std::string& mode = options.mode;
        if (mode == "pass") {
          run.print("done\n");
          run.info("an info line");
          run.debug("a debug line");
        } else if (mode == "gate") {
          receipt.add_gate("error", 2, "<=", 1, "ratio");
        } else if (mode == "input") {
          throw Error(ErrorKind::Input, "/srv/models/pack/config.json: is missing; give --model");
        } else if (mode == "memory") {
          throw std::bad_alloc();
        } else if (mode == "bug") {
          throw std::runtime_error("a surprise");
        } else if (mode == "odd-values") {
          receipt.result["bytes"] = "a\xff\xfe z";
          receipt.result["nan"] = std::numeric_limits<double>::quiet_NaN();
          receipt.evidence["count"] = std::numeric_limits<uint64_t>::max();
          receipt.evidence["low"] = std::numeric_limits<int64_t>::min();
          receipt.add_series("step_ns", "ns", "warm", {1, 2, 3, 4, std::numeric_limits<double>::infinity()});
          receipt.add_series("load_ns", "ns", "cold", {1, 2, 3, 4, 5});
          receipt.add_gate("nan", std::numeric_limits<double>::quiet_NaN(), "<=", 1, "ratio");
          receipt.add_not_run("speed", "the values are odd");
          receipt.add_subject("prompts", "prompts.txt", 12);
          receipt.set_effective("planner", "host", "default");
        } else if (mode == "signal" || mode == "terminate" || mode == "kill") {
          std::raise(mode == "signal" ? SIGINT : mode == "terminate" ? SIGTERM : SIGKILL);
          while (!run.stopping()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
        } else {
          throw Error(ErrorKind::Usage, "--mode " + mode + " is unknown");
        }
      });
}
