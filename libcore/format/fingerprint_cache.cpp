#include "libcore/format/fingerprint_cache.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "kernels/error.h"

namespace fnx {
namespace {

namespace fs = std::filesystem;

constexpr int kCacheVersion = 1;

std::optional<fs::path> cache_folder() {
  if (const char* xdg = std::getenv("XDG_CACHE_HOME"); xdg && *xdg == '/') return fs::path(xdg) / "fnx";
  if (const char* home = std::getenv("HOME"); home && *home == '/') return fs::path(home) / ".cache" / "fnx";
  return {};
}

// The entry's name is a hash, so that a listing of the cache tells no paths.
std::optional<fs::path> entry_path(const Checkpoint& checkpoint, FingerprintKind kind) {
  const std::optional<fs::path> folder = cache_folder();
  std::error_code error;
  const std::string path = fs::canonical(checkpoint.folder(), error).string();
  if (!folder || error) return {};
  return *folder / fmt::format("{}-{}.json", fingerprint_kind_name(kind), xxh3_hex(path.data(), path.size()));
}

Json stamps_json(const std::vector<FileStamp>& stamps) {
  Json out = Json::array();
  for (const FileStamp& s : stamps)
    out.push_back(Json{{"name", s.name}, {"bytes", s.bytes}, {"mtime_ns", std::to_string(s.mtime_ns)}});
  return out;
}

}  // namespace

std::vector<FileStamp> stamp_files(const Checkpoint& checkpoint) {
  std::vector<std::string> names = {"config.json", "model.safetensors.index.json"};
  for (const SourceFile& file : checkpoint.files()) names.push_back(file.name);
  std::vector<FileStamp> out;
  for (size_t i = 0; i < names.size(); ++i) {
    const fs::path path = checkpoint.folder() / names[i];
    struct stat status = {};
    if (::stat(path.c_str(), &status) != 0) {
      if (i < 2 && errno == ENOENT) continue;
      throw Error(ErrorKind::Input, path.string() + ": " + std::strerror(errno));
    }
    out.push_back({names[i], static_cast<uint64_t>(status.st_size),
                   int64_t{status.st_mtim.tv_sec} * 1'000'000'000 + status.st_mtim.tv_nsec});
  }
  return out;
}

std::optional<Fingerprint> cached_fingerprint(const Checkpoint& checkpoint, FingerprintKind kind,
                                              const std::vector<FileStamp>& stamps) {
  const std::optional<fs::path> path = entry_path(checkpoint, kind);
  if (!path) return {};
  std::ifstream in(*path, std::ios::binary);
  if (!in) return {};
  try {
    const Json entry = Json::parse(in);
    if (entry.at("version") != kCacheVersion || entry.at("files") != stamps_json(stamps)) return {};
    Fingerprint out;
    out.kind = kind;
    out.cached = true;
    out.digest = entry.at("digest");
    out.tensors = entry.at("tensors");
    out.bytes = entry.at("bytes");
    for (const Json& family : entry.at("families"))
      out.families.push_back(
          {family.at("name"), family.at("tensors"), family.at("bytes"), family.at("digest").get<std::string>()});
    return out;
  } catch (const std::exception&) {  // of the JSON, or of a file that cannot be read
    return {};
  }
}

void cache_fingerprint(const Checkpoint& checkpoint, const Fingerprint& fingerprint,
                       const std::vector<FileStamp>& stamps) {
  const std::optional<fs::path> path = entry_path(checkpoint, fingerprint.kind);
  if (!path) return;
  Json entry{{"version", kCacheVersion}, {"digest", fingerprint.digest}};
  entry["tensors"] = fingerprint.tensors;
  entry["bytes"] = fingerprint.bytes;
  entry["families"] = Json::array();
  for (const FamilyDigest& f : fingerprint.families)
    entry["families"].push_back(
        Json{{"name", f.name}, {"tensors", f.tensors}, {"bytes", f.bytes}, {"digest", f.digest}});
  entry["files"] = stamps_json(stamps);
  try {
    std::error_code error;
    fs::create_directories(path->parent_path(), error);
    if (!error) write_file_atomic(*path, entry.dump(1, ' ', false, Json::error_handler_t::replace));
  } catch (const Error&) {
  }
}

}  // namespace fnx
