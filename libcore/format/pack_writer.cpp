#include "libcore/format/pack_writer.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>

#include "kernels/error.h"
#include "libcore/receipt/receipt.h"

namespace fnx {
namespace fs = std::filesystem;
namespace {

constexpr uint64_t kPieceBytes = 4 << 20;

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::Output, what); }

class OutFile {
 public:
  explicit OutFile(const fs::path& path)
      : path_(path), fd_(::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666)) {
    if (fd_ < 0) failed();
  }
  ~OutFile() {
    if (fd_ >= 0) ::close(fd_);
  }
  OutFile(const OutFile&) = delete;
  OutFile& operator=(const OutFile&) = delete;

  void write(std::span<const std::byte> bytes, uint64_t at) {
    while (!bytes.empty()) {
      const ssize_t n = ::pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(at));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) failed();
      bytes = bytes.subspan(static_cast<size_t>(n));
      at += static_cast<uint64_t>(n);
    }
  }
  void finish(uint64_t size) {
    const int fd = std::exchange(fd_, -1);
    const bool sized = ::ftruncate(fd, static_cast<off_t>(size)) == 0;
    const int error = errno;
    if (::close(fd) == 0 && sized) return;
    if (!sized) errno = error;
    failed();
  }

 private:
  [[noreturn]] void failed() const { fail(path_.string() + ": cannot be written: " + std::strerror(errno)); }
  fs::path path_;
  int fd_;
};

// A folder beside `target` that becomes it, or goes away.
class NewFolder {
 public:
  explicit NewFolder(const fs::path& target) : target_(fs::absolute(target).lexically_normal()) {
    if (!target_.has_filename()) target_ = target_.parent_path();
    std::error_code error;
    if (fs::exists(target_, error) && !(fs::is_directory(target_, error) && fs::is_empty(target_, error)))
      fail(fmt::format("{} exists and is no empty folder; give another or remove it", target.string()));
    path_ = target_.parent_path() / fmt::format(".{}.{}.part", target_.filename().string(), ::getpid());
    if (!fs::create_directories(path_, error))
      fail(fmt::format("{}: cannot be made: {}", path_.string(), error ? error.message() : "it exists"));
  }
  ~NewFolder() {
    std::error_code ignored;
    if (!path_.empty()) fs::remove_all(path_, ignored);
  }
  NewFolder(const NewFolder&) = delete;
  NewFolder& operator=(const NewFolder&) = delete;

  const fs::path& path() const { return path_; }
  void keep() {
    std::error_code error;
    fs::rename(path_, target_, error);
    if (error) fail(fmt::format("{}: cannot be put in place: {}", target_.string(), error.message()));
    path_.clear();
  }

 private:
  fs::path target_, path_;
};

// Length and header, padded to 8 bytes. Names and dtypes need no escapes.
std::string header_of(std::span<const TensorInfo> tensors) {
  std::string text = R"({"__metadata__":{"format":"pt"})";
  for (const TensorInfo& t : tensors)
    fmt::format_to(std::back_inserter(text), R"(,"{}":{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", t.name,
                   t.dtype_text, fmt::join(t.shape, ","), t.offset, t.offset + t.bytes);
  text += '}';
  text.append((8 - text.size() % 8) % 8, ' ');
  std::string out;
  for (int i = 0; i < 8; ++i) out += static_cast<char>(uint64_t{text.size()} >> (8 * i));
  return out + text;
}

std::string index_of(const SyntheticSource& source) {
  uint64_t listed = 0;
  std::string map;
  for (const TensorInfo& t : source.tensors()) {
    const SourceFile& file = source.files()[t.file];
    if (!file.in_index) continue;
    listed += t.bytes;
    fmt::format_to(std::back_inserter(map), R"({}"{}":"{}")", map.empty() ? "" : ",", t.name, file.name);
  }
  return fmt::format(R"({{"metadata":{{"total_size":{}}},"weight_map":{{{}}}}})", listed, map);
}

bool kept_when_sparse(const TensorInfo& t) { return t.dtype == DType::I32 || t.dtype == DType::I64; }

}  // namespace

uint64_t write_pack(const SyntheticSource& source, const fs::path& folder, const PackWriteOptions& options) {
  NewFolder out(folder);
  std::error_code error;
  if (const fs::space_info space = fs::space(out.path(), error);
      !error && !options.sparse && space.available < source.bytes())
    fail(
        fmt::format("{} needs {} bytes, {} has {} free; --sparse writes headers alone, layers= and experts= make the "
                    "model smaller",
                    source.spec().text(), source.bytes(), folder.string(), space.available));
  uint64_t written = 0, done = 0;
  std::vector<std::byte> piece(kPieceBytes);
  std::span<const TensorInfo> rest = source.tensors();
  for (uint32_t f = 0; f < source.files().size(); ++f) {
    size_t count = 0;
    while (count < rest.size() && rest[count].file == f) ++count;
    const std::span<const TensorInfo> tensors = rest.first(count);
    rest = rest.subspan(count);
    OutFile file(out.path() / source.files()[f].name);
    const std::string header = header_of(tensors);
    file.write(std::as_bytes(std::span(header)), 0);
    for (const TensorInfo& t : tensors) {
      for (uint64_t at = 0; at < t.bytes && (!options.sparse || kept_when_sparse(t)); at += kPieceBytes) {
        const std::span<std::byte> bytes = std::span(piece).first(std::min(kPieceBytes, t.bytes - at));
        source.fill(t, at, bytes);
        file.write(bytes, header.size() + t.offset + at);
        written += bytes.size();
      }
      done += t.bytes;
      if (options.progress) options.progress(done, source.bytes());
      if (options.stopping && options.stopping()) fail("stopped before the end");
    }
    file.finish(header.size() + source.files()[f].bytes);
  }
  write_file_atomic(out.path() / "model.safetensors.index.json", index_of(source));
  write_file_atomic(out.path() / "config.json", source.config_json().dump(1) + "\n");
  const nlohmann::ordered_json generation = {{"eos_token_id", source.stop_ids()}};
  write_file_atomic(out.path() / "generation_config.json", generation.dump(1) + "\n");
  out.keep();
  return written;
}

}  // namespace fnx
