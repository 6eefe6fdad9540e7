// Shell completion scripts made from a tool's options.
#pragma once

#include <string>

#include <CLI/CLI.hpp>

namespace fnx {

// `shell` is bash, zsh or fish; throws Usage for another.
std::string completion_script(const CLI::App& app, const std::string& tool, const std::string& shell);

}  // namespace fnx
