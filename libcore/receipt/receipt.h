// The machine-readable record of one run (fixtures/receipt.schema.json).
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

namespace fnx {

using Json = nlohmann::ordered_json;

// Blocks that a tool fills; the frame (run_tool) fills schema, tool, invocation, platform, requested and run.
struct Receipt {
  Json subjects = Json::array();         // {role, name, bytes, fingerprint?, ...}
  Json effective = Json::object();       // decision -> {"value": ..., "source": "flag" | "default" | "config" | ...}
  Json evidence = Json::object();        // counters
  Json result = Json::object();          // byte-equal on a rerun: no times, no paths
  Json measurements = Json::array();     // series, see add_series
  Json gates = Json::array();            // see add_gate
  Json not_run = Json::array();          // {what, reason}

  // Adds a series with raw samples, median, p05 and p95.
  void add_series(const std::string& name, const std::string& unit, const std::string& phase,
                  const std::vector<double>& samples);
  // comparator is one of "<=", ">=", "==", "<", ">"; returns whether it passed. A failed gate makes the tool exit 1.
  bool add_gate(const std::string& name, double observed, const std::string& comparator, double limit,
                const std::string& unit);
  void add_not_run(const std::string& what, const std::string& reason);
};

// XXH3-128 of bytes as 32 hex digits; SHA-256 as 64.
std::string xxh3_hex(const void* data, size_t bytes);
std::string sha256_hex(const void* data, size_t bytes);
std::string sha256_file(const std::filesystem::path& file);
// Hash of token ids: XXH3-128 over little-endian u32.
std::string token_hash(const std::vector<int32_t>& ids);

// Writes a whole file by a temporary beside it and a rename, so that no reader sees half of it; throws Output.
void write_file_atomic(const std::filesystem::path& file, std::string_view bytes);

}  // namespace fnx
