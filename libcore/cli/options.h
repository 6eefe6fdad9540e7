// What the frame reads off a CLI11 app.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include "libcore/receipt/receipt.h"

namespace fnx {

// Options of the frame itself are in this group; `requested` leaves them out because they change no result.
inline constexpr const char* kCommonGroup = "Common options";

// "--max-tokens" as a key: "max_tokens"; positionals by their name.
std::string option_key(const CLI::Option& option);

// Every option of the tool with the value given or its default: true or false for flags, strings for values (exact as
// written), lists of strings where several are allowed, null when there is neither. Absolute paths are reduced.
Json requested_block(const CLI::App& app);

// argv with paths reduced, the seed and the environment variables that gave a default.
Json invocation_block(const CLI::App& app, const std::vector<std::string>& argv, bool receipt_dir_used);

inline constexpr int kMostSequences = 4096;  // that a tool holds at once

// Options that several tools have: a count from 1 on; pairs of runs of two arms.
void add_count(CLI::App& app, const char* name, int64_t& value, const char* what);
void add_pairs(CLI::App& app, int& pairs);

// Throws Usage for numbers that the parser takes and no option means: NaN, infinities, and a minus before an option
// that has no negative values.
void refuse_odd_numbers(const CLI::App& app);

// One line that says what is wrong with the command line, with the closest option when one is unknown.
std::string usage_message(const CLI::App& app, const CLI::ParseError& error);

}  // namespace fnx
