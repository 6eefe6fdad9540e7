// Files that a tool writes beside its receipt.
#pragma once

#include <initializer_list>
#include <string>

#include "libcore/cli/tool.h"

namespace fnx {

struct OutputFile {
  std::string what, path;  // its flag or name for messages; empty path: not asked for
};

// Refuses, before the work, a file that could not be written (Output) or that another output or the receipt would
// replace (Usage).
void require_outputs(const ToolRun& run, std::initializer_list<OutputFile> files);

}  // namespace fnx
