// A small binary file that proves itself whole: what fnx writes for later runs of its own.
//
//   bytes 0-7    magic
//   bytes 8-11   version, u32 (all numbers little-endian)
//   bytes 12-15  bytes of the header, u32
//   bytes 16-23  bytes of the body, u64
//   bytes 24-39  XXH3-128 of header and body, canonical order
//   then         the header, one JSON object, and the body
#pragma once

#include <filesystem>
#include <span>
#include <string>
#include <string_view>

#include "libcore/receipt/receipt.h"

namespace fnx {

struct SealedFormat {
  std::string_view magic;  // 8 bytes
  uint32_t version = 1;
  std::string_view what;  // "expert profile": what errors call it
};

struct SealedFile {
  Json header;
  std::string body;
  std::string digest;  // the stored XXH3-128, 32 hex digits
};

// The file's bytes.
std::string seal(const SealedFormat& format, const Json& header, std::string_view body);

// Throws Input naming the file for one that is absent, empty, of another kind or version, cut short, longer than it
// says, or damaged.
SealedFile unseal(const SealedFormat& format, const std::filesystem::path& file);

}  // namespace fnx
