// Qualification files: what is written is read back, anything else does not qualify.
#include <doctest/doctest.h>

#include <cstdlib>
#include <fstream>

#include "libcore/cli/qualification.h"
#include "tests/support/temp_dir.h"

using namespace fnx;
using namespace fnx::test;

TEST_CASE("qualification: holds for the architecture that was written, and names gate and command for others") {
  const TempDir folder;
  setenv("XDG_DATA_HOME", folder.path().c_str(), 1);
  const std::string problem = qualification_problem("sm_90");
  CHECK(problem.find("sm_90") != std::string::npos);
  CHECK(problem.find("kernel contract") != std::string::npos);
  CHECK(problem.find("fnx-kernel-contract --qualify") != std::string::npos);
  const std::string name = write_qualification("sm_90", "all passed");
  CHECK(qualification_problem("sm_90").empty());
  CHECK(!qualification_problem("sm_120").empty());

  const auto file = folder.path() / "fnx/qualification" / name;
  for (const char* text : {"", "{", "[]", "{\"schema\": 1}",
                           "{\"schema\": \"fnx.qualification-1\", \"architecture\": \"sm_90\", "
                           "\"kernel_library_digest\": \"0000\"}"}) {
    CAPTURE(text);
    std::ofstream(file) << text;
    CHECK(!qualification_problem("sm_90").empty());
  }
  std::filesystem::remove(file);
  std::filesystem::create_directory(file);
  CHECK(!qualification_problem("sm_90").empty());
  unsetenv("XDG_DATA_HOME");
}
