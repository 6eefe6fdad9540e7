// Hashes that identify a checkpoint.
//
// full: a tensor's digest is XXH3-128 of its bytes. Its record is the bytes of "name dtype [d0,d1,...] digest\n"; the
// fingerprint is XXH3-128 of all records in name order, so that it does not depend on files and their order. A family's
// digest is the same over the family's records.
// advisory: the same over records that need little reading: config.json and the index, each "name [bytes] digest\n",
// and "name dtype [shape]\n" of every routed expert's trellis, every 64th of which also has the XXH3-128 of its first
// 4096 bytes. It tells revisions and quantizations apart and proves nothing about the bytes it does not read.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "libcore/format/checkpoint.h"
#include "libcore/receipt/receipt.h"

namespace fnx {

enum class FingerprintKind : uint8_t { Full, Advisory };

struct FamilyDigest {
  std::string name;
  uint64_t tensors = 0, bytes = 0;
  std::string digest;
};

struct TensorDigest {
  std::string name, digest;
};

struct Fingerprint {
  FingerprintKind kind = FingerprintKind::Full;
  std::string digest;                  // 32 hex digits
  bool cached = false;                 // taken from the cache; no tensor was read
  uint64_t tensors = 0, bytes = 0;     // what the fingerprint stands for
  std::vector<FamilyDigest> families;  // by name; full only
  std::vector<TensorDigest> details;   // by name; full, on request

  // For Receipt::add_subject.
  Json subject() const;
};

struct FingerprintOptions {
  bool cache = true;                                            // look into, and write, the user's cache folder
  bool per_tensor = false;                                      // fill `details`; such a fingerprint is always computed
  int threads = 0;                                              // 0: one a hardware thread, at most 16
  std::function<void(uint64_t done, uint64_t total)> progress;  // bytes; called from any thread
  std::function<bool()> stopping;                               // true ends the work with an Output error
};

const char* fingerprint_kind_name(FingerprintKind kind);

// Throws Input naming the file when one cannot be read or changes meanwhile.
Fingerprint fingerprint(const Checkpoint& checkpoint, FingerprintKind kind, const FingerprintOptions& options = {});

// SHA-256 of every tensor file of the checkpoint, in files() order.
std::vector<std::string> sha256_of_files(const Checkpoint& checkpoint, const FingerprintOptions& options = {});

}  // namespace fnx
