// The frame of every executable: options, receipt, exit code, signals, one catch. An app's main() is one run_tool call.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <CLI/CLI.hpp>

#include "libcore/receipt/receipt.h"

namespace fnx {

class Ranks;

struct ToolInfo {
  std::string name;                   // "fnx-generate"
  std::string summary;                // one line
  std::vector<std::string> examples;  // two or more command lines, printed first by --help
};

// What a running tool may use. stdout carries the result only. Logging and progress may be called from any thread.
class ToolRun {
 public:
  virtual ~ToolRun() = default;
  virtual Receipt& receipt() = 0;
  // Writes to stdout at once; throws Output when stdout is closed. Nothing is printed when the receipt goes to stdout.
  virtual void print(std::string_view text) = 0;
  // True when --receipt - was given.
  virtual bool receipt_on_stdout() const = 0;
  // Where the receipt goes; empty when that is stdout.
  virtual std::string receipt_path() const = 0;
  // Log lines on stderr; `info` is silent under -q, `debug` shows under -v.
  virtual void info(const std::string& line) = 0;
  virtual void debug(const std::string& line) = 0;
  // A progress bar on stderr when it is a terminal and not -q; done == total ends it. Cheap to call often.
  virtual void progress(std::string_view what, uint64_t done, uint64_t total) = 0;
  // True after SIGINT or SIGTERM: stop at the next step; run_tool then exits 130 or 143 with the receipt written. A
  // second signal ends the process at once.
  virtual bool stopping() const = 0;
  // Starts or joins the ranks of --tp; null for one. Once a run.
  virtual Ranks* start_ranks(int world) = 0;
  // As stopping(), with the same answer on every rank: for loops that all ranks run together.
  virtual bool stop_together() = 0;
  // True on rank 0, the only one that prints and writes files; on the others print() does nothing.
  virtual bool writes() const = 0;
};

// Parses, writes the receipt as "incomplete", calls `body`, writes the final receipt, returns the exit code
// (kernels/error.h). Adds the options that every tool has: --receipt, -q, -v, --color, --help, --version,
// --list-devices, --completion SHELL. Options named --model and --device take FNX_MODEL and FNX_DEVICE as defaults.
// `configure` adds the tool's own options, bound to variables that hold their defaults; these become `requested` of the
// receipt. `body` throws Error for anything that stops it; a failed gate of the receipt makes the exit code 1.
int run_tool(int argc, char** argv, const ToolInfo& info, const std::function<void(CLI::App&)>& configure,
             const std::function<void(ToolRun&)>& body);

// "16GiB", "512 MiB", "4096" to bytes; throws Usage.
uint64_t parse_size(std::string_view text);
// "1,2,8-64*2,100-400+100,5-7" to a list in the given order, at most 1 048 576 numbers; throws Usage.
std::vector<int64_t> parse_list(std::string_view text);

}  // namespace fnx
