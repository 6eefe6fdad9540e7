#include "libcore/engine/expert_profile.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>

#include "kernels/error.h"
#include "libcore/format/sealed_file.h"
#include "libcore/receipt/private_file.h"

namespace fnx {

namespace fs = std::filesystem;

namespace {

constexpr SealedFormat kFormat{"fnxprof\n", 1, "expert profile"};

// Holds the folder's lock, so that of two runs that end together one sees what the other wrote.
class FolderLock {
 public:
  explicit FolderLock(const fs::path& folder) : fd_(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)) {
    int locked = -1;
    while (fd_ >= 0 && (locked = ::flock(fd_, LOCK_EX)) != 0 && errno == EINTR) {
    }
    if (locked == 0) return;
    const int error = errno;
    if (fd_ >= 0) ::close(fd_);
    throw Error(ErrorKind::Output, fmt::format("{}: cannot be locked: {}", folder.string(), std::strerror(error)));
  }
  ~FolderLock() { ::close(fd_); }
  FolderLock(const FolderLock&) = delete;
  FolderLock& operator=(const FolderLock&) = delete;

 private:
  int fd_;
};

std::string difference(const ExpertProfile& p, const ExpertIdentity& identity, int64_t decay_percent) {
  std::string out = p.identity.difference(identity);
  if (p.decay_percent != decay_percent)
    out += fmt::format("{}decay_percent {}, not {}", out.empty() ? "" : "; ", p.decay_percent, decay_percent);
  return out;
}

ExpertProfile load_or_empty(const fs::path& file, const ExpertIdentity& identity) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(file, ignored))) return ExpertProfile(identity);
  ExpertProfile p = ExpertProfile::load(file);
  if (const std::string d = difference(p, identity, kProfileDecayPercent); !d.empty())
    throw Error(ErrorKind::Input, fmt::format("{} is of another run's kind ({}); move it away or give another "
                                              "--profile-dir; it was left untouched",
                                              file.string(), d));
  return p;
}

}  // namespace

ExpertProfile::ExpertProfile(const ExpertIdentity& id)
    : identity(id), counts(static_cast<size_t>(id.all_layers() * id.experts), 0) {}

ExpertProfile ExpertProfile::load(const fs::path& file) {
  const SealedFile sealed = unseal(kFormat, file);
  ExpertProfile p(ExpertIdentity::read(sealed.header, file.string()));
  p.decay_percent = header_integer(sealed.header, "decay_percent", 0, 100, file.string());
  p.runs = header_integer(sealed.header, "runs", 0, INT64_MAX, file.string());
  p.digest = sealed.digest;
  const size_t bytes = p.counts.size() * sizeof(uint64_t);
  if (sealed.body.size() != bytes)
    throw Error(ErrorKind::Input, fmt::format("{}: counts of {} bytes, {} layers of {} experts have {}", file.string(),
                                              sealed.body.size(), p.identity.all_layers(), p.identity.experts, bytes));
  std::memcpy(p.counts.data(), sealed.body.data(), bytes);
  return p;
}

void ExpertProfile::save(const fs::path& file) const {
  Json header = Json::object();
  identity.write(header);
  header["decay_percent"] = decay_percent;
  header["runs"] = runs;
  const std::string_view body(reinterpret_cast<const char*>(counts.data()), counts.size() * sizeof(uint64_t));
  write_private_file_atomic(file, seal(kFormat, header, body));
}

uint64_t ExpertProfile::total(int64_t l) const {
  return std::accumulate(layer(l).begin(), layer(l).end(), uint64_t{0});
}

void ExpertProfile::count(int64_t l, std::span<const int32_t> ids) {
  for (const int32_t id : ids) {
    if (l < 0 || l >= identity.all_layers() || id < 0 || id >= identity.experts)
      throw Error(ErrorKind::Internal, fmt::format("expert {} of layer {}, the profile has {} in {} layers", id, l,
                                                   identity.experts, identity.all_layers()));
    ++layer(l)[id];
  }
}

void ExpertProfile::decay(int64_t l, int64_t percent) {
  const auto keep = static_cast<uint64_t>(100 - percent);
  for (uint64_t& c : layer(l)) c = c / 100 * keep + c % 100 * keep / 100;
}

void ExpertProfile::merge(const ExpertProfile& other) {
  if (const std::string d = difference(other, identity, decay_percent); !d.empty())
    throw Error(ErrorKind::Input, "these profiles do not add up: " + d);
  for (size_t i = 0; i < counts.size(); ++i) counts[i] += other.counts[i];
  runs += other.runs;
}

ProfileRun::ProfileRun(const fs::path& folder, const ExpertIdentity& identity)
    : file_(folder /
            fmt::format("{}-rank{}of{}.fnxprofile", identity.checkpoint.substr(0, 16), identity.rank, identity.world)),
      start_(identity),
      added_(identity) {
  std::error_code error;
  if (fs::create_directories(folder, error)) fs::permissions(folder, fs::perms::owner_all, error);
  if (error) throw Error(ErrorKind::Output, fmt::format("{}: {}", folder.string(), error.message()));
  start_ = load_or_empty(file_, identity);
}

void ProfileRun::save() {
  if (saved_) throw Error(ErrorKind::Internal, "a run's counts were to be added to its profile twice");
  saved_ = true;
  if (std::all_of(added_.counts.begin(), added_.counts.end(), [](uint64_t c) { return c == 0; })) return;
  const FolderLock lock(file_.parent_path().empty() ? "." : file_.parent_path());
  ExpertProfile now = load_or_empty(file_, added_.identity);
  if (now.digest == start_.digest)
    for (int64_t l = 0; l < now.identity.all_layers(); ++l)
      if (added_.total(l) > 0) now.decay(l, now.decay_percent);
  added_.runs = 1;
  now.merge(added_);
  now.save(file_);
}

}  // namespace fnx
