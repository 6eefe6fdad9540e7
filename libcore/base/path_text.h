// Keeps absolute paths, and with them user and host names, out of what is written down.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>

namespace fnx {

// A command-line word: an absolute path becomes its last component, also after `=`; everything else stays as given.
std::string reduce_argument(std::string_view word);

// Free text, such as an error message: every absolute path in it becomes its last component. A path ends at white
// space, a quote, a bracket, a comma, a semicolon or a colon.
std::string reduce_text(std::string_view text);

// Name of a file or folder without its path, also for ".", ".." and a trailing slash.
std::string bare_name(const std::filesystem::path& path);

}  // namespace fnx
