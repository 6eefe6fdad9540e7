// From a tool's blocks to the receipt's bytes.
#pragma once

#include <optional>
#include <string>

#include "libcore/receipt/receipt.h"

namespace fnx {

inline constexpr const char* kReceiptSchema = "fnx.receipt";
inline constexpr const char* kReceiptVersion = "1.0";

// What the frame knows of a run.
struct RunRecord {
  std::string start_utc;         // "2000-01-31T12:00:00Z"
  std::string outcome;           // passed, failed, error, interrupted, incomplete
  std::optional<int> exit_code;  // absent while incomplete
  std::optional<std::string> error;
  double wall_s = 0, user_s = 0, system_s = 0;
  uint64_t peak_rss_bytes = 0;
};

struct FrameBlocks {
  Json tool, invocation, platform, requested;
};

// All blocks in the schema's order. Non-finite numbers become null with a reason beside them and integers beyond 2^53
// strings. result_digest is given only when the run passed or failed its gates: a partial result has no digest.
Json make_document(const FrameBlocks& frame, const Receipt& receipt, const RunRecord& run);

// Canonical bytes: UTF-8, no spaces, keys in insertion order, invalid UTF-8 replaced by U+FFFD; never throws on
// content.
std::string canonical_json(const Json& value);
// The same for people: indented, with a newline at the end.
std::string pretty_json(const Json& value);

}  // namespace fnx
