#include "libcore/format/sealed_file.h"

#include <fmt/format.h>

#include <bit>
#include <cstring>

#include "kernels/error.h"
#include "libcore/format/json_text.h"
#include "libcore/format/mapped_file.h"
#include "libcore/receipt/document.h"

namespace fnx {

static_assert(std::endian::native == std::endian::little);

namespace {

constexpr size_t kMagicBytes = 8, kDigestAt = 24, kDigestBytes = 16, kHeaderAt = kDigestAt + kDigestBytes;

struct Lengths {
  uint32_t version = 0, header = 0;
  uint64_t body = 0;
};
static_assert(sizeof(Lengths) == kDigestAt - kMagicBytes);

std::string hex_of(std::string_view bytes) {
  std::string out;
  for (const char c : bytes) out += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return out;
}

std::string bytes_of(const std::string& hex) {
  std::string out;
  for (size_t i = 0; i < hex.size(); i += 2) out += static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16));
  return out;
}

}  // namespace

std::string seal(const SealedFormat& format, const Json& header, std::string_view body) {
  std::string sealed = canonical_json(header);
  const Lengths lengths{format.version, static_cast<uint32_t>(sealed.size()), body.size()};
  sealed += body;
  std::string out(format.magic);
  out.append(reinterpret_cast<const char*>(&lengths), sizeof lengths);
  out += bytes_of(xxh3_hex(sealed.data(), sealed.size()));
  return out + sealed;
}

SealedFile unseal(const SealedFormat& format, const std::filesystem::path& file) {
  const auto mapped = MappedFile::open(file);
  const std::string_view bytes(reinterpret_cast<const char*>(mapped->bytes().data()), mapped->bytes().size());
  const auto refuse = [&](const std::string& why) {
    throw Error(ErrorKind::Input, fmt::format("{}: {}", file.string(), why));
  };
  if (bytes.empty()) refuse(fmt::format("is empty and no {}", format.what));
  if (!bytes.starts_with(format.magic.substr(0, std::min(bytes.size(), kMagicBytes))))
    refuse(fmt::format("is no {} of fnx", format.what));
  if (bytes.size() < kHeaderAt) refuse(fmt::format("is cut short: {} bytes, a {} has more", bytes.size(), format.what));
  Lengths lengths;
  std::memcpy(&lengths, bytes.data() + kMagicBytes, sizeof lengths);
  if (lengths.version != format.version)
    refuse(fmt::format("is a {} of version {}, this build reads version {}", format.what, lengths.version,
                       format.version));
  const uint64_t rest = bytes.size() - kHeaderAt;
  if (lengths.header > rest || lengths.body != rest - lengths.header)
    refuse(fmt::format("is cut short or damaged: {} bytes of header and {} of body announced, {} are there",
                       lengths.header, lengths.body, rest));
  SealedFile out;
  const std::string_view sealed = bytes.substr(kHeaderAt);
  out.digest = xxh3_hex(sealed.data(), sealed.size());
  if (const std::string stored = hex_of(bytes.substr(kDigestAt, kDigestBytes)); stored != out.digest)
    refuse(fmt::format("is damaged: its bytes hash to {}, it was written as {}", out.digest, stored));
  out.header = parse_json(sealed.substr(0, lengths.header), file.string());
  out.body = sealed.substr(lengths.header);
  return out;
}

}  // namespace fnx
