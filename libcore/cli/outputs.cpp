#include "libcore/cli/outputs.h"

#include <fmt/format.h>

#include <filesystem>
#include <map>

#include "kernels/error.h"
#include "libcore/receipt/writable.h"

namespace fnx {

void require_outputs(const ToolRun& run, std::initializer_list<OutputFile> files) {
  std::map<std::filesystem::path, std::string> taken;
  const auto take = [&](const OutputFile& file) {
    if (file.path.empty() || written_in_place(file.path)) return;
    std::error_code ignored;
    const auto [other, first] =
        taken.emplace(std::filesystem::weakly_canonical(std::filesystem::absolute(file.path), ignored), file.what);
    if (!first)
      throw Error(ErrorKind::Usage, fmt::format("{} would replace {} in {}; give each a file of its own", file.what,
                                                other->second, file.path));
  };
  take({"the receipt", run.receipt_path()});
  for (const OutputFile& file : files) take(file);
  for (const OutputFile& file : files)
    if (!file.path.empty()) require_writable(file.path);
}

}  // namespace fnx
