#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>

#include "kernels/error.h"
#include "libcore/receipt/private_file.h"
#include "libcore/receipt/receipt.h"
#include "libcore/receipt/writable.h"

namespace fnx {

namespace fs = std::filesystem;

bool written_in_place(const fs::path& file) {
  std::error_code ignored;
  const fs::file_status status = fs::status(file, ignored);
  return fs::exists(status) && !fs::is_regular_file(status) && !fs::is_directory(status);
}

namespace {

[[noreturn]] void fail(const fs::path& file, const std::string& what, int error) {
  throw Error(ErrorKind::Output, file.string() + ": " + what + ": " + std::strerror(error));
}

// Returns errno or 0; closes the descriptor in any case.
int write_and_close(int fd, std::string_view bytes) {
  int error = 0;
  while (!bytes.empty() && error == 0) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n >= 0)
      bytes.remove_prefix(static_cast<size_t>(n));
    else if (errno != EINTR)
      error = errno;
  }
  if (::close(fd) != 0 && error == 0) error = errno;
  return error;
}

// A link is followed, so that the file it names is replaced and the link stays; /dev/stdout links to no path.
fs::path target_of(const fs::path& file) {
  std::error_code ignored;
  return fs::is_symlink(file, ignored) && !written_in_place(file) ? fs::weakly_canonical(file, ignored) : file;
}

struct Temporary {
  fs::path path;
  int fd;
};

// Beside the target; `mode` is that of a new file, less the umask.
Temporary open_temporary(const fs::path& file, const fs::path& target, mode_t mode) {
  static std::atomic<unsigned> counter{0};
  const fs::path path = target.parent_path() / ("." + target.filename().string() + "." + std::to_string(::getpid()) +
                                                "." + std::to_string(counter++) + ".tmp");
  const int fd = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
  if (fd < 0) fail(file, "cannot be written", errno);
  return {path, fd};
}

void write_atomic(const fs::path& file, std::string_view bytes, mode_t mode) {
  std::error_code ignored;
  const fs::path target = target_of(file);
  if (fs::is_directory(target, ignored)) fail(file, "cannot be written", EISDIR);
  if (written_in_place(target)) {
    const int fd = ::open(target.c_str(), O_WRONLY | O_CLOEXEC);
    if (fd < 0) fail(file, "cannot be written", errno);
    if (const int error = write_and_close(fd, bytes)) fail(file, "cannot be written", error);
    return;
  }
  const auto [temporary, fd] = open_temporary(file, target, mode);
  int error = write_and_close(fd, bytes);
  if (error == 0 && ::rename(temporary.c_str(), target.c_str()) != 0) error = errno;
  if (error != 0) {
    ::unlink(temporary.c_str());
    fail(file, "cannot be written", error);
  }
}

}  // namespace

void require_writable(const fs::path& file) {
  std::error_code ignored;
  const fs::path target = target_of(file);
  if (fs::is_directory(target, ignored)) fail(file, "cannot be written", EISDIR);
  if (written_in_place(target)) {
    if (::access(target.c_str(), W_OK) != 0) fail(file, "cannot be written", errno);
    return;
  }
  const auto [temporary, fd] = open_temporary(file, target, 0600);
  ::close(fd);
  ::unlink(temporary.c_str());
}

void write_file_atomic(const fs::path& file, std::string_view bytes) { write_atomic(file, bytes, 0666); }

void write_private_file_atomic(const fs::path& file, std::string_view bytes) { write_atomic(file, bytes, 0600); }

}  // namespace fnx
