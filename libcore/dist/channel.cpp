#include "libcore/dist/channel.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace fnx {

namespace {

constexpr char kData = 'd', kFailure = 'f';
constexpr int kExchangeWaits = 500;                 // of a millisecond
constexpr uint64_t kMostBytes = uint64_t{1} << 36;  // of a message: beyond it the bytes are not ours

struct Header {
  char kind = kData;
  char magic[3] = {'f', 'n', 'x'};
  int32_t error = 0;  // ErrorKind of a failure
  uint64_t bytes = 0;
};

bool read_all(int socket, void* to, size_t bytes) {
  auto* at = static_cast<char*>(to);
  while (bytes > 0) {
    const ssize_t n = ::recv(socket, at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

bool write_all(int socket, const void* from, size_t bytes) {
  const auto* at = static_cast<const char*>(from);
  while (bytes > 0) {
    const ssize_t n = ::send(socket, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= static_cast<size_t>(n);
  }
  return true;
}

Error silent_end(int peer) {
  return Error(ErrorKind::Device, fmt::format("rank {} ended without a word: it was killed or its host is gone", peer));
}

// Blobs one after the other, each behind its length.
std::string join(const std::vector<std::string>& parts) {
  std::string out;
  for (const std::string& p : parts) {
    const uint64_t bytes = p.size();
    out.append(reinterpret_cast<const char*>(&bytes), sizeof bytes);
    out += p;
  }
  return out;
}

std::vector<std::string> split(const std::string& joined) {
  std::vector<std::string> parts;
  for (size_t at = 0; at < joined.size();) {
    uint64_t bytes = 0;
    std::memcpy(&bytes, joined.data() + at, sizeof bytes);
    parts.push_back(joined.substr(at + sizeof bytes, bytes));
    at += sizeof bytes + bytes;
  }
  return parts;
}

}  // namespace

HostChannel::HostChannel(int rank, int world, std::vector<int> sockets)
    : rank_(rank), world_(world), sockets_(std::move(sockets)) {
  if (sockets_.size() != static_cast<size_t>(rank == 0 ? world - 1 : 1))
    throw Error(ErrorKind::Internal, fmt::format("rank {} of {} with {} sockets", rank, world, sockets_.size()));
}

HostChannel::~HostChannel() {
  end_watch();
  for (const int s : sockets_) ::close(s);
}

void HostChannel::ended(const Error& error) {
  const std::lock_guard lock(failing_);
  if (!failure_) failure_ = error;
  throw *failure_;
}

std::optional<Error> HostChannel::failure() {
  const std::lock_guard lock(failing_);
  return failure_;
}

void HostChannel::check() {
  if (const std::optional<Error> error = failure()) throw *error;
}

void HostChannel::send_message(int socket, char kind, std::string_view bytes, int peer) {
  Header h;
  h.kind = kind, h.bytes = bytes.size();
  if (write_all(socket, &h, sizeof h) && write_all(socket, bytes.data(), bytes.size())) return;
  receive(socket, peer);  // what it said before it ended, thrown
  ended(silent_end(peer));
}

std::string HostChannel::receive(int socket, int peer) {
  Header h;
  if (!read_all(socket, &h, sizeof h)) ended(silent_end(peer));
  if (std::memcmp(h.magic, Header().magic, sizeof h.magic) != 0 || h.bytes > kMostBytes)
    ended(Error(ErrorKind::Device, fmt::format("rank {} sent something that is no message of a rank", peer)));
  std::string bytes(h.bytes, '\0');
  if (!read_all(socket, bytes.data(), bytes.size())) ended(silent_end(peer));
  if (h.kind == kFailure) ended(Error(static_cast<ErrorKind>(h.error), bytes));
  return bytes;
}

std::vector<std::string> HostChannel::exchange(std::string_view own) {
  const std::lock_guard lock(reading_);
  check();
  if (rank_ != 0) {
    send_message(sockets_[0], kData, own, 0);
    std::vector<std::string> all = split(receive(sockets_[0], 0));
    if (all.size() != static_cast<size_t>(world_))
      ended(Error(ErrorKind::Internal, fmt::format("rank 0 sent {} parts, {} ranks run", all.size(), world_)));
    return all;
  }
  std::vector<std::string> all{std::string(own)};
  for (size_t i = 0; i < sockets_.size(); ++i) all.push_back(receive(sockets_[i], peer_of(i)));
  const std::string joined = join(all);
  for (size_t i = 0; i < sockets_.size(); ++i) send_message(sockets_[i], kData, joined, peer_of(i));
  return all;
}

void HostChannel::fail(ErrorKind kind, const std::string& why) noexcept {
  Header h;
  const std::string text = why.starts_with("rank ") ? why : "rank " + std::to_string(rank_) + ": " + why;
  h.kind = kFailure, h.error = static_cast<int32_t>(kind), h.bytes = text.size();
  for (const int s : sockets_)
    if (write_all(s, &h, sizeof h)) write_all(s, text.data(), text.size());
}

void HostChannel::watch(std::function<void()> lost) {
  stop_ = false;
  watcher_ = std::thread([this, lost = std::move(lost)] { watch_loop(lost); });
}

void HostChannel::end_watch() {
  stop_ = true;
  if (watcher_.joinable()) watcher_.join();
}

void HostChannel::watch_loop(const std::function<void()>& lost) {
  while (!stop_) {
    std::vector<pollfd> fds;
    for (const int s : sockets_) fds.push_back({s, POLLRDHUP, 0});
    if (::poll(fds.data(), fds.size(), 50) <= 0) continue;
    for (size_t i = 0; i < fds.size(); ++i) {
      if (fds[i].revents == 0) continue;
      // An exchange under way meets the end by itself, unless it waits for a rank that waits for this one.
      std::unique_lock lock(reading_, std::defer_lock);
      for (int wait = 0; wait < kExchangeWaits && !stop_ && !lock.try_lock(); ++wait)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
      if (stop_) return;
      try {
        while (lock.owns_lock()) receive(sockets_[i], peer_of(i));
        ended(silent_end(peer_of(i)));
      } catch (const Error& error) {
        fail(error.kind(), error.what());
      }
      for (const int s : sockets_) ::shutdown(s, SHUT_RDWR);
      lost();
      return;
    }
  }
}

std::vector<std::unique_ptr<HostChannel>> make_local_channels(int world) {
  std::vector<int> roots;
  std::vector<std::unique_ptr<HostChannel>> out(1);
  for (int r = 1; r < world; ++r) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
      throw Error(ErrorKind::Internal, fmt::format("socketpair: {}", std::strerror(errno)));
    roots.push_back(ends[0]);
    out.push_back(std::make_unique<HostChannel>(r, world, std::vector<int>{ends[1]}));
  }
  out[0] = std::make_unique<HostChannel>(0, world, std::move(roots));
  return out;
}

}  // namespace fnx
