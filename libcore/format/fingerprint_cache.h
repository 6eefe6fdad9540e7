// Fingerprints kept beside size and modification time of the files they stand for, in $XDG_CACHE_HOME/fnx or
// ~/.cache/fnx; nothing is written into a model folder.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

#include "libcore/format/fingerprint.h"

namespace fnx {

struct FileStamp {
  std::string name;
  uint64_t bytes = 0;
  int64_t mtime_ns = 0;
  bool operator==(const FileStamp&) const = default;
};

// Stamps of the checkpoint's tensor files, config.json and index, those that exist. Throws Input when one vanished.
std::vector<FileStamp> stamp_files(const Checkpoint& checkpoint);

// Empty when there is no entry, it is damaged, or a stamp differs.
std::optional<Fingerprint> cached_fingerprint(const Checkpoint& checkpoint, FingerprintKind kind,
                                              const std::vector<FileStamp>& stamps);
// Does nothing when the cache folder cannot be written: the cache only saves time.
void cache_fingerprint(const Checkpoint& checkpoint, const Fingerprint& fingerprint,
                       const std::vector<FileStamp>& stamps);

}  // namespace fnx
