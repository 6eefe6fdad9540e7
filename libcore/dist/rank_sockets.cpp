// Ranks over TCP.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <netdb.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "libcore/dist/rank_place.h"

namespace fnx {

namespace {

using Clock = std::chrono::steady_clock;
constexpr auto kMeeting = std::chrono::seconds(120);
constexpr char kMagic[8] = {'f', 'n', 'x', 'r', 'a', 'n', 'k', '1'};

struct Hello {
  char magic[8];
  int32_t rank, world;
};

class Socket {
 public:
  explicit Socket(int fd) : fd_(fd) {}
  Socket(Socket&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  int get() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

[[noreturn]] void fail(const std::string& what) { throw Error(ErrorKind::Device, "ranks: " + what); }

// A host that is gone is noticed within seconds; small messages leave at once.
void tune(int fd) {
  const int on = 1, idle = 2, interval = 1, count = 3, timeout_ms = 6000;
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPINTVL, &interval, sizeof interval);
  ::setsockopt(fd, IPPROTO_TCP, TCP_KEEPCNT, &count, sizeof count);
  ::setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &timeout_ms, sizeof timeout_ms);
}

struct Addresses {
  Addresses(const std::string& host, int port) {
    addrinfo hints{};
    hints.ai_socktype = SOCK_STREAM;
    const int code = ::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &list);
    if (code != 0) fail(fmt::format("{}: {}", host, ::gai_strerror(code)));
  }
  ~Addresses() { ::freeaddrinfo(list); }
  addrinfo* list = nullptr;
};

Socket listen_on(int port) {
  // IPv6 takes IPv4 too; a host without IPv6 has IPv4 alone.
  for (const int family : {AF_INET6, AF_INET}) {
    Socket s(::socket(family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    if (s.get() < 0) continue;
    const int on = 1, off = 0;
    ::setsockopt(s.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    sockaddr_in6 six{};
    sockaddr_in four{};
    six.sin6_family = AF_INET6, six.sin6_port = htons(static_cast<uint16_t>(port));
    four.sin_family = AF_INET, four.sin_port = htons(static_cast<uint16_t>(port));
    if (family == AF_INET6) ::setsockopt(s.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);
    const auto* at = family == AF_INET6 ? reinterpret_cast<sockaddr*>(&six) : reinterpret_cast<sockaddr*>(&four);
    if (::bind(s.get(), at, family == AF_INET6 ? sizeof six : sizeof four) == 0 && ::listen(s.get(), 64) == 0) return s;
    if (errno == EADDRINUSE) break;
  }
  fail(fmt::format("rank 0 cannot listen at port {}: {}; set MASTER_PORT to another", port, std::strerror(errno)));
}

// The caller's rank, or -1 when it is none of ours.
int greet(int fd, int world) {
  Hello hello{};
  pollfd ready{fd, POLLIN, 0};
  if (::poll(&ready, 1, 5000) != 1 || ::recv(fd, &hello, sizeof hello, MSG_WAITALL) != sizeof hello) return -1;
  if (std::memcmp(hello.magic, kMagic, sizeof kMagic) != 0 || hello.rank < 1 || hello.rank >= world) return -1;
  if (hello.world != world)
    fail(fmt::format("rank {} was started with --tp {}, rank 0 with {}", hello.rank, hello.world, world));
  return hello.rank;
}

Socket call(const RankPlace& place, Clock::time_point until) {
  std::string last;
  while (Clock::now() < until) {
    const Addresses to(place.address, place.port);
    for (const addrinfo* a = to.list; a != nullptr; a = a->ai_next) {
      Socket s(::socket(a->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
      Hello hello{{}, place.rank, place.world};
      std::memcpy(hello.magic, kMagic, sizeof kMagic);
      if (s.get() >= 0 && ::connect(s.get(), a->ai_addr, a->ai_addrlen) == 0 &&
          ::send(s.get(), &hello, sizeof hello, MSG_NOSIGNAL) == sizeof hello)
        return s;
      last = std::strerror(errno);
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  }
  fail(fmt::format("rank 0 does not answer at {}:{}: {}", place.address, place.port, last));
}

}  // namespace

std::unique_ptr<HostChannel> connect_ranks(const RankPlace& place) {
  const auto until = Clock::now() + kMeeting;
  if (place.rank != 0) {
    Socket s = call(place, until);
    tune(s.get());
    return std::make_unique<HostChannel>(place.rank, place.world, std::vector<int>{s.release()});
  }
  const Socket listener = listen_on(place.port);
  std::vector<Socket> peers;
  for (int r = 1; r < place.world; ++r) peers.emplace_back(-1);
  for (int missing = place.world - 1; missing > 0;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(until - Clock::now()).count();
    pollfd ready{listener.get(), POLLIN, 0};
    if (left <= 0 || ::poll(&ready, 1, static_cast<int>(left)) == 0)
      fail(fmt::format("{} of {} ranks did not call within two minutes", missing, place.world - 1));
    Socket s(::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (s.get() < 0) continue;
    const int rank = greet(s.get(), place.world);
    if (rank < 0) continue;
    if (peers[rank - 1].get() >= 0) fail(fmt::format("two processes say that they are rank {}", rank));
    tune(s.get());
    peers[rank - 1] = std::move(s);
    --missing;
  }
  std::vector<int> sockets;
  for (Socket& s : peers) sockets.push_back(s.release());
  return std::make_unique<HostChannel>(0, place.world, std::move(sockets));
}

}  // namespace fnx
