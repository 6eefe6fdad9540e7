// What this executable was built from.
#pragma once

#include <string>

#include "libcore/receipt/receipt.h"

namespace fnx {

// The receipt's `tool` block for the tool `name`, with the SHA-256 of the running executable.
Json tool_block(const std::string& name);

// What --version prints: one fact a line.
std::string version_text(const std::string& name);

// SHA-256 over the kernels' sources, 64 hex digits: what a qualification is keyed by, beside the architecture.
std::string kernel_library_digest();

}  // namespace fnx
