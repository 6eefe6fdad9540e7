#include "libcore/cli/build_info.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <openssl/crypto.h>
#include <pcre2.h>
#include <utf8proc.h>
#include <xxhash.h>

#include <CLI/Version.hpp>
#include <sstream>
#include <string_view>

#include "fnx_build_info.h"
#include "kernels/error.h"
#include "libcore/receipt/document.h"

namespace fnx {
namespace {

Json executable_sha256() {
  try {
    return sha256_file("/proc/self/exe");
  } catch (const Error&) {
    return Json();
  }
}

Json library_versions() {
  Json out = Json::object();
  out["cuda"] = FNX_CUDA_VERSION;
  out["nccl"] = FNX_NCCL_VERSION;
  out["fmt"] = fmt::format("{}.{}.{}", FMT_VERSION / 10000, FMT_VERSION / 100 % 100, FMT_VERSION % 100);
  out["cli11"] = CLI11_VERSION;
  out["nlohmann_json"] =
      fmt::format("{}.{}.{}", NLOHMANN_JSON_VERSION_MAJOR, NLOHMANN_JSON_VERSION_MINOR, NLOHMANN_JSON_VERSION_PATCH);
  const unsigned xxhash = XXH_versionNumber();
  out["xxhash"] = fmt::format("{}.{}.{}", xxhash / 10000, xxhash / 100 % 100, xxhash % 100);
  out["pcre2"] = fmt::format("{}.{}", PCRE2_MAJOR, PCRE2_MINOR);
  out["utf8proc"] = utf8proc_version();
  out["openssl"] = OpenSSL_version(OPENSSL_VERSION_STRING);
  return out;
}

}  // namespace

Json tool_block(const std::string& name) {
  const std::string_view dirty = FNX_DIRTY;
  Json out = Json::object();
  out["name"] = name;
  out["version"] = FNX_VERSION;
  out["commit"] = FNX_COMMIT;
  out["dirty"] = dirty == "unknown" ? Json() : Json(dirty == "yes");
  out["executable_sha256"] = executable_sha256();
  out["build_type"] = FNX_BUILD_TYPE;
  out["compilers"] = Json{{"cxx", FNX_CXX_COMPILER}, {"cuda", FNX_CUDA_COMPILER}};
  out["sm_list"] = Json::array();
  std::istringstream architectures{std::string(FNX_SM_LIST)};
  for (std::string sm; architectures >> sm;) out["sm_list"].push_back(sm);
  out["libraries"] = library_versions();
  return out;
}

std::string kernel_library_digest() { return FNX_KERNEL_DIGEST; }

std::string version_text(const std::string& name) {
  return fmt::format(
      "{} {}\ncommit: {}\ndirty: {}\nbuild type: {}\nC++ compiler: {}\nCUDA compiler: {}\nCUDA: {}\nNCCL: {}\n"
      "architectures: {}\nreceipt schema: {} {}\n",
      name, FNX_VERSION, FNX_COMMIT, FNX_DIRTY, FNX_BUILD_TYPE, FNX_CXX_COMPILER, FNX_CUDA_COMPILER, FNX_CUDA_VERSION,
      FNX_NCCL_VERSION, *FNX_SM_LIST ? FNX_SM_LIST : "none", kReceiptSchema, kReceiptVersion);
}

}  // namespace fnx
