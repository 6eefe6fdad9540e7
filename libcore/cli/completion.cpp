#include "libcore/cli/completion.h"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "kernels/error.h"

namespace fnx {
namespace {

struct Entry {
  std::vector<std::string> names;    // "--model", "-q"
  std::vector<std::string> choices;  // of its value
  std::string description;
  bool takes_value = false;
};

std::vector<Entry> entries(const CLI::App& app) {
  std::vector<Entry> out;
  for (const CLI::Option* option : app.get_options()) {
    Entry entry;
    for (const std::string& name : option->get_lnames()) entry.names.push_back("--" + name);
    for (const std::string& name : option->get_snames()) entry.names.push_back("-" + name);
    if (entry.names.empty()) continue;
    entry.takes_value = option->get_expected_max() > 0;
    // CLI11 writes the set of a membership check as {a,b} behind the type.
    const std::string type = option->get_type_name();
    const size_t open = type.find('{'), close = type.find('}');
    if (entry.takes_value && open != std::string::npos && close != std::string::npos)
      entry.choices = CLI::detail::split(type.substr(open + 1, close - open - 1), ',');
    // Quotes and brackets have a meaning in at least one of the shells.
    for (char c : option->get_description())
      if (std::string("'\"`[]:\\$").find(c) == std::string::npos) entry.description += c;
    out.push_back(std::move(entry));
  }
  return out;
}

std::string bash_script(const std::vector<Entry>& options, const std::string& tool, const std::string& function) {
  std::string all, cases;
  for (const Entry& entry : options) {
    for (const std::string& name : entry.names) all += (all.empty() ? "" : " ") + name;
    if (!entry.takes_value) continue;
    const std::string words = entry.choices.empty() ? "-f" : fmt::format("-W '{}'", fmt::join(entry.choices, " "));
    cases +=
        fmt::format("    {}) COMPREPLY=($(compgen {} -- \"$cur\")); return ;;\n", fmt::join(entry.names, "|"), words);
  }
  return fmt::format(
      "{0}() {{\n  local cur=\"${{COMP_WORDS[COMP_CWORD]}}\" prev=\"${{COMP_WORDS[COMP_CWORD-1]}}\"\n  COMPREPLY=()\n"
      "  case \"$prev\" in\n{1}  esac\n  COMPREPLY=($(compgen -W '{2}' -- \"$cur\"))\n}}\n"
      "complete -o filenames -F {0} {3}\n",
      function, cases, all, tool);
}

std::string zsh_script(const std::vector<Entry>& options, const std::string& tool) {
  std::string out = fmt::format("#compdef {}\n_arguments", tool);
  for (const Entry& entry : options) {
    for (const std::string& name : entry.names) {
      std::string value;
      if (entry.takes_value)
        value = entry.choices.empty() ? ":value:_files" : fmt::format(":value:({})", fmt::join(entry.choices, " "));
      out += fmt::format(" \\\n  '{}[{}]{}'", name, entry.description, value);
    }
  }
  return out + "\n";
}

std::string fish_script(const std::vector<Entry>& options, const std::string& tool) {
  std::string out;
  for (const Entry& entry : options) {
    out += fmt::format("complete -c {}", tool);
    for (const std::string& name : entry.names)
      out += name.starts_with("--") ? " -l " + name.substr(2) : " -s " + name.substr(1);
    if (entry.takes_value) out += " -r";
    if (!entry.choices.empty()) out += fmt::format(" -f -a '{}'", fmt::join(entry.choices, " "));
    out += fmt::format(" -d '{}'\n", entry.description);
  }
  return out;
}

}  // namespace

std::string completion_script(const CLI::App& app, const std::string& tool, const std::string& shell) {
  const std::vector<Entry> options = entries(app);
  std::string function = "_" + tool;
  std::replace(function.begin(), function.end(), '-', '_');
  if (shell == "bash") return bash_script(options, tool, function);
  if (shell == "zsh") return zsh_script(options, tool);
  if (shell == "fish") return fish_script(options, tool);
  throw Error(ErrorKind::Usage, "--completion " + shell + ": the shells are bash, zsh and fish");
}

}  // namespace fnx
