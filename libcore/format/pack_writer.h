// Writes a synthetic model as a checkpoint folder: shards, index, n-gram side file and configs.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>

#include "libcore/format/synthetic_source.h"

namespace fnx {

struct PackWriteOptions {
  // Holes in place of data; only codebook markers and n-gram constants are written. Such a pack can be inspected, and
  // all its weights read as zero.
  bool sparse = false;
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes
  std::function<bool()> stopping;                               // true ends the work with an Output error
};

// The folder appears when it is whole; it must not exist before, or be empty. Returns the bytes of data written, holes
// not counted. Throws Output, and leaves nothing behind.
uint64_t write_pack(const SyntheticSource& source, const std::filesystem::path& folder,
                    const PackWriteOptions& options = {});

}  // namespace fnx
