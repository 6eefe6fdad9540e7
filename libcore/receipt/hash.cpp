#include <openssl/evp.h>
#include <xxhash.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

#include "kernels/error.h"
#include "libcore/receipt/receipt.h"

namespace fnx {
namespace {

std::string hex(const unsigned char* bytes, size_t count) {
  static const char* const kDigits = "0123456789abcdef";
  std::string out;
  for (size_t i = 0; i < count; ++i) {
    out += kDigits[bytes[i] >> 4];
    out += kDigits[bytes[i] & 15];
  }
  return out;
}

class Sha256 {
 public:
  Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
    check(EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr));
  }
  void update(const void* data, size_t bytes) { check(EVP_DigestUpdate(context_.get(), data, bytes)); }
  std::string finish() {
    std::array<unsigned char, 32> digest{};
    check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr));
    return hex(digest.data(), digest.size());
  }

 private:
  static void check(int ok) {
    if (ok != 1) throw Error(ErrorKind::Internal, "libcrypto refused SHA-256");
  }
  std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

}  // namespace

std::string xxh3_hex(const void* data, size_t bytes) {
  XXH128_canonical_t canonical;
  XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, bytes));
  return hex(canonical.digest, sizeof canonical.digest);
}

std::string sha256_hex(const void* data, size_t bytes) {
  Sha256 sha;
  sha.update(data, bytes);
  return sha.finish();
}

std::string sha256_file(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) throw Error(ErrorKind::Input, file.string() + ": cannot be opened: " + std::strerror(errno));
  Sha256 sha;
  std::vector<char> buffer(1 << 20);
  while (in.read(buffer.data(), static_cast<std::streamsize>(buffer.size())) || in.gcount() > 0)
    sha.update(buffer.data(), static_cast<size_t>(in.gcount()));
  if (in.bad()) throw Error(ErrorKind::Input, file.string() + ": reading failed");
  return sha.finish();
}

std::string token_hash(const std::vector<int32_t>& ids) {
  std::vector<unsigned char> bytes;
  bytes.reserve(ids.size() * 4);
  for (int32_t id : ids)
    for (int shift = 0; shift < 32; shift += 8)
      bytes.push_back(static_cast<unsigned char>(static_cast<uint32_t>(id) >> shift));
  return xxh3_hex(bytes.data(), bytes.size());
}

}  // namespace fnx
