// A snapshot in a file, a sealed one (libcore/format/sealed_file.h) with the magic "fnxsnap\n": the header says what it
// belongs to, the body holds the tokens, I32 little-endian, and the states.
#pragma once

#include <filesystem>
#include <string>

#include "libcore/engine/state.h"

namespace fnx {

// What must be the same where a snapshot is taken and where it is used.
struct SnapshotOwner {
  std::string checkpoint;  // digest of its fingerprint
  std::string backend;     // states of one are not those of another
  DType kv_dtype = DType::F32;
  bool draft_head = false;
};

// Replaces the file whole or not at all; throws Output.
void write_snapshot(const std::filesystem::path& file, const SnapshotOwner& owner, const Snapshot& snapshot);
// Throws Input naming the file for one that is absent, damaged, cut short or belongs to something else.
Snapshot read_snapshot(const std::filesystem::path& file, const SnapshotOwner& owner);

}  // namespace fnx
