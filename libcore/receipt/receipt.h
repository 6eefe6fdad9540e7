// The machine-readable record of one run (fixtures/receipt.schema.json).
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace fnx {

using Json = nlohmann::ordered_json;

// Blocks that a tool fills; the frame (run_tool) fills schema, tool, invocation, platform, requested and run. Names end
// in their unit (_bytes, _tokens, _rows, _ns, _per_s, _ratio). Hashes, seeds and 64-bit counters are strings.
struct Receipt {
  Json subjects = Json::array();      // see add_subject
  Json effective = Json::object();    // see set_effective
  Json evidence = Json::object();     // counters
  Json result = Json::object();       // byte-equal on a rerun: no times, no paths
  Json measurements = Json::array();  // see add_series
  Json gates = Json::array();         // see add_gate
  Json not_run = Json::array();       // see add_not_run

  // What the run was about. `role` is checkpoint, tokenizer, prompts, profile, trace or reference; `name` is a file or
  // folder name without its path. `fingerprint` is absent when it was not computed, which readers treat as unverified.
  void add_subject(const std::string& role, const std::string& name, uint64_t bytes,
                   const std::optional<Json>& fingerprint = {});
  // A decision that was taken, with where it came from: "flag", "default", "config", "device", ...
  void set_effective(const std::string& name, Json value, const std::string& source);
  // Adds a series with raw samples, median, p05 and p95; phase is "cold" or "warm".
  void add_series(const std::string& name, const std::string& unit, const std::string& phase,
                  const std::vector<double>& samples);
  // comparator is one of "<=", ">=", "==", "<", ">"; returns whether it passed. A failed gate makes the tool exit 1.
  // A value that is not finite fails.
  bool add_gate(const std::string& name, double observed, const std::string& comparator, double limit,
                const std::string& unit);
  // A gate that could not be judged; it does not change the exit code.
  void add_gate_not_run(const std::string& name, const std::string& comparator, double limit, const std::string& unit,
                        const std::string& reason);
  void add_not_run(const std::string& what, const std::string& reason);
  bool any_gate_failed() const;
};

// A subject's fingerprint. kind: "full", "advisory", "file" or "synthetic"; algorithm: "xxh3-128" or "sha256"; cached:
// the digest comes from an earlier run's cache and the bytes were not hashed again.
Json make_fingerprint(const std::string& kind, const std::string& algorithm, const std::string& digest, bool cached);

// XXH3-128 of bytes as 32 hex digits; SHA-256 as 64.
std::string xxh3_hex(const void* data, size_t bytes);
std::string sha256_hex(const void* data, size_t bytes);
// Throws Input when the file cannot be read.
std::string sha256_file(const std::filesystem::path& file);
// Hash of token ids: XXH3-128 over little-endian u32.
std::string token_hash(const std::vector<int32_t>& ids);

// Writes a whole file by a temporary beside it and a rename, so that no reader sees half of it; throws Output. What is
// there and is no regular file (a pipe, /dev/null) is written in place.
void write_file_atomic(const std::filesystem::path& file, std::string_view bytes);

}  // namespace fnx
