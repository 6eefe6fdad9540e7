// A file mapped read-only. Nothing is read before it is touched.
#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <span>

namespace fnx {

class MappedFile {
 public:
  // Throws Input naming the file when it cannot be opened or is no regular file.
  static std::shared_ptr<const MappedFile> open(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return bytes_; }

 private:
  explicit MappedFile(std::span<const std::byte> bytes) : bytes_(bytes) {}
  std::span<const std::byte> bytes_;
};

}  // namespace fnx
