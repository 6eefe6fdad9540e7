#include "libcore/cli/qualification.h"

#include <fmt/format.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "kernels/error.h"
#include "libcore/cli/build_info.h"
#include "libcore/receipt/receipt.h"

namespace fnx {

namespace {

constexpr const char* kSchema = "fnx.qualification-1";

std::filesystem::path data_folder() {
  if (const char* xdg = std::getenv("XDG_DATA_HOME"); xdg && *xdg == '/') return std::filesystem::path(xdg) / "fnx";
  if (const char* home = std::getenv("HOME"); home && *home == '/')
    return std::filesystem::path(home) / ".local/share/fnx";
  throw Error(ErrorKind::Output, "neither XDG_DATA_HOME nor HOME names an absolute folder for the qualification file");
}

std::filesystem::path file_of(const std::string& architecture) {
  return data_folder() / "qualification" / (architecture + "-" + kernel_library_digest().substr(0, 16) + ".json");
}

bool holds(const std::filesystem::path& file, const std::string& architecture) {
  std::ifstream in(file);
  const Json j = Json::parse(in, nullptr, false);
  return j.is_object() && j.value("schema", "") == kSchema && j.value("architecture", "") == architecture &&
         j.value("kernel_library_digest", "") == kernel_library_digest();
}

}  // namespace

std::string write_qualification(const std::string& architecture, const std::string& summary) {
  const Json document{{"schema", kSchema},
                      {"architecture", architecture},
                      {"kernel_library_digest", kernel_library_digest()},
                      {"summary", summary}};
  const std::filesystem::path file = file_of(architecture);
  std::error_code error;
  std::filesystem::create_directories(file.parent_path(), error);
  if (error) throw Error(ErrorKind::Output, "cannot make " + file.parent_path().string() + ": " + error.message());
  write_file_atomic(file, document.dump(2) + "\n");
  return file.filename().string();
}

std::string qualification_problem(const std::string& architecture) {
  try {
    if (holds(file_of(architecture), architecture)) return "";
  } catch (const std::exception&) {
    // no data folder, a file that cannot be read or a field of another type: as good as no file
  }
  return fmt::format(
      "architecture {} is not qualified for these kernels (gate: kernel contract, digest {}); run fnx-kernel-contract "
      "--qualify",
      architecture, kernel_library_digest().substr(0, 16));
}

}  // namespace fnx
