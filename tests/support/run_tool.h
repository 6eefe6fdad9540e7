// Runs a built tool as a user does and looks at what it leaves.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "libcore/format/json_text.h"  // read_json
#include "libcore/receipt/receipt.h"

namespace fnx {

struct RunResult {
  int exit_code = 0;  // minus the signal number when a signal ended the process
  std::string out, err;
  std::string receipt_dir;  // the folder given as FNX_RECEIPT_DIR
};

// Runs argv[0] with `stdin_text` and waits. `env` adds "NAME=VALUE" to this process' environment, from which fnx's own
// variables are taken out. Unless `env` says otherwise FNX_RECEIPT_DIR is a fresh folder under FNX_BINARY_DIR
// "/test-receipts", whose receipts ctest validates afterwards, and XDG_CACHE_HOME one of this process.
RunResult run_command(const std::vector<std::string>& argv, const std::string& stdin_text = "",
                      const std::vector<std::string>& env = {}, const std::string& cwd = "");

// Absolute path of a built tool, "fnx-inspect".
std::string tool_path(const std::string& name);

// The receipt that `tool` wrote under its default name in that run.
Json read_receipt(const RunResult& run, const std::string& tool);

}  // namespace fnx
